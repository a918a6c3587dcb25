//! Every setting of a run, as typed on the command line or written in a TOML file. All settings are optional: `config`
//! takes missing values from the preset.

mod attention;
mod batch;
mod data;
mod flat;
mod layer;
mod linear;
mod model;
mod optimizer;
mod run;
mod scheme;
mod sla2;
mod source;
pub mod tables;
mod text;

pub use attention::{AttentionSettings, Attn, SmoothingSetting};
pub use batch::BatchSettings;
use clap::{Args, ValueEnum};
pub use data::DataSettings;
use layer::Layer;
pub use layer::Role;
pub use linear::{FormatSetting, LinearSetting, LinearSettings, ScalingSetting, SumsSetting};
pub use model::ModelSettings;
pub use optimizer::{
    MuonHeadsSetting, MuonScaleSetting, OptimizerSetting, OptimizerSettings, OrthogonalizationSetting,
    Schedule,
};
pub use run::{Preset, RunSettings};
pub use scheme::{LayerList, LayerSettings, SchemeSetting, in_words_by_layer};
use serde::{Deserialize, Serialize};
pub use sla2::{AlphaSetting, Share, Sla2Settings, TailSetting};
pub(crate) use sla2::{exported_settings, form_name};
pub use source::SourceSetting;
pub use text::{Numerics, Text};

/// On or off.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[allow(missing_docs)]
pub enum Switch {
    On,
    Off,
}

/// The settings of a run, grouped by the tables of a settings file. In [`RunSettings`] and the other tables, a field's
/// doc comment is its help text, and a field's name is its flag and its key.
///
/// The settings are serialized as one map without tables, because `--config`, sweeps and comparisons of runs identify a
/// setting by its key.
#[derive(Debug, Clone, Default, PartialEq, Args, Serialize)]
pub struct Settings {
    /// Table `[run]`.
    #[command(flatten, next_help_heading = "Run")]
    #[serde(flatten)]
    pub run: RunSettings,
    /// Table `[attention]`.
    #[command(flatten, next_help_heading = "Attention")]
    #[serde(flatten)]
    pub attention: AttentionSettings,
    /// Table `[sla2]`.
    #[command(flatten, next_help_heading = "SLA2")]
    #[serde(flatten)]
    pub sla2: Sla2Settings,
    /// Table `[linear]`.
    #[command(flatten, next_help_heading = "Linear layers")]
    #[serde(flatten)]
    pub linear: LinearSettings,
    /// Table `[data]`.
    #[command(flatten, next_help_heading = "Data")]
    #[serde(flatten)]
    pub data: DataSettings,
    /// Table `[batch]`.
    #[command(flatten, next_help_heading = "Batch and length")]
    #[serde(flatten)]
    pub batch: BatchSettings,
    /// Table `[optimizer]`.
    #[command(flatten, next_help_heading = "Optimizer")]
    #[serde(flatten)]
    pub optimizer: OptimizerSettings,
    /// Table `[model]`.
    #[command(flatten, next_help_heading = "Model")]
    #[serde(flatten)]
    pub model: ModelSettings,
}

/// The name of each setting's field, and the setting's roles.
fn declared() -> impl Iterator<Item = (&'static str, &'static [Role])> {
    let tables = [
        RunSettings::DECLARED,
        DataSettings::DECLARED,
        BatchSettings::DECLARED,
        OptimizerSettings::DECLARED,
        AttentionSettings::DECLARED,
        Sla2Settings::DECLARED,
        LinearSettings::DECLARED,
        ModelSettings::DECLARED,
    ];
    tables.into_iter().flatten().copied()
}

fn key_of(field: &str) -> String {
    if field == tables::SOURCES { "data".into() } else { field.replace('_', "-") }
}

/// The keys of the settings that have the role `role`.
pub fn keys_with(role: Role) -> Vec<String> {
    declared().filter(|(_, roles)| roles.contains(&role)).map(|(field, _)| key_of(field)).collect()
}

/// Whether the setting `key` has the role `role`.
pub fn has_role(key: &str, role: Role) -> bool {
    declared().any(|(field, roles)| roles.contains(&role) && key_of(field) == key)
}

impl Settings {
    /// Settings in which only the fields that `set` assigns have a value.
    pub fn with(set: impl FnOnce(&mut Self)) -> Self {
        let mut settings = Self::default();
        set(&mut settings);
        settings
    }

