//! Sweeps that are built in.

/// Names and texts.
pub const SHIPPED: [(&str, &str); 3] = [
    ("tiny", include_str!("../../sweeps/tiny.toml")),
    ("paper-mini", include_str!("../../sweeps/paper-mini.toml")),
    ("paper", include_str!("../../sweeps/paper.toml")),
];
