//! The settings of SLA2 and its ablations: table `[sla2]`.

use std::str::FromStr;

use candle_sage::ops::{Alpha, Tail};
use candle_sage::{Error, Scheme};
use clap::{Args, ValueEnum};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::layer::layer;
use super::text::{Numerics, Text};
use crate::checks::in_range;
use crate::model::{Choice, Sla2Config};
use crate::quantity::Quantity;

/// Table `[sla2]`: the settings of SLA2. In this table the keys lack the prefix `sla2-` of the flags.
#[derive(Debug, Clone, Default, PartialEq, Args, Serialize, Deserialize)]
#[serde(default, rename_all = "kebab-case", deny_unknown_fields)]
pub struct Sla2Settings {
    /// Scheme of attention to the selected blocks, and of dense attention in the first steps: `fpa`, `sagebwd` or
    /// `attn-qat` [default: sagebwd]
    #[arg(long, value_name = "SCHEME")]
    pub sla2_numerics: Option<Text<Numerics>>,
    /// Share of the causal (query, key) pairs that lie outside the selected blocks: `90%` or `0.9`. The diagonal block
    /// counts as selected [default: 90%, but at least one past block is selected]
    #[arg(long, value_name = "SHARE")]
    pub sla2_sparsity: Option<Share>,
    /// Number of past key blocks that each query block selects, instead of --sla2-sparsity
    #[arg(long, value_name = "N")]
    pub sla2_blocks: Option<usize>,
    /// Number of nearest past blocks that are always selected; the router selects the remaining blocks [default: 0]
    #[arg(long, value_name = "N")]
    pub sla2_nearest: Option<usize>,
    /// Tokens of a block, a power of two; always 128 on a GPU [default on the CPU: a sixteenth of the context, rounded
    /// down to a power of two, at least 16 and at most 128]
    #[arg(long, value_name = "N")]
    pub sla2_block: Option<usize>,
    /// Key blocks to which SLA2's linear attention (the tail) attends [default: past]
    #[arg(long, value_enum)]
    pub sla2_tail: Option<TailSetting>,
    /// How alpha, the weight of the selected blocks in the output, is computed from theta, a learned number per head.
    /// The linear tail has weight 1 - alpha [default: count]
    #[arg(long, value_enum)]
    pub sla2_alpha: Option<AlphaSetting>,
    /// Steps of dense attention at the start of the run [default: 60 % of the run]
    #[arg(long, value_name = "N")]
    pub sla2_dense_steps: Option<Quantity>,
    /// The router learns from dense attention in the last N steps of --sla2-dense-steps [default: 100, at most a tenth
    /// of the run]
    #[arg(long, value_name = "N")]
    pub sla2_router_steps: Option<Quantity>,
}

layer! {
    Sla2Settings:
    sla2_numerics, sla2_sparsity, sla2_blocks, sla2_nearest, sla2_block, sla2_tail, sla2_alpha, sla2_dense_steps,
    sla2_router_steps
}

/// A form of SLA2: the full method, or an ablation of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Form {
    Learned,
    Identity,
    Window,
    Sparse,
}

impl Form {
    pub(super) const ALL: [Self; 4] = [Self::Learned, Self::Identity, Self::Window, Self::Sparse];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Learned => "sla2",
            Self::Identity => "sla2-identity",
            Self::Window => "sla2-window",
            Self::Sparse => "sla2-sparse",
        }
    }

    pub(super) fn summary(self) -> &'static str {
        match self {
            Self::Learned => {
                "Attention to key blocks that a learned router selects, plus linear attention (SLA2)"
            }
            Self::Identity => {
                "SLA2 with an untrained router, which ranks key blocks by the dot product of mean queries and mean keys"
            }
            Self::Window => "SLA2 without a router: the nearest key blocks and the first one are selected",
            Self::Sparse => "SLA2 without linear attention: only the blocks that a learned router selects",
        }
    }
}