    /// These settings, with missing values taken from `under`.
    #[must_use]
    pub fn over(self, mut under: Settings) -> Settings {
        // Sparsity and blocks are alternatives, and so are steps and tokens. If `self` sets one of a pair, `under` must
        // not contribute the other.
        if self.sla2.sla2_sparsity.is_some() || self.sla2.sla2_blocks.is_some() {
            (under.sla2.sla2_sparsity, under.sla2.sla2_blocks) = (None, None);
        }
        if self.batch.steps.is_some() || self.batch.tokens.is_some() {
            (under.batch.steps, under.batch.tokens) = (None, None);
        }
        // If `self` selects a scheme that shares no settings with the scheme of `under`, only `qk_norm` of
        // `under.attention` still applies.
        let AttentionSettings { attn, qk_norm, .. } = under.attention;
        if self.attention.attn.is_some_and(|upper| attn.is_some_and(|attn| !attn.shares_settings(upper))) {
            under.attention = AttentionSettings { attn, qk_norm, ..AttentionSettings::default() };
        }
        Self {
            run: self.run.or(under.run),
            attention: self.attention.or(under.attention),
            sla2: self.sla2.or(under.sla2),
            linear: self.linear.or(under.linear),
            data: self.data.or(under.data),
            batch: self.batch.or(under.batch),
            optimizer: self.optimizer.or(under.optimizer),
            model: self.model.or(under.model),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// [`key_of`] turns the fields' names into the names of the flags. [`has_role`] relies on this.
    #[test]
    fn every_flag_is_declared() {
        let mut declared: Vec<String> = declared().map(|(field, _)| key_of(field)).collect();
        let mut flags: Vec<String> = tables::flags().into_iter().map(|(flag, ..)| flag).collect();
        declared.sort();
        flags.sort();
        assert_eq!(declared, flags);
    }

    /// Finds settings that are parsed but never read. Misses a setting if another struct's field has the same name
    /// and is read.
    #[test]
    fn every_setting_is_read() {
        fn sources(folder: &std::path::Path, all: &mut String) {
            for path in
                std::fs::read_dir(folder).expect("sources").map(|entry| entry.expect("an entry").path())
            {
                if path.is_dir() {
                    sources(&path, all);
                } else {
                    let text = std::fs::read_to_string(&path).expect("a source");
                    let code = text.split("#[cfg(test)]\nmod tests").next().unwrap_or("");
                    let lines = code.lines().filter(|line| !line.trim_start().starts_with("//"));
                    all.extend(lines.flat_map(|line| [line, "\n"]));
                }
            }
        }
        let mut all = String::new();
        sources(&std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("src"), &mut all);
        let is_read = |field: &str| {
            let access = format!(".{field}");
            let mut after = all.split(&access).skip(1);
            after.any(|rest| {
                let other = |c: char| c.is_alphanumeric() || c == '_' || c == '(';
                !rest.starts_with(other) && !rest.starts_with(" = ")
            })
        };
        let unread: Vec<_> = declared().map(|(field, _)| field).filter(|field| !is_read(field)).collect();
        assert!(unread.is_empty(), "{unread:?}");
    }

    /// Ranks always compare the run's identity. Only settings outside the identity need the role `Together`.
    #[test]
    fn ranks_compare_what_the_identity_leaves_out() {
        let together = keys_with(Role::Together);
        assert!(together.iter().all(|key| has_role(key, Role::NotIdentity)), "{together:?}");
    }

    #[test]
    fn another_attention_does_not_take_over_settings() {
        let saved = || {
            Settings::with(|s| {
                s.attention.attn = Some(candle_sage::SageBwd::default().into());
                s.attention.smoothing = Some(SmoothingSetting::K);
                s.model.layers = Some(3);
            })
        };
        let asked = |attn: Attn| Settings::with(|s| s.attention.attn = Some(attn)).over(saved());
        let same = asked(candle_sage::SageBwd::default().into());
        assert_eq!((same.attention.smoothing, same.model.layers), (Some(SmoothingSetting::K), Some(3)));
        let other = asked(candle_sage::AttnQat::default().into());
        assert_eq!((other.attention.smoothing, other.model.layers), (None, Some(3)));
    }
}
