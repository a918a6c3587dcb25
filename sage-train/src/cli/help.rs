//! Adds the presets' defaults to the help of settings.

use clap::{Arg, Command, ValueEnum};
use toml::Table;

use crate::config::{Config, as_text};
use crate::settings::Preset;

/// The name of each preset, and its settings.
fn presets() -> Vec<(String, Table)> {
    let all = Preset::value_variants().iter();
    all.map(|preset| {
        (preset.name(), Table::try_from(Config::defaults(*preset)).expect("settings are plain values"))
    })
    .collect()
}

/// The defaults of a setting whose default depends on the preset: `tiny 4, mini 6, 325m 20`.
fn defaults_of(key: &str, presets: &[(String, Table)]) -> Option<String> {
    let values: Option<Vec<String>> = presets.iter().map(|(_, table)| table.get(key).map(as_text)).collect();
    let values = values.filter(|values| key != "preset" && values.iter().any(|value| *value != values[0]))?;
    let named = presets.iter().zip(&values).map(|((name, _), value)| format!("{name} {value}"));
    Some(named.collect::<Vec<_>>().join(", "))
}

/// Adds the presets' defaults to the help of the settings, in `command` and its subcommand `sweep`.
pub(super) fn with_defaults(command: Command) -> Command {
    let presets = presets();
    let add = |arg: Arg| {
        let defaults = arg.get_long().and_then(|key| defaults_of(key, &presets));
        match (defaults, arg.get_help().map(ToString::to_string)) {
            (Some(defaults), Some(help)) => arg.help(format!("{help} [default: {defaults}]")),
            _ => arg,
        }
    };
    command.mut_args(add).mut_subcommand("sweep", |sweep| sweep.mut_args(add))
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::super::Cli;
    use super::*;

    #[test]
    fn a_default_is_stated_once() {
        let command = with_defaults(Cli::command());
        let presets = presets();
        let mut told = 0;
        for arg in command.get_arguments() {
            let help = arg.get_help().map(ToString::to_string).unwrap_or_default();
            assert!(help.matches("[default").count() <= 1, "{help}");
            if let Some(defaults) = arg.get_long().and_then(|key| defaults_of(key, &presets)) {
                assert!(help.contains(&defaults), "{help}");
                told += 1;
            }
        }
        assert_eq!(
            defaults_of("layers", &presets).as_deref(),
            Some("tiny 4, mini 6, 40m 12, 124m 12, 325m 20, 1.3b 24")
        );
        assert_eq!(told, 15);
    }
}
