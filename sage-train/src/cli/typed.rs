//! Checks that the settings on the command line have an effect on the run; a setting without an effect is an error.

use candle_sage::{Error, Result};

use crate::config::{Config, check_own};
use crate::data::DataConfig;
use crate::data::reader;
use crate::data::source::{self, Source};
use crate::model::{Choice, LinearPrecision};
use crate::settings::{DataSettings, ModelSettings, OptimizerSetting, Schedule, Settings, TailSetting};

/// The error for a setting on the command line that has no effect on the run.
fn idle(key: &str, with: String, allowed: &str, hint: &str) -> Result<()> {
    Err(Error::new(format!("--{key} has no effect on this run"))
        .got(format!("--{key} with {with}"))
        .allowed(allowed)
        .hint(hint))
}

pub(super) fn check_typed(typed: &Settings, config: &Config) -> Result<()> {
    check_own(typed, config.attn, config.model.scheme, config.model.sla2.as_ref())?;
    check_model(typed, config)?;
    let sla2 = config.model.sla2.as_ref();
    let attn = format!("--attn {}", config.attn);
    let window = sla2.is_some_and(|sla2| sla2.choice == Choice::Window);
    if window && typed.sla2.sla2_nearest.is_some_and(|nearest| nearest > 0) {
        let hint =
            "sla2-window selects the first block and the nearest blocks; --sla2-blocks sets their number";
        return idle("sla2-nearest", attn, "--attn sla2, sla2-identity, sla2-sparse", hint);
    }
    // `sla2-sparse` has no tail, even if `--sla2-tail` asks for one.
    let asked = typed.sla2.sla2_tail.is_some_and(|tail| tail != TailSetting::None);
    if asked && sla2.is_some_and(|sla2| sla2.tail.is_none()) {
        return idle(
            "sla2-tail",
            attn,
            "--sla2-tail none",
            "sla2-sparse is SLA2 without a tail; --attn sla2 has the same router and a tail",
        );
    }
    if sla2.is_some_and(|sla2| sla2.tail.is_none()) && typed.sla2.sla2_alpha.is_some() {
        let hint = "--sla2-alpha weighs the selected blocks against a tail: leave it out";
        return idle("sla2-alpha", format!("{attn}, without a tail"), "SLA2 with a tail", hint);
    }
    match (typed.linear.first_of_fp8(), config.model.linear) {
        (Some(key), LinearPrecision::Compute) => {
            let hint = "leave it out, or train linear layers in FP8";
            return idle(&key, "--linear bf16".into(), "--linear fp8", hint);
        }
        (None, LinearPrecision::Compute) | (_, LinearPrecision::Fp8(..)) => {}
    }
    let own = config.optimizer.setting();
    if let Some((key, other)) = typed.optimizer.first_of_another(own) {
        let flag = |optimizer: OptimizerSetting| format!("--optimizer {}", optimizer.name());
        return idle(
            &key,
            flag(own),
            &flag(other),
            "leave it out, or train with the optimizer that it belongs to",
        );
    }
    let schedule = config.learning_rate.schedule;
    let named = |schedule: Schedule| format!("--schedule {}", schedule.name());
    for (key, given) in [
        ("min-lr", typed.optimizer.min_lr.is_some()),
        ("decay-fraction", typed.optimizer.decay_fraction.is_some()),
    ] {
        let has = |schedule: &Schedule| schedule.own_settings().contains(&key);
        if given && !has(&schedule) {
            let others =
                [Schedule::Cosine, Schedule::Wsd].into_iter().filter(has).map(named).collect::<Vec<_>>();
            return idle(
                key,
                named(schedule),
                &others.join(", "),
                "leave it out, or name a schedule that uses it",
            );
        }
    }
    check_data(&typed.data, &config.data)
}

/// Rejects flags for windows, the soft cap and sinks if the model has no attention.
fn check_model(typed: &Settings, config: &Config) -> Result<()> {
    if config.model.scheme.is_some() {
        return Ok(());
    }
    let ModelSettings {
        window,
        window_pattern,
        softcap,
        sinks,
        // These settings are accepted for models without attention too, so that models with and without attention can
        // be compared under the same flags.
        heads: _,
        key_heads: _,
        head_dim: _,
        rope_base: _,
        rope_scaling: _,
        qkv_bias: _,
        // These settings apply to every model.
        init_from: _,
        layers: _,
        width: _,
        ffn: _,
        init_std: _,
        untied: _,
        norm_eps: _,
    } = &typed.model;
    let of_attention = [
        ("window", window.is_some()),
        ("window-pattern", window_pattern.is_some()),
        ("softcap", softcap.is_some()),
        ("sinks", sinks.is_some()),
    ];
    match of_attention.iter().find(|(_, given)| *given) {
        None => Ok(()),
        Some((key, _)) => idle(
            key,
            "--attn none".into(),
            "a model with attention",
            "leave it out, or choose another --attn",
        ),
    }
}

/// Checks that the data settings on the command line have an effect on the run's data.
fn check_data(typed: &DataSettings, data: &DataConfig) -> Result<()> {
    if typed.sources.is_some() && typed.corpus_mb.is_some() {
        let hint = "--corpus-mb is the size of the built-in corpus: leave it out, or leave --data out";
        return idle("corpus-mb", "--data".into(), "one of them", hint);
    }
    if typed.text_field.is_none() && typed.val_fraction.is_none() {
        return Ok(());
    }
    if typed.val_fraction.is_some() && !data.val_sources.is_empty() {
        let hint = "all of --val-data is used for validation: leave --val-fraction or --val-data out";
        return idle("val-fraction", "--val-data".into(), "one of them", hint);
    }
    if data.all_sources().next().is_none() && typed.text_field.is_some() {
        let hint =
            "it names the key or column of the text in files of --data; leave it out, or add --data PATH";
        return idle("text-field", "the built-in corpus".into(), "--data", hint);
    }
    let found = data.all_sources().map(|s| source::find(&s.path, &data.out)).collect::<Result<Vec<_>>>()?;
    let all = |of: fn(&Source) -> bool| !found.is_empty() && found.iter().all(of);
    if typed.text_field.is_some() && all(|source| matches!(source, Source::Shards(_))) {
        let hint =
            "shards are already tokenized; use `sage-train data prepare --text-field` when you make them";
        return idle("text-field", "shards".into(), "text in --data", hint);
    }
    let plain = |source: &Source| source.files().all(|file| !reader::has_fields(file));
    if typed.text_field.is_some() && all(plain) {
        let hint = "it names the key or column of the text in JSON lines, .csv and .parquet; leave it out";
        return idle("text-field", "plain text".into(), "data with fields", hint);
    }
    let own = |source: &Source| matches!(source, Source::Shards(files) if !files.validation.is_empty());
    if typed.val_fraction.is_some() && all(own) {
        let hint = "the validation shards are used for validation; leave --val-fraction out, or give --data only \
                    the training shards";
        return idle(
            "val-fraction",
            "shards of which some are for validation".into(),
            "data without validation shards",
            hint,
        );
    }
    Ok(())
}
