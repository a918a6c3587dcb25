//! Reads a data file of `docs/figures`: comment lines that say how the figures were measured, then the figures as CSV.

use anyhow::{Context, Result, bail, ensure};

use crate::table::Table;

/// The keys of the provenance, in the order of the printed line. The first three are required.
const KEYS: [&str; 8] = ["command", "device", "date", "driver", "commit", "rest", "repeats", "note"];
const REQUIRED: usize = 3;

#[derive(Debug)]
pub(crate) struct Data {
    /// The text for each of `KEYS`.
    provenance: [Option<String>; KEYS.len()],
    pub(crate) table: Table,
}

impl Data {
    pub(crate) fn parse(text: &str) -> Result<Self> {
        let mut provenance = [const { None }; KEYS.len()];
        let mut rest = text;
        while let Some(after) = rest.strip_prefix('#') {
            let (line, below) = after.split_once('\n').unwrap_or((after, ""));
            let (key, value) = line.split_once(": ").map_or((line.trim(), ""), |(k, v)| (k.trim(), v.trim()));
            let Some(index) = KEYS.iter().position(|known| *known == key) else {
                bail!("unknown provenance\n  got:     # {key}\n  allowed: {}", KEYS.join(", "));
            };
            ensure!(
                !value.is_empty() && provenance[index].is_none(),
                "provenance is empty or given twice\n  got:     #{line}\n  allowed: # {key}: TEXT, once"
            );
            provenance[index] = Some(value.to_owned());
            rest = below;
        }
        for (key, value) in KEYS.iter().zip(&provenance).take(REQUIRED) {
            ensure!(
                value.is_some(),
                "provenance is missing\n  got:     no line `# {key}: TEXT`\n  allowed: {} at the top of the file, and optionally {}\n  \
                 hint:    `# command: none, REASON` where no command made the figures",
                KEYS[..REQUIRED].join(", "),
                KEYS[REQUIRED..].join(", ")
            );
        }
        let data = Self { provenance, table: Table::parse(rest).context("not valid CSV")? };
        let date = data.get("date").unwrap_or_default();
        ensure!(
            is_date(date),
            "the date is invalid\n  got:     {date}\n  allowed: YYYY-MM-DD\n  hint:    other dates go into `# note:`"
        );
        Ok(data)
    }

    fn get(&self, key: &str) -> Option<&str> {
        let index = KEYS.iter().position(|known| *known == key)?;
        self.provenance[index].as_deref()
    }

    /// The line under a table, with a link to the data. A short line has only device and date.
    pub(crate) fn line(&self, link: &str, is_short: bool) -> String {
        let mut facts = vec![capitalized(self.get("device").unwrap_or_default())];
        facts.extend(self.get("date").map(str::to_owned));
        if is_short {
            return format!("_{}. [Data]({link})._", facts.join(", "));
        }
        for (key, before, after) in [
            ("driver", "driver ", ""),
            ("commit", "build ", ""),
            ("rest", "rest ", ""),
            ("repeats", "", " repeats"),
        ] {
            facts.extend(self.get(key).map(|value| format!("{before}{value}{after}")));
        }
        let command = match self.get("command").unwrap_or_default() {
            "none" => "no command".to_owned(),
            command => command.strip_prefix("none, ").map_or(format!("`{command}`"), str::to_owned),
        };
        let note = self
            .get("note")
            .map_or(String::new(), |note| format!(" {}.", capitalized(note.trim_end_matches('.'))));
        format!("_{}: {command}.{note} [Data]({link})._", facts.join(", "))
    }
}

fn is_date(text: &str) -> bool {
    let parts: Vec<&str> = text.split('-').collect();
    let number = |part: &str, digits: usize, most: u32| {
        part.len() == digits && part.parse().is_ok_and(|value: u32| (1..=most).contains(&value))
    };
    matches!(parts[..], [y, m, d] if number(y, 4, 9999) && number(m, 2, 12) && number(d, 2, 31))
}

fn capitalized(text: &str) -> String {
    let mut letters = text.chars();
    letters.next().map_or(String::new(), |first| first.to_uppercase().chain(letters).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    const TOP: &str = "# command: bench\n# device: one H100\n# date: 2026-11-24\n";

    #[test]
    fn provenance_becomes_a_line() {
        let data = Data::parse(&format!("{TOP}# repeats: 10\n# note: in short bursts\nN,ms\n1,2\n")).unwrap();
        assert_eq!(
            data.line("figures/x.csv", false),
            "_One H100, 2026-11-24, 10 repeats: `bench`. In short bursts. [Data](figures/x.csv)._"
        );
        assert_eq!(data.line("figures/x.csv", true), "_One H100, 2026-11-24. [Data](figures/x.csv)._");
        assert_eq!(data.table.markdown(), ["| N | ms |", "|---|---|", "| 1 | 2 |"]);
    }

    #[test]
    fn provenance_is_required() {
        for missing in &KEYS[..REQUIRED] {
            let text: String =
                TOP.lines().filter(|line| !line.contains(missing)).map(|line| format!("{line}\n")).collect();
            let error = format!("{:#}", Data::parse(&format!("{text}N\n1\n")).unwrap_err());
            assert!(error.contains(&format!("no line `# {missing}: ")) && error.contains("hint:"), "{error}");
        }
        for (top, part) in [
            ("# command: a\n# device: b\n# date: yesterday\n", "the date is invalid"),
            ("# gpu: H100\n", "unknown provenance"),
            ("# command: a\n# command: b\n", "given twice"),
        ] {
            let error = format!("{:#}", Data::parse(&format!("{top}N\n1\n")).unwrap_err());
            assert!(error.contains(part) && error.contains("got:"), "{error}");
        }
    }
}
