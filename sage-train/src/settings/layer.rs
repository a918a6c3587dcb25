//! Settings over settings: what one layer leaves open is taken from the next.

/// Settings that can be laid over others.
pub(super) trait Layer {
    /// Field by field, what is set here, or else there.
    fn or(self, under: Self) -> Self;
}

/// Implements [`Layer`] for a table. A table of which a field is not listed does not compile.
macro_rules! layer {
    ($table:ident: $($field:ident),+) => {
        impl $crate::settings::layer::Layer for $table {
            fn or(self, under: Self) -> Self {
                Self { $($field: self.$field.or(under.$field)),+ }
            }
        }
    };
}

pub(super) use layer;
