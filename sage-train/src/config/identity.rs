//! The identity of a run: the resolved values of every setting that its results depend on.

use std::collections::{BTreeMap, BTreeSet};

use candle_sage::Scheme;
use clap::ValueEnum;
use toml::{Table, Value};

use super::Config;
use crate::model::{LlamaConfig, Windows};
use crate::optim::{MuonConfig, Optimizer};
use crate::quantity::Quantity;
use crate::settings::{Attn, Preset, Role, Schedule, SchemeSetting, Settings, has_role, in_words_by_layer};

/// Settings by their keys, with values as in a TOML file.
pub type Identity = BTreeMap<String, String>;

/// The key of the point at which a run was branched off another run ([`Branch`](super::Branch)).
pub const BRANCHED_FROM: &str = "branched-from";

/// Whether a key is a setting of attention.
pub fn of_attention(key: &str) -> bool {
    let schemes = Scheme::all();
    let own = |scheme: &Scheme| scheme.settings().iter().any(|(name, _)| *name == key);
    matches!(key, "attn" | "attn-layers" | "eval-attn") || key.starts_with("sla2-") || schemes.iter().any(own)
}

impl Config {
    /// The keys of settings that have a value in this run but not in its preset.
    pub fn keys_of_some_runs(&self) -> BTreeSet<String> {
        let keys =
            |settings: &Settings| Table::try_from(settings).expect("settings are plain values").into_iter();
        let preset = self.settings.run.preset.unwrap_or(Preset::Tiny);
        let usual: BTreeSet<String> = keys(&Self::defaults(preset)).map(|(key, _)| key).collect();
        keys(&self.settings).map(|(key, _)| key).filter(|key| !usual.contains(key)).collect()
    }

    /// The identity: two runs with the same identity compute the same results. Settings that do not apply to a run's
    /// attention are not included. If the seeds of weights, data order and corpus equal the run's seed, the identity
    /// has one key for all of them.
    pub fn identity(&self) -> Identity {
        let table = Table::try_from(&self.settings).expect("settings are plain values");
        let kept = table
            .iter()
            .filter(|(key, _)| !has_role(key, Role::NotIdentity) && !of_attention(key))
            .filter(|(key, _)| !is_meaningless(key, self))
            .map(|(key, value)| (key.clone(), as_text(value)));
        let mut identity: Identity = kept.collect();
        identity.extend(absent_by_default(&self.model).map(|(key, value)| (key.to_owned(), value)));
        let mut set = |key: &str, value: String| identity.insert(key.to_owned(), value);
        if let sources @ [_, _, ..] = self.data.sources.as_slice() {
            let weights: Option<Vec<f64>> = sources.iter().map(|source| source.weight).collect();
            let parts = weights.map(|weights| {
                let all: f64 = weights.iter().sum();
                weights.iter().map(|weight| format!("{:.6}", weight / all)).collect::<Vec<_>>().join(" ")
            });
            set("data-weights", parts.unwrap_or_else(|| "by size".into()));
        }
        match &self.optimizer {
            Optimizer::AdamW(_) => {}
            Optimizer::Muon(muon) => {
                let MuonConfig {
                    learning_rate,
                    beta2,
                    heads_apart,
                    // `kept` already contains these settings.
                    adamw: _,
                    weight_decay: _,
                    momentum: _,
                    orthogonalization: _,
                    scale: _,
                } = muon;
                set("muon-heads", if *heads_apart { "apart" } else { "together" }.to_owned());
                set("muon-beta2", beta2.map_or_else(|| "off".into(), |beta| beta.to_string()));
                set("muon-warmup-steps", learning_rate.warmup.to_string());
            }
        }
        set("attn", self.attn.to_string());
        for (key, value) in Attn::settings_of(self.model.scheme, self.model.sla2.as_ref()) {
            set(key, value);
        }
        if !self.model.layer_schemes.is_empty() {
            set("attn-layers", in_words_by_layer(&self.model.layer_schemes));
        }
        if let Some(scheme) = self.eval_scheme {
            set("eval-attn", SchemeSetting(scheme).to_string());
        }
        if let Some(branch) = &self.branch {
            set(BRANCHED_FROM, branch.to_string());
        }
        set("steps", self.steps.to_string());
        let rate = &self.learning_rate;
        set("warmup-steps", rate.warmup.to_string());
        // Each schedule has different parameters.
        for key in rate.schedule.own_settings() {
            if let Some(value) = table.get(*key) {
                set(key, as_text(value));
            }
        }
        set("schedule", format!("{:?}", rate.schedule).to_lowercase());
        let seeds = [
            ("weights-seed", self.weights_seed),
            ("order-seed", self.data.order_seed),
            ("corpus-seed", self.data.corpus_seed),
        ];
        match seeds.iter().all(|(_, seed)| *seed == self.seed) {
            true => drop(set("seed", self.seed.to_string())),
            false => seeds.iter().for_each(|(key, seed)| drop(set(key, seed.to_string()))),
        }
        identity
    }
}

