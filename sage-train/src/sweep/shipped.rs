//! The built-in sweeps.

/// Name and TOML text of each built-in sweep.
pub const SHIPPED: [(&str, &str); 13] = [
    ("tiny", include_str!("../../sweeps/tiny.toml")),
    ("paper-mini", include_str!("../../sweeps/paper-mini.toml")),
    ("products-mini", include_str!("../../sweeps/products-mini.toml")),
    ("attn-qat-mini", include_str!("../../sweeps/attn-qat-mini.toml")),
    ("layers-mini", include_str!("../../sweeps/layers-mini.toml")),
    ("linear-mini", include_str!("../../sweeps/linear-mini.toml")),
    ("window-mini", include_str!("../../sweeps/window-mini.toml")),
    ("muon-mini", include_str!("../../sweeps/muon-mini.toml")),
    ("optimizer-mini", include_str!("../../sweeps/optimizer-mini.toml")),
    ("continuation-mini", include_str!("../../sweeps/continuation-mini.toml")),
    ("sla2-tiny", include_str!("../../sweeps/sla2-tiny.toml")),
    ("sla2-prose", include_str!("../../sweeps/sla2-prose.toml")),
    ("paper", include_str!("../../sweeps/paper.toml")),
];