/// A fraction, written as `90%` or `0.9`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Share(pub f64);

impl FromStr for Share {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let (number, unit) = match text.strip_suffix('%') {
            Some(number) => (number, 100.0),
            None => (text, 1.0),
        };
        match number.trim().parse::<f64>() {
            Ok(value) if (0.0..1.0).contains(&(value / unit)) => Ok(Self(value / unit)),
            _ => Err(Error::new("not a fraction")
                .got(format!("`{text}`"))
                .allowed("0% to less than 100%, or a number from 0 to less than 1")
                .hint("90% and 0.9 mean the same")),
        }
    }
}

impl std::fmt::Display for Share {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}%", self.0 * 100.0)
    }
}

impl Serialize for Share {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Share {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        /// A file may contain the number 0.9 or the text "90%".
        #[derive(Deserialize)]
        #[serde(untagged, expecting = "a fraction: \"90%\", or a number from 0 to less than 1")]
        enum NumberOrText {
            Text(String),
            Number(f64),
        }
        let text = match NumberOrText::deserialize(deserializer)? {
            NumberOrText::Text(text) => text,
            NumberOrText::Number(number) => number.to_string(),
        };
        text.parse().map_err(serde::de::Error::custom)
    }
}

/// The key blocks that the linear tail sums over.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TailSetting {
    /// All earlier blocks, including the selected ones
    Past,
    /// The blocks that are not selected (as in the SLA2 paper); slow on a GPU: f32 matmuls instead of a fused kernel
    Complement,
    /// No tail: attention only to the selected blocks
    None,
}

/// How alpha, the weight of the selected blocks in the output, is computed from theta, a learned number per head.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum AlphaSetting {
    /// sigmoid(theta + log(n / m)). The query sees n tokens in the selected blocks and the diagonal block, and m tokens
    /// in the other blocks
    Count,
    /// sigmoid(theta), as in the SLA2 paper
    Constant,
}

/// The resolved settings, by their keys.
pub(super) fn own_settings(sla2: &Sla2Config) -> Vec<(&'static str, String)> {
    vec![
        ("sla2-block", sla2.block.to_string()),
        ("sla2-blocks", sla2.blocks.to_string()),
        ("sla2-nearest", sla2.nearest.to_string()),
        ("sla2-tail", sla2.tail.map_or("none".into(), |tail| tail.to_string())),
        ("sla2-alpha", sla2.alpha.to_string()),
        ("sla2-dense-steps", sla2.dense_steps.to_string()),
        ("sla2-router-steps", sla2.router_steps.to_string()),
    ]
}

/// The value of `--attn` that belongs to these settings.
pub(crate) fn form_name(sla2: &Sla2Config) -> &'static str {
    let form = match (sla2.choice, sla2.tail) {
        (Choice::Window, _) => Form::Window,
        (Choice::Identity, _) => Form::Identity,
        (Choice::Learned, Some(_)) => Form::Learned,
        (Choice::Learned, None) => Form::Sparse,
    };
    form.name()
}

/// Keys and values of the settings that another program needs to compute the model's output from its weights.
pub(crate) fn exported_settings(sla2: &Sla2Config, scheme: &Scheme) -> Vec<(&'static str, String)> {
    let told = [("attn", form_name(sla2).to_owned()), ("sla2-numerics", scheme.name().to_owned())];
    // The name `sla2-sparse` already implies that there is no tail.
    let sparse = form_name(sla2) == Form::Sparse.name();
    let without_tail = |key: &str| key == "sla2-tail" && sparse;
    let own =
        own_settings(sla2).into_iter().filter(|(key, _)| !key.ends_with("-steps") && !without_tail(key));
    told.into_iter()
        .chain(scheme.settings().into_iter().filter(|(key, _)| !key.starts_with("tile-")))
        .chain(own)
        .collect()
}