/// Model settings without a default value. If one is not set, the identity contains it as `off` or `none`, so that a
/// resume notices if the setting was added or removed.
fn absent_by_default(model: &LlamaConfig) -> [(&'static str, String); 7] {
    let LlamaConfig {
        untied,
        qkv_bias,
        rope_scaling,
        windows,
        sinks,
        softcap,
        // `Config::identity` adds these settings.
        scheme: _,
        layer_schemes: _,
        sla2: _,
        // `Config::identity` copies these settings from `Config::settings`.
        vocab: _,
        layers: _,
        width: _,
        heads: _,
        key_heads: _,
        head_dim: _,
        ffn: _,
        context: _,
        rope_base: _,
        norm_eps: _,
        qk_norm: _,
        init_std: _,
        linear: _,
        linear_compute_layers: _,
        linear_head: _,
        linear_in_evaluation: _,
        z_loss: _,
        deterministic: _,
        // Recomputation does not change results.
        recompute: _,
    } = model;
    let switch = |on: bool| if on { "on" } else { "off" }.to_owned();
    let window = |windows: &Windows| Quantity(windows.tokens as u64).to_string();
    let none = || "none".to_owned();
    [
        ("untied", switch(*untied)),
        ("qkv-bias", switch(*qkv_bias)),
        ("rope-scaling", rope_scaling.map_or_else(none, |scaling| scaling.to_string())),
        ("window", windows.as_ref().map_or_else(none, window)),
        ("window-pattern", windows.as_ref().map_or_else(none, |windows| windows.pattern.to_string())),
        ("sinks", switch(*sinks)),
        ("softcap", softcap.map_or_else(none, |cap| cap.to_string())),
    ]
}

const QK_NORM: &str = "qk-norm";

/// An identity contains values that are computed from these settings, instead of the given values.
const RESOLVED: [&str; 9] = [
    "seed",
    "weights-seed",
    "order-seed",
    "corpus-seed",
    "tokens",
    "warmup-steps",
    "schedule",
    "min-lr",
    "decay-fraction",
];

/// Whether runs that differ in this setting have different identities.
pub(super) fn tells_runs_apart(key: &str) -> bool {
    of_attention(key) || RESOLVED.contains(&key) || !has_role(key, Role::NotIdentity)
}

/// Whether a setting has no effect on a run.
pub fn is_meaningless(key: &str, config: &Config) -> bool {
    // A model without attention has no queries and keys.
    key == QK_NORM && config.model.scheme.is_none()
}

/// Whether a setting is a seed. Runs that differ only in seeds are compared as one arm.
pub fn is_seed(key: &str) -> bool {
    key == "seed" || key.ends_with("-seed")
}

/// The setting that determines whether runs have a value for `key`: attention's settings depend on the scheme, Muon's
/// settings on the optimizer.
fn owner(key: &str) -> Option<&'static str> {
    let of_schedule = || Schedule::value_variants().iter().any(|own| own.own_settings().contains(&key));
    match key {
        "attn" => None,
        "window-pattern" => Some("window"),
        _ if of_attention(key) => Some("attn"),
        _ if key.starts_with("muon-") => Some("optimizer"),
        _ if of_schedule() => Some("schedule"),
        _ => None,
    }
}

/// The keys in which runs differ. A key is left out if its value follows from another of these keys: the warm-up
/// follows from the number of steps; with equal token budgets, the number of steps follows from the tokens per step.
pub fn differing(identities: &[&Identity]) -> Vec<String> {
    let keys: BTreeSet<&String> = identities.iter().flat_map(|identity| identity.keys()).collect();
    let differs = |key: &&&String| {
        // A run without attention has no QK-norm setting. This does not count as a difference.
        let counts = |value: &Option<&String>| value.is_some() || **key != QK_NORM;
        let mut values = identities.iter().map(|identity| identity.get(**key)).filter(counts);
        let first = values.next().flatten();
        !values.all(|value| value == first)
    };
    let follows = |key: &str, from: &str| {
        let mut values: BTreeMap<Option<&String>, BTreeSet<Option<&String>>> = BTreeMap::new();
        for identity in identities {
            values.entry(identity.get(from)).or_default().insert(identity.get(key));
        }
        values.values().all(|of_one| of_one.len() == 1)
    };
    // A setting with an owner is listed only if runs with the same value of the owner differ in it.
    let tells = |key: &str| owner(key).is_none_or(|owner| !follows(key, owner));
    let mut keys: Vec<String> =
        keys.iter().filter(differs).filter(|key| tells(key)).map(|key| (*key).clone()).collect();
    let budgets = equal_budgets(identities);
    for key in ["warmup-steps", "sla2-dense-steps", "sla2-router-steps", "steps"] {
        for from in ["steps", "tokens-per-step"] {
            let may = key != from && (key != "steps" || budgets);
            if may && keys.iter().any(|other| other == from) && follows(key, from) {
                keys.retain(|other| other != key);
            }
        }
    }
    // Order: attention first, seeds last.
    let rank = |key: &String| match key.as_str() {
        "attn" => 0,
        key if is_seed(key) => 2,
        _ => 1,
    };
    keys.sort_by_key(rank);
    keys
}

