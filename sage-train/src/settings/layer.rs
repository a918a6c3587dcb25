//! Settings over settings: what one layer leaves open is taken from the next. And what each setting is to a run, which is declared where
//! the tables list their settings.

/// What a setting is to a run, in addition to its value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// Not in the identity of a run as it was typed: it says where the run is, how long its parts take or how closely it is watched, and not what it
    /// computes; or another key stands for it.
    Beside,
    /// May change when a run is resumed.
    Changes,
    /// Not in the identity, but all ranks must agree on it: it says when they do something together.
    Together,
    /// A path, which differs between machines: ranks compare what is behind it.
    Path,
    /// Its value may contain a comma, and is never a list of values.
    Whole,
}

/// Settings that can be laid over others.
pub(super) trait Layer {
    /// The fields, with their roles.
    const DECLARED: &'static [(&'static str, &'static [Role])];

    /// The fields that are set.
    fn given(&self) -> Vec<&'static str>;

    /// The first setting that is set and whose field begins with `prefix`, as flags write it.
    fn first_of(&self, prefix: &str) -> Option<String> {
        self.given().into_iter().find(|field| field.starts_with(prefix)).map(|field| field.replace('_', "-"))
    }

    /// Field by field, what is set here, or else there.
    fn or(self, under: Self) -> Self;
}

/// Implements [`Layer`] for a table. A table of which a field is not listed does not compile.
macro_rules! layer {
    ($table:ident: $($field:ident $([$($role:ident)+])?),+ $(,)?) => {
        impl $crate::settings::layer::Layer for $table {
            const DECLARED: &'static [(&'static str, &'static [$crate::settings::layer::Role])] =
                &[$((stringify!($field), &[$($($crate::settings::layer::Role::$role),+)?])),+];

            fn given(&self) -> Vec<&'static str> {
                let all = [$((stringify!($field), self.$field.is_some())),+];
                all.into_iter().filter_map(|(field, is_given)| is_given.then_some(field)).collect()
            }

            fn or(self, under: Self) -> Self {
                Self { $($field: self.$field.or(under.$field)),+ }
            }
        }
    };
}

pub(super) use layer;
