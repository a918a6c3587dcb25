//! Reads documents from comma-separated values.

use std::cell::Cell;
use std::io::Read;
use std::path::Path;
use std::rc::Rc;

use candle_sage::{Error, Result};

use super::{BadDocuments, EachUntil, LONGEST, Piece, not_utf8, unreadable};

/// Reads a column of a CSV file. The first row names the columns. Every later row has one document.
pub(super) fn csv_rows(
    path: &Path,
    reader: impl Read,
    field: &str,
    bad: BadDocuments<'_>,
    each: &mut EachUntil<'_>,
) -> Result<()> {
    let left = Rc::new(Cell::new(LONGEST));
    let bounded = Bounded { inner: reader, left: left.clone() };
    let mut rows = csv::ReaderBuilder::new().flexible(true).from_reader(bounded);
    let names = rows.byte_headers().map_err(unreadable(path))?;
    if let Some([0xff, 0xfe, ..] | [0xfe, 0xff, ..]) = names.get(0) {
        return Err(not_utf8(path, "byte 0".into(), &names[0]));
    }
    let names: Vec<String> = names.iter().map(|name| String::from_utf8_lossy(name).into_owned()).collect();
    let is_field = |name: &String| name.trim_start_matches('\u{feff}') == field;
    let column = names.iter().position(is_field).ok_or_else(|| {
        Error::new("the CSV file does not have the column of the text")
            .got(format!("{}: columns {}", path.display(), names.join(", ")))
            .allowed(format!("a column `{field}`, named in the first row"))
            .hint("name the column with --text-field")
    })?;
    let mut row = csv::ByteRecord::new();
    loop {
        left.set(LONGEST);
        if !rows.read_byte_record(&mut row).map_err(unreadable(path))? {
            return Ok(());
        }
        let line = row.position().map_or(0, csv::Position::line);
        // A non-empty extra field is the rest of a text that has commas but no quotes. Commas at a row's end make
        // empty extra fields, which are allowed.
        if row.iter().skip(names.len()).any(|field| !field.is_empty()) {
            bad.take(
                Error::new("a row has more columns than the first row")
                    .got(format!("{}, line {line}: {} columns", path.display(), row.len()))
                    .allowed(format!("at most {}", names.len()))
                    .hint("fields with commas need quotes; `data prepare --skip-bad` skips bad rows"),
            )?;
            continue;
        }
        let text = match row.get(column).map(std::str::from_utf8) {
            Some(Ok(text)) => text,
            Some(Err(error)) => {
                let at = format!("line {line}, byte {} of `{field}`", error.valid_up_to());
                bad.take(not_utf8(path, at, &row[column]))?;
                continue;
            }
            None => {
                bad.take(
                    Error::new("a row ends before the column of the text")
                        .got(format!("{}, line {line}: {} columns", path.display(), row.len()))
                        .allowed(format!("at least {}", column + 1))
                        .hint("fields with line ends need quotes; `data prepare --skip-bad` skips bad rows"),
                )?;
                continue;
            }
        };
        if each(Piece { text: text.to_owned(), ends: true })?.is_break() {
            return Ok(());
        }
    }
}

/// A reader that fails if a row has more than [`LONGEST`] bytes, for example after an unclosed quote.
struct Bounded<R> {
    inner: R,
    left: Rc<Cell<u64>>,
}

impl<R: Read> Read for Bounded<R> {
    fn read(&mut self, bytes: &mut [u8]) -> std::io::Result<usize> {
        if self.left.get() == 0 {
            return Err(std::io::Error::other(format!("a row of more than {} MiB", LONGEST >> 20)));
        }
        let read = self.inner.read(bytes)?;
        self.left.set(self.left.get().saturating_sub(read as u64));
        Ok(read)
    }
}