/// Whether all runs train on the same number of tokens: the numbers may differ by less than one step.
fn equal_budgets(identities: &[&Identity]) -> bool {
    let number = |identity: &Identity, key: &str| identity.get(key)?.parse::<Quantity>().ok().map(|n| n.0);
    let budget = |identity: &&Identity| {
        let step = number(identity, "tokens-per-step")?;
        Some((number(identity, "steps")?.saturating_mul(step), step))
    };
    let budgets: Vec<(u64, u64)> = identities.iter().filter_map(budget).collect();
    let step = budgets.iter().map(|(_, step)| *step).max().unwrap_or(0);
    let tokens = || budgets.iter().map(|(tokens, _)| *tokens);
    tokens().max().unwrap_or(0) - tokens().min().unwrap_or(0) < step.max(1)
}

/// The text with which an identity represents a setting's value.
pub fn as_text(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        Value::Array(values) => values.iter().map(as_text).collect::<Vec<_>>().join(" "),
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::settings::{Attn, Schedule, Settings, SmoothingSetting, Switch};

    fn identity(settings: Settings) -> Identity {
        Config::resolve(settings).expect("a run").identity()
    }

    #[test]
    fn equivalent_settings_are_the_same_run() {
        let plain = identity(Settings::default());
        let same = [
            Settings::with(|s| s.attention.smoothing = Some(SmoothingSetting::K)),
            Settings::with(|s| s.batch.tokens = Some(Quantity(300 * 4096))),
            Settings::with(|s| {
                s.run.weights_seed = Some(0);
                s.run.corpus_seed = Some(0);
            }),
            Settings::with(|s| {
                s.run.eval_every = Some(Quantity(7));
                s.run.name = Some("a".into());
            }),
            Settings::with(|s| s.optimizer.warmup_steps = Some(Quantity(20))),
            Settings::with(|s| s.optimizer.decay_fraction = Some(0.5)),
        ];
        for settings in same {
            assert_eq!(identity(settings.clone()), plain, "{settings:?}");
        }
        let other = [
            Settings::with(|s| s.attention.smoothing = Some(SmoothingSetting::None)),
            Settings::with(|s| s.batch.steps = Some(Quantity(301))),
            Settings::with(|s| s.run.order_seed = Some(1)),
            Settings::with(|s| s.attention.attn = Some(Attn::EXACT)),
            Settings::with(|s| s.optimizer.min_lr = Some(0.2)),
            Settings::with(|s| s.run.eval_tokens = Some(Quantity(4096))),
        ];
        for settings in other {
            assert_ne!(identity(settings.clone()), plain, "{settings:?}");
        }
        let exact = |smoothing| {
            identity(Settings::with(|s| {
                s.attention.attn = Some(Attn::EXACT);
                s.attention.smoothing = smoothing;
            }))
        };
        assert_eq!(exact(None), exact(Some(SmoothingSetting::K)));
        let without = |qk_norm| {
            identity(Settings::with(|s| {
                s.attention.attn = Some(Attn::NONE);
                s.attention.qk_norm = Some(qk_norm);
            }))
        };
        assert_eq!(without(Switch::On), without(Switch::Off), "without queries and keys");
    }

    #[test]
    fn every_key_of_an_identity_tells_runs_apart() {
        let identities = [Schedule::Cosine, Schedule::Wsd].map(|schedule| {
            identity(Settings::with(|s| {
                s.optimizer.schedule = Some(schedule);
                s.optimizer.min_lr = Some(0.2);
                s.optimizer.decay_fraction = (schedule == Schedule::Wsd).then_some(0.5);
                s.run.order_seed = (schedule == Schedule::Wsd).then_some(1);
            }))
        });
        let keys: BTreeSet<&str> = identities.iter().flat_map(|i| i.keys().map(String::as_str)).collect();
        let apart: BTreeSet<&str> = keys.iter().copied().filter(|key| tells_runs_apart(key)).collect();
        assert_eq!(apart, keys);
        // Identities contain the number of steps instead of the number of tokens.
        let unused: Vec<_> =
            RESOLVED.iter().filter(|key| **key != "tokens" && !keys.contains(*key)).collect();
        assert!(unused.is_empty(), "{unused:?}");
    }
}