/// Resolves the settings of SLA2 for a run of `steps` steps over sequences of `context` tokens.
///
/// # Errors
/// When a setting is out of range, or the sparsity cannot be reached.
pub(super) fn resolve(
    form: Form,
    settings: &Sla2Settings,
    context: usize,
    steps: u64,
    gpu: bool,
) -> Result<Sla2Config, Error> {
    // Tokens of a block. On the CPU the default is about a sixteenth of the context.
    let usual = (context / 16).checked_ilog2().map_or(16, |power| 1 << power).clamp(16, 128);
    let block = settings.sla2_block.unwrap_or(if gpu { 128 } else { usual });
    if !block.is_power_of_two() || !(16..=1024).contains(&block) {
        return Err(Error::new("sla2-block is not a power of two from 16 to 1024")
            .got(block)
            .allowed("16, 32, 64, 128, ... 1024")
            .hint("a GPU supports only --sla2-block 128"));
    }
    if gpu && block != 128 {
        return Err(Error::new("SLA2 on a GPU supports one block size")
            .got(format!("blocks of {block}"))
            .allowed("blocks of 128")
            .hint("--device cpu accepts other block sizes"));
    }
    let usual_steps = steps * 6 / 10;
    let asked = settings.sla2_dense_steps.map_or(usual_steps, |steps| steps.0);
    let dense_steps = in_range("sla2-dense-steps", asked, 0, steps)?;
    let router_steps =
        settings.sla2_router_steps.map_or((steps / 10).min(100).min(dense_steps), |steps| steps.0);
    let mut config = Sla2Config {
        blocks: 0,
        // A window consists of the nearest blocks, so `sla2-nearest` is ignored. Setting it is not an error, because
        // it may be inherited from another run.
        nearest: if form == Form::Window { 0 } else { settings.sla2_nearest.unwrap_or(0) },
        block,
        choice: match form {
            Form::Learned | Form::Sparse => Choice::Learned,
            Form::Identity => Choice::Identity,
            Form::Window => Choice::Window,
        },
        tail: tail(form, settings.sla2_tail),
        alpha: match settings.sla2_alpha {
            Some(AlphaSetting::Constant) => Alpha::Constant,
            Some(AlphaSetting::Count) | None => Alpha::Count,
        },
        dense_steps,
        router_steps: in_range("sla2-router-steps", router_steps, 0, dense_steps)?,
    };
    let most = context.div_ceil(block).saturating_sub(1);
    config.blocks = match (settings.sla2_blocks, settings.sla2_sparsity) {
        (Some(_), Some(_)) => {
            return Err(Error::new("both the number of blocks and the sparsity of SLA2 are given")
                .got("--sla2-blocks and --sla2-sparsity")
                .allowed("one of them")
                .hint("--sla2-blocks N --dry-run prints the sparsity that N blocks give"));
        }
        (Some(blocks), None) => in_range("sla2-blocks", blocks, 0, most.max(1))?,
        (None, Some(Share(sparsity))) => {
            // A router selects at least one block.
            let least = Sla2Config { blocks: most.min(1), ..config }.sparsity(context);
            let all = Sla2Config { blocks: most, ..config };
            if sparsity > least || all.sparsity(context) > sparsity {
                return Err(Error::new("this sparsity cannot be reached")
                    .got(Share(sparsity))
                    .allowed(format!(
                        "{:.1} % to {:.1} % with context {context} and blocks of {block}: a query block attends to \
                         the diagonal and at least one other block",
                        100.0 * all.sparsity(context),
                        100.0 * least
                    ))
                    .hint("use a longer --context, or on the CPU a smaller --sla2-block; --sla2-blocks 0 \
                           attends only to the diagonal"));
            }
            nearest(&config, context, most, sparsity)
        }
        (None, None) => nearest(&config, context, most, 0.9).clamp(1, most.max(1)),
    };
    if settings.sla2_blocks.is_none() && config.sparsity(context) <= 0.0 {
        return Err(Error::new("the context is too short for SLA2 to skip any block")
            .got(format!("context {context} with blocks of {block}: one past block and the diagonal are the whole \
                          context"))
            .allowed(format!("a context of more than {} tokens", 2 * block))
            .hint("use a longer --context, or on the CPU smaller blocks (--sla2-block); to train without skipping \
                   blocks: --sla2-blocks 1, which selects one past block for each block of queries"));
    }
    check_nearest(&config)?;
    Ok(config)
}

