//! Settings in the tables of a TOML file: `[optimizer] lr = 1e-3` and `lr = 1e-3` at the top of a file are the same.
//!
//! Each heading of `--help` has a table, which contains the settings of the flags under this heading.

use candle_sage::{Error, Result};
use clap::{Args as _, Command};
use toml::{Table, Value};

use super::Settings;

/// For each table of settings: its name, the heading of its flags in `--help`, and the prefix that the flags have but
/// the table's keys omit.
const TABLES: [(&str, &str, &str); 8] = [
    ("attention", "Attention", ""),
    ("batch", "Batch and length", ""),
    ("data", "Data", ""),
    ("linear", "Linear layers", "linear-"),
    ("model", "Model", ""),
    ("optimizer", "Optimizer", ""),
    ("run", "Run", ""),
    ("sla2", "SLA2", "sla2-"),
];

/// The key of `--data` in table `[data]`.
pub(super) const SOURCES: &str = "sources";

/// The key of `--linear` in table `[linear]`.
const PRECISION: &str = "precision";

/// The key of `--optimizer` in table `[optimizer]`.
const NAME: &str = "name";

/// The declaration of a setting.
#[derive(Debug)]
pub struct Described {
    /// The setting's table.
    pub table: &'static str,
    /// The setting's key in the table.
    pub key: String,
    /// The setting's flag, without dashes.
    pub flag: String,
    /// The allowed values, or a placeholder for the value.
    pub values: String,
    /// The setting's help text.
    pub help: String,
}

/// All settings, in the order of `--help`.
pub fn described() -> Vec<Described> {
    let all = Settings::augment_args(Command::new(""));
    all.get_arguments()
        .filter_map(|arg| {
            let flag = arg.get_long()?.to_owned();
            let (table, ..) = TABLES.into_iter().find(|(_, of, _)| Some(*of) == arg.get_help_heading())?;
            let named = || arg.get_value_names().unwrap_or_default().iter().map(|name| name.to_string());
            let listed: Vec<String> =
                arg.get_possible_values().iter().map(|value| value.get_name().to_owned()).collect();
            let values =
                if listed.is_empty() { named().collect::<Vec<_>>().join(" ") } else { listed.join("|") };
            let help = arg.get_help().map_or(String::new(), |help| help.to_string());
            Some(Described { table, key: key_of(table, &flag), flag, values, help })
        })
        .collect()
}

/// For each setting: its flag, its table in a TOML file, and whether it is a switch.
pub(super) fn flags() -> Vec<(String, &'static str, bool)> {
    described().into_iter().map(|setting| (setting.flag, setting.table, setting.values == "on|off")).collect()
}

fn flag_of(table: &str, key: &str) -> String {
    let prefix = prefix_of(table);
    match (table, key) {
        ("data", SOURCES) => "data".into(),
        ("linear", PRECISION) => "linear".into(),
        ("optimizer", NAME) => "optimizer".into(),
        _ if key.starts_with(prefix) => key.into(),
        _ => format!("{prefix}{key}"),
    }
}

/// The prefix that a table's flags have but its keys omit.
fn prefix_of(table: &str) -> &'static str {
    TABLES.iter().find(|(name, ..)| *name == table).map_or("", |(_, _, prefix)| prefix)
}

fn key_of(table: &str, flag: &str) -> String {
    match (table, flag) {
        ("data", "data") => SOURCES.into(),
        ("linear", "linear") => PRECISION.into(),
        ("optimizer", "optimizer") => NAME.into(),
        _ => flag.strip_prefix(prefix_of(table)).unwrap_or(flag).into(),
    }
}

