//! Finds flags with several values, such as `--seed 1,2,3`. Such flags turn the command into a sweep.

use std::ffi::OsString;

use candle_sage::{Error, Result};
use clap::{Args, Command};
use toml::{Table, Value};

use crate::settings::{Role, Settings, has_role};

/// A command line that may contain lists of values, such as `1,2,3`. `words` contains only the first value of each
/// list; `lists` contains all values.
#[derive(Debug)]
pub(super) struct ExpandedCommand {
    pub(super) words: Vec<OsString>,
    lists: Vec<List>,
}

#[derive(Debug)]
struct List {
    key: String,
    /// Index of the command-line word that has the values. `before` is the text before the values, such as `--seed=`.
    at: usize,
    before: String,
    values: Vec<String>,
}

impl ExpandedCommand {
    /// Finds lists of values, such as `1,2`, in a command line that trains or sweeps. Other commands accept no lists.
    pub(super) fn new(mut words: Vec<OsString>) -> Self {
        let verb = words.get(1).and_then(|word| word.to_str()).filter(|word| !word.starts_with('-'));
        if verb.is_some_and(|verb| verb != "sweep") {
            return Self { words, lists: Vec::new() };
        }
        let help = Settings::augment_args(Command::new(""));
        let takes = |flag: &str| {
            !has_role(flag, Role::NotList) && help.get_arguments().any(|arg| arg.get_long() == Some(flag))
        };
        let mut lists = Vec::new();
        for at in 1..words.len() {
            let Some(word) = words[at].to_str() else { continue };
            if word == "--" {
                break;
            }
            let previous = words[at - 1].to_str().and_then(|word| word.strip_prefix("--"));
            let (key, before, value) = match word.strip_prefix("--").and_then(|flag| flag.split_once('=')) {
                Some((key, value)) => (key.to_owned(), format!("--{key}="), value),
                None => (previous.unwrap_or_default().to_owned(), String::new(), word),
            };
            if !takes(&key) {
                continue;
            }
            // If a flag is repeated, only its last occurrence counts.
            lists.retain(|list: &List| list.key != key);
            let values = split(&key, value);
            if values.len() > 1 {
                lists.push(List { key, at, before, values });
            }
        }
        for List { at, before, values, .. } in &lists {
            words[*at] = format!("{before}{}", values[0]).into();
        }
        Self { words, lists }
    }

    /// The lists as TOML, such as `seed = [1, 2]` for `--seed 1,2`. `settings` parses a command line without lists.
    pub(super) fn tables<E>(
        &self,
        settings: impl Fn(&[OsString]) -> std::result::Result<Settings, E>,
    ) -> std::result::Result<Table, E> {
        let mut table = Table::new();
        for List { key, at, before, values } in &self.lists {
            let mut list = Vec::new();
            for value in values {
                let mut words = self.words.clone();
                words[*at] = format!("{before}{value}").into();
                let read = Table::try_from(settings(&words)?).unwrap_or_default();
                // A value that TOML cannot represent becomes text here. The sweep later rejects this value.
                list.push(read.get(key).cloned().unwrap_or_else(|| value.clone().into()));
            }
            table.insert(key.clone(), Value::Array(list));
        }
        Ok(table)
    }
}

/// Largest number of seeds in a range. A longer range is probably a mistake, and is not parsed as a range.
const MOST_SEEDS: u64 = 1000;

/// The seeds of a range such as `1-3`.
fn range(word: &str) -> Option<impl Iterator<Item = String> + use<>> {
    let (first, last) = word.split_once('-')?;
    let (first, last): (u64, u64) = (first.parse().ok()?, last.parse().ok()?);
    (first < last && last - first < MOST_SEEDS).then(|| (first..=last).map(|seed| seed.to_string()))
}

