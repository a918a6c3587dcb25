//! Files of JSON lines that grow during a run. Each line has a checksum.

use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;

use candle_sage::{Error, Result};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::during;

/// The longest allowed line, in bytes. A line of `probes.jsonl` can have a few MB.
pub(crate) const LONGEST_LINE: u64 = 64 << 20;

/// The text before and after the checksum, which is the last field of a line.
const FIELD: (&str, &str) = (",\"crc32c\":\"", "\"}");

/// A value as a line of JSON. Its last field is the CRC-32C of the line without that field.
pub(crate) fn to_line<T: Serialize>(value: &T) -> String {
    let line = serde_json::to_string(value).expect("plain numbers");
    let checksum = crc32c::crc32c(line.as_bytes());
    let open = line.strip_suffix('}').expect("an object");
    format!("{open}{}{checksum:08x}{}", FIELD.0, FIELD.1)
}

/// The value of a line; `None` if the line is damaged. Earlier versions of the program wrote lines without a checksum:
/// these are accepted.
fn parse<T: DeserializeOwned>(line: &[u8]) -> Option<T> {
    const LEN: usize = FIELD.0.len() + 8 + FIELD.1.len();
    let (open, field) = line.split_at(line.len().saturating_sub(LEN));
    let checksum =
        field.strip_prefix(FIELD.0.as_bytes()).and_then(|rest| rest.strip_suffix(FIELD.1.as_bytes()));
    let computed = || format!("{:08x}", crc32c::crc32c(&[open, b"}"].concat()));
    if checksum.is_some_and(|checksum| checksum != computed().as_bytes()) {
        return None;
    }
    serde_json::from_slice(line).ok()
}

/// The values of a file, up to its first damaged line.
#[derive(Debug)]
pub(crate) struct Lines<T> {
    pub(crate) values: Vec<T>,
    /// Number of the first damaged line, from 1.
    damaged: Option<usize>,
}

impl<T: DeserializeOwned> Lines<T> {
    /// Reads a file. A truncated last line is not damage: a killed process may leave it.
    ///
    /// # Errors
    /// When the file cannot be read.
    pub(crate) fn read(path: &Path) -> Result<Self> {
        let failed = || during::<std::io::Error>(format!("cannot read {}", path.display()));
        let mut reader = BufReader::new(File::open(path).map_err(failed())?);
        let (mut values, mut line) = (Vec::new(), Vec::new());
        while reader.by_ref().take(LONGEST_LINE).read_until(b'\n', &mut line).map_err(failed())? > 0 {
            let whole = line.strip_suffix(b"\n");
            match parse(whole.unwrap_or(&line)) {
                Some(value) => values.push(value),
                None if whole.is_none() && (line.len() as u64) < LONGEST_LINE => break,
                None => return Ok(Self { damaged: Some(values.len() + 1), values }),
            }
            line.clear();
        }
        Ok(Self { values, damaged: None })
    }

    /// All values. `path` and `hint` are for the error message.
    ///
    /// # Errors
    /// When a line is damaged.
    pub(crate) fn whole(self, path: &Path, hint: &str) -> Result<Vec<T>> {
        match self.damaged {
            None => Ok(self.values),
            Some(line) => Err(Error::new(format!("{} is damaged", path.display()))
                .got(format!("line {line} does not match its checksum"))
                .allowed("lines that match their checksum (crc32c)")
                .hint(hint)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::Point;

    fn points() -> Vec<Point> {
        let point =
            |step| Point { step, loss: 4.57 + step as f64 / 3.0, val_loss: Some(5.11), ..Point::default() };
        (1..=3).map(point).collect()
    }

    #[test]
    fn every_flipped_bit_is_seen() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("metrics.jsonl");
        let whole: Vec<u8> = points().iter().flat_map(|point| (to_line(point) + "\n").into_bytes()).collect();
        for (at, bit) in (0..whole.len()).flat_map(|at| (0..8).map(move |bit| (at, bit))) {
            let mut flipped = whole.clone();
            flipped[at] ^= 1 << bit;
            std::fs::write(&path, flipped).expect("a file");
            let read: Lines<Point> = Lines::read(&path).expect("a file");
            // A flip in the field name `crc32c` is not damage, because it changes no value. A flip of the last newline
            // is not damage either: the last line then counts as truncated.
            let last = at + 1 == whole.len() && read.values.len() == 2;
            assert!(read.damaged.is_some() || read.values == points() || last, "byte {at}, bit {bit}");
        }
    }

    #[test]
    fn a_cut_off_end_is_not_damage_and_lines_of_earlier_versions_are_read() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("metrics.jsonl");
        let read = |text: &str| {
            std::fs::write(&path, text).expect("a file");
            Lines::<Point>::read(&path).expect("a file").whole(&path, "-").map(|points| points.len())
        };
        let lines: Vec<String> = points().iter().map(to_line).collect();
        let text = lines.join("\n") + "\n";
        assert_eq!(read(&text), Ok(3));
        assert_eq!(read(text.trim_end()), Ok(3));
        for cut in text.len() - lines[2].len()..text.len() - 2 {
            assert_eq!(read(&text[..cut]), Ok(2), "{cut}");
        }
        assert_eq!(read(""), Ok(0));
        assert!(
            read(&text.replacen("\"step\":2", "\"step\":7", 1))
                .expect_err("damage")
                .to_string()
                .contains("line 2")
        );
        assert!(read(&text.replacen('\n', "\n\n", 1)).is_err());
        let plain: String = points().iter().map(|p| serde_json::to_string(p).expect("JSON") + "\n").collect();
        assert_eq!(read(&plain), Ok(3));
        assert!(read(&plain.replacen("\"step\":2", "\"step\"?2", 1)).is_err());
    }
}