/// Moves the settings of all inner tables into one flat table, whose keys are names of flags. For flags with
/// the values `on` and `off`, booleans become `on` or `off`.
///
/// # Errors
/// When a key is in a wrong table, or is given twice. `place` names the file in the error.
pub fn flat(settings: Table, place: &str) -> Result<Table> {
    let flags = flags();
    let mut flat = Table::new();
    let mut add = |flag: String, value: Value| -> Result<()> {
        let switch = flags.iter().any(|(name, _, switch)| *name == flag && *switch);
        let value = if switch { as_switch(value) } else { value };
        match flat.insert(flag.clone(), value) {
            None => Ok(()),
            Some(_) => Err(Error::new("a setting is given twice in one file")
                .got(format!("two values of `{flag}`, in {place}"))
                .allowed("one of them")
                .hint("[optimizer] lr = 1e-3 and lr = 1e-3 outside of any table are the same setting")),
        }
    };
    for (key, value) in settings {
        let is_table = TABLES.iter().any(|(name, ..)| *name == key);
        let inner = match value {
            Value::Table(inner) if is_table => inner,
            other => {
                add(key, other)?;
                continue;
            }
        };
        for (name, value) in inner {
            let flag = flag_of(&key, &name);
            let table = flags.iter().find(|(other, ..)| *other == flag).map(|(_, table, _)| *table);
            if let Some(table) = table.filter(|table| *table != key) {
                return Err(Error::new("a setting is in the wrong table")
                    .got(format!("`{name}` in [{key}], in {place}"))
                    .allowed(format!("in [{table}], or without a table"))
                    .hint("tables are the headings of `sage-train --help`"));
            }
            add(flag, value)?;
        }
    }
    Ok(flat)
}

/// Turns a boolean into the value of a switch, `on` or `off`.
fn as_switch(value: Value) -> Value {
    match value {
        Value::Boolean(true) => "on".into(),
        Value::Boolean(false) => "off".into(),
        Value::Array(list) => Value::Array(list.into_iter().map(as_switch).collect()),
        other => other,
    }
}

/// Moves each setting into its table, such as `[model]`, and turns switches into booleans.
pub fn in_tables(settings: Table) -> Table {
    let flags = flags();
    let mut tables = Table::new();
    for (flag, value) in settings {
        let Some((_, table, switch)) = flags.iter().find(|(name, ..)| *name == flag) else {
            tables.insert(flag, value);
            continue;
        };
        let value = match (switch, value.as_str()) {
            (true, Some("on")) => true.into(),
            (true, Some("off")) => false.into(),
            _ => value,
        };
        let entry = tables.entry(*table).or_insert_with(|| Table::new().into());
        entry.as_table_mut().expect("made here").insert(key_of(table, &flag), value);
    }
    tables
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table(text: &str) -> Table {
        toml::from_str(text).expect("TOML")
    }

    #[test]
    fn every_setting_has_a_table() {
        let flags = flags();
        let all = Settings::augment_args(Command::new(""));
        let named: Vec<_> = all.get_arguments().filter_map(clap::Arg::get_long).collect();
        assert_eq!(flags.iter().map(|(name, ..)| name.as_str()).collect::<Vec<_>>(), named);
        // `key_of` and `flag_of` list the flags that have the name of a table.
        let tables = TABLES.map(|(name, ..)| name);
        let twice: Vec<_> = named.into_iter().filter(|name| tables.contains(name)).collect();
        assert_eq!(twice, ["linear", "data", "optimizer"]);
    }

    #[test]
    fn tables_and_flat_keys_are_the_same() {
        let flat_keys =
            table("lr = 1\nqk-norm = \"on\"\nsla2-block = 32\ndata = \"a.txt\"\npreset = \"tiny\"");
        let tables = table(
            "[run]\npreset = \"tiny\"\n[optimizer]\nlr = 1\n[attention]\nqk-norm = true\n[sla2]\nblock = 32\n\
             [data]\nsources = \"a.txt\"",
        );
        assert_eq!(flat(tables.clone(), "a file"), Ok(flat_keys.clone()));
        assert_eq!(flat(flat_keys.clone(), "a file"), Ok(flat_keys.clone()));
        assert_eq!(in_tables(flat_keys), tables);
        let lists = flat(table("qk-norm = [true, \"off\"]\nseed = [1, 2]"), "a file");
        assert_eq!(lists, Ok(table("qk-norm = [\"on\", \"off\"]\nseed = [1, 2]")));
    }

    #[test]
    fn a_key_in_another_table_or_given_twice_is_refused() {
        let error = flat(table("[data]\nlr = 1"), "a file").expect_err("of the optimizer").to_string();
        assert!(error.contains("`lr` in [data]") && error.contains("[optimizer]"), "{error}");
        let error = flat(table("lr = 1\n[optimizer]\nlr = 2"), "a file").expect_err("twice").to_string();
        assert!(error.contains("given twice"), "{error}");
    }
}
