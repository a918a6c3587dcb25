//! Combines tables of settings: values that one table lacks are taken from another. The macro `layer` lists the
//! settings of a table, and declares their roles.

/// A special treatment of a setting.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// The given value is not in a run's identity: either the identity has values that are computed from it, or the
    /// setting affects only the run's folder, speed or logging.
    NotIdentity,
    /// May change when a run is resumed.
    Resumable,
    /// Not in the identity, but must be equal on all ranks, because it determines when the ranks communicate.
    Together,
    /// A path, which may differ between machines: ranks compare the contents of the file or folder.
    Path,
    /// A value that may contain commas, and is never a list of values.
    NotList,
}

/// A table of settings: a struct of optional fields. Fields that are not set can be taken from another table.
pub(super) trait Layer {
    /// The fields, with their roles.
    const DECLARED: &'static [(&'static str, &'static [Role])];

    /// The fields that are set.
    fn given(&self) -> Vec<&'static str>;

    /// The name of the first field that is set and begins with `prefix`. Each `_` is replaced by `-`.
    fn first_of(&self, prefix: &str) -> Option<String> {
        self.given().into_iter().find(|field| field.starts_with(prefix)).map(|field| field.replace('_', "-"))
    }

    /// These settings. A field that they do not set is taken from `under`.
    fn or(self, under: Self) -> Self;
}

/// Implements [`Layer`] for the struct `$table`. All fields of the struct must be listed, or compilation fails.
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