/// The linear tail of a form.
fn tail(form: Form, asked: Option<TailSetting>) -> Option<Tail> {
    match (form, asked) {
        (Form::Sparse, _) | (_, Some(TailSetting::None)) => None,
        (_, Some(TailSetting::Complement)) => Some(Tail::Complement),
        (_, Some(TailSetting::Past) | None) => Some(Tail::Past),
    }
}

fn check_nearest(config: &Sla2Config) -> Result<(), Error> {
    if config.nearest <= config.blocks {
        return Ok(());
    }
    Err(Error::new("sla2-nearest is out of range")
        .got(format!("{} nearest of {} selected blocks", config.nearest, config.blocks))
        .allowed("at most the number of selected blocks")
        .hint("lower --sla2-nearest or raise --sla2-blocks"))
}

/// The number of selected blocks, at most `most`, whose sparsity is closest to `sparsity`.
fn nearest(config: &Sla2Config, context: usize, most: usize, sparsity: f64) -> usize {
    let distance = |blocks| (Sla2Config { blocks, ..*config }.sparsity(context) - sparsity).abs();
    (0..=most).min_by(|&a, &b| distance(a).total_cmp(&distance(b))).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nearest_blocks_are_some_of_a_routers_blocks() {
        let of = |form, blocks, nearest| {
            let settings = Sla2Settings {
                sla2_blocks: Some(blocks),
                sla2_nearest: Some(nearest),
                ..Sla2Settings::default()
            };
            resolve(form, &settings, 8192, 1000, true).map(|config| config.nearest)
        };
        assert_eq!(
            (of(Form::Learned, 3, 3), of(Form::Sparse, 3, 0), of(Form::Window, 3, 1)),
            (Ok(3), Ok(0), Ok(0))
        );
        assert!(of(Form::Learned, 3, 4).expect_err("too many").to_string().contains("4 nearest of 3"));
    }

    #[test]
    fn shares_read_back() {
        for (text, share) in [("90%", 0.9), ("0.9", 0.9), ("0", 0.0), ("12.5 %", 0.125)] {
            let read: Share = text.parse().expect("a share");
            assert!((read.0 - share).abs() < 1e-12, "{text}");
            assert_eq!(read.to_string().parse(), Ok(read));
        }
        for bad in ["", "100%", "1", "-1%", "x"] {
            assert!(bad.parse::<Share>().is_err(), "{bad}");
        }
    }

    #[test]
    fn sparsity_becomes_blocks() {
        let settings = |share| Sla2Settings { sla2_sparsity: Some(Share(share)), ..Sla2Settings::default() };
        let blocks = |share, context| {
            resolve(Form::Learned, &settings(share), context, 1000, true).map(|config| config.blocks)
        };
        // For sparsity s and N tokens, each query block selects about ((1 - s) (N + 1) / 2 - 64.5) / 128 past blocks.
        // The exact number differs slightly, because the first query blocks have fewer past blocks.
        assert_eq!(blocks(0.9, 16384), Ok(6));
        assert_eq!(blocks(0.95, 32768), Ok(6));
        assert_eq!(blocks(0.85, 4096), Ok(2));
        let message = blocks(0.97, 4096).expect_err("more than the diagonal and one other leave").to_string();
        assert!(message.contains("0.0 % to 90.8 % with context 4096 and blocks of 128:"), "{message}");
    }
}