/// Whether the commas separate the thousands of one number, as in `4,096`, and not the values of a list. Without
/// a zero directly after a comma, as in `4,196`, the text counts as a list.
fn is_grouped(value: &str) -> bool {
    let mut words = value.split(',');
    let of = |word: &str, digits: std::ops::RangeInclusive<usize>| {
        digits.contains(&word.len()) && word.bytes().all(|byte| byte.is_ascii_digit())
    };
    words.next().is_some_and(|first| of(first, 1..=3))
        && words.clone().all(|word| of(word, 3..=3))
        && words.any(|word| word.starts_with('0'))
}

/// The values of a list. A number with grouped thousands is one value, which is rejected later. A value that is a set
/// of INT8 matmuls may contain commas: the list `paper,forward,s,dv` has two values, `paper` and `forward,s,dv`. Seeds
/// may be a range: `1-3`.
fn split(key: &str, value: &str) -> Vec<String> {
    if is_grouped(value) {
        return vec![value.to_owned()];
    }
    let mut values: Vec<String> = Vec::new();
    for word in value.split(',').map(str::trim) {
        if let Some(seeds) = range(word).filter(|_| key == "seed" || key.ends_with("-seed")) {
            values.extend(seeds);
            continue;
        }
        match values
            .last_mut()
            .filter(|_| ["products", "eval-attn"].contains(&key) && ["s", "dv", "dq", "dk"].contains(&word))
        {
            Some(set) => *set = format!("{set},{word}"),
            None => values.push(word.to_owned()),
        }
    }
    values
}

/// Checks that no list contains a value twice. If one did, two runs would be identical.
pub(super) fn check(lists: &Table) -> Result<()> {
    for (key, values) in lists {
        let values = values.as_array().map_or(&[][..], Vec::as_slice);
        let twice = values.iter().enumerate().find(|(n, value)| values[..*n].contains(value));
        if let Some((_, value)) = twice {
            return Err(Error::new("a value is given twice")
                .got(format!("--{key}: {value} twice"))
                .allowed("each value once")
                .hint(
                    "to measure how much results vary by chance, repeat runs with several seeds: --seed 1-3",
                ));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_found_and_paths_are_not() {
        let typed =
            |words: &[&str]| ExpandedCommand::new(words.iter().map(|word| OsString::from(*word)).collect());
        let words = ["sage-train", "--seed", "1,2", "--data", "a,b.txt", "--lr=1e-3,2e-3", "--name", "a,b"];
        let found = typed(&words);
        let lists: Vec<(&str, usize)> =
            found.lists.iter().map(|list| (list.key.as_str(), list.values.len())).collect();
        assert_eq!(lists, [("seed", 2), ("lr", 2)]);
        let expected = ["sage-train", "--seed", "1", "--data", "a,b.txt", "--lr=1e-3", "--name", "a,b"]
            .map(OsString::from);
        assert_eq!(found.words, expected);
        let grouped = typed(&["sage-train", "--tokens-per-step", "4,096", "--steps", "1,200"]);
        assert_eq!(grouped.lists.iter().map(|list| list.key.as_str()).collect::<Vec<_>>(), ["steps"]);
        let sets = typed(&["sage-train", "--products", "paper,forward, s,dv,forward"]);
        assert_eq!(sets.lists[0].values, ["paper", "forward,s,dv", "forward"]);
        let sets = typed(&["sage-train", "--products", "scores,dv,scores"]);
        assert_eq!(sets.lists[0].values, ["scores,dv", "scores"]);
        let seeds = typed(&["sage-train", "--seed=1-3,7", "--lr", "1e-3"]);
        assert_eq!(seeds.lists[0].values, ["1", "2", "3", "7"]);
        assert_eq!(seeds.lists.len(), 1);
        for other in [
            &["sage-train", "--products", "forward,s,dv"][..],
            &["sage-train", "sample", "run", "One, two"],
            &["sage-train", "probe", "run", "--smoothing", "none,k"],
            &["sage-train", "--seed", "1,2", "--seed", "3"],
        ] {
            assert!(typed(other).lists.is_empty(), "{other:?}");
        }
    }
}
