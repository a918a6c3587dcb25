//! Layers of settings: a value that a layer lacks is taken from the layer below. The macro `layer` lists the settings
//! of a table, and declares their roles.

/// How resuming, comparing and the ranks treat a setting.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// The identity of a run does not contain the setting as it was typed: the setting determines only the folder, the
    /// speed or the logging of the run, or another key stands for the setting.
    NotIdentity,
    /// May change when a run is resumed.
    Resumable,
    /// Not in the identity, but all ranks must agree on the setting, which determines when the ranks act together.
    Together,
    /// A path, which may differ between machines: ranks compare the contents of the file or folder.
    Path,
    /// A value that may contain commas, and is never a list of values.
    NotList,
}

/// A table of settings, whose missing values can be taken from another table.
pub(super) trait Layer {
    /// The fields, with their roles.
    const DECLARED: &'static [(&'static str, &'static [Role])];

    /// The fields that are set.
    fn given(&self) -> Vec<&'static str>;

    /// The first field that is set and begins with `prefix`, as its flag is written.
    fn first_of(&self, prefix: &str) -> Option<String> {
        self.given().into_iter().find(|field| field.starts_with(prefix)).map(|field| field.replace('_', "-"))
    }

    /// These settings. A field that they do not set is taken from `under`.
    fn or(self, under: Self) -> Self;
}

/// Implements [`Layer`] for a table. A field of the table that is not listed is a compile error.
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
