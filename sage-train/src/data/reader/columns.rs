//! Reads documents from Parquet files.

use std::fs::File;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use candle_sage::{Error, Result};
use parquet::column::reader::ColumnReader;
use parquet::file::reader::{FileReader, SerializedFileReader};

use super::{BadDocuments, EachUntil, Piece, not_utf8, unreadable};
use crate::unpanicked;

/// Number of rows of a Parquet file that are decoded together.
const ROWS: usize = 64;

/// Reads a column of a parquet file: each row is a document.
pub(super) fn parquet(
    path: &Path,
    file: File,
    field: &str,
    bad: BadDocuments<'_>,
    done: &AtomicU64,
    each: &mut EachUntil<'_>,
) -> Result<()> {
    let size = file.metadata().map_err(unreadable(path))?.len();
    let guarded =
        |work: &mut dyn FnMut() -> parquet::errors::Result<()>| unpanicked(work).map_err(unreadable(path));
    let mut opened = None;
    let mut file = Some(file);
    guarded(&mut || {
        opened = file.take().map(SerializedFileReader::new).transpose()?;
        Ok(())
    })?;
    let reader = opened.expect("opened, or an error");
    let schema = reader.metadata().file_metadata().schema_descr();
    let names: Vec<String> = schema.columns().iter().map(|column| column.path().string()).collect();
    let fits = |n: &usize| {
        schema.column(*n).physical_type() == parquet::basic::Type::BYTE_ARRAY
            && schema.column(*n).max_rep_level() == 0
    };
    let Some(column) = names.iter().position(|name| name == field).filter(fits) else {
        return Err(Error::new("the parquet file does not have the column of the text")
            .got(format!("{}: columns {}", path.display(), names.join(", ")))
            .allowed(format!("a column `{field}` of strings"))
            .hint("name the column with --text-field"));
    };
    for group in 0..reader.num_row_groups() {
        let mut rows = None;
        guarded(&mut || {
            rows = Some(reader.get_row_group(group)?.get_column_reader(column)?);
            Ok(())
        })?;
        let Some(ColumnReader::ByteArrayColumnReader(mut rows)) = rows else {
            return Err(unreadable(path)("a column that changes its type"));
        };
        loop {
            let (mut levels, mut values, mut read) = (Vec::new(), Vec::new(), 0);
            guarded(&mut || {
                read = rows.read_records(ROWS, Some(&mut levels), None, &mut values)?.0;
                Ok(())
            })?;
            if read == 0 {
                break;
            }
            for value in &values {
                match std::str::from_utf8(value.data()) {
                    Ok(text) => {
                        if each(Piece { text: text.to_owned(), ends: true })?.is_break() {
                            return Ok(());
                        }
                    }
                    Err(error) => {
                        let at = format!("a row, byte {}", error.valid_up_to());
                        bad.take(not_utf8(path, at, value.data()))?;
                    }
                }
            }
        }
        done.fetch_add(size / reader.num_row_groups() as u64, Ordering::Relaxed);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::tests::documents;
    use super::*;

    /// The bytes of a file, in hexadecimal: pyarrow wrote one row, "hello world", with `write_page_checksum`.
    const WITH_CHECKSUM: &str = "\
        504152311500152a152a15ee8ceefa0c1c15021500150615061c0000000200000002010b00000068656c6c6f20776f72\
        6c641504192c35001806736368656d61150200150c250218047465787425004c1c0000001602191c191c26001c150c19\
        2506001918047465787415001602165c165c2608491c150015001502003c1616190619260002000000165c1602260816\
        5c002820706172717565742d6370702d6172726f772076657273696f6e2032362e302e31191c1c000000880000005041\
        5231";

    #[test]
    fn a_page_of_parquet_is_compared_with_its_checksum() -> Result<()> {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("a.parquet");
        let digits = |at: usize| u8::from_str_radix(&WITH_CHECKSUM[at..at + 2], 16).expect("two digits");
        let mut bytes: Vec<u8> = (0..WITH_CHECKSUM.len()).step_by(2).map(digits).collect();
        std::fs::write(&path, &bytes).expect("a file");
        assert_eq!(documents(&path)?, ["hello world"]);
        let at = bytes.windows(5).position(|window| window == b"hello").expect("the text");
        bytes[at] ^= 1;
        std::fs::write(&path, &bytes).expect("a file");
        assert!(documents(&path).is_err());
        Ok(())
    }
}
