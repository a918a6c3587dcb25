//! Reads the documents of a file in pieces. Files are text, JSON lines or CSV (each may be compressed), or Parquet.

#[cfg(feature = "parquet")]
mod columns;
#[cfg(not(feature = "parquet"))]
#[path = "reader/no_columns.rs"]
mod columns;
mod csv_rows;
mod gzip;
mod json_lines;
mod text;
mod unix_lines;

use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use candle_sage::{Error, Result};

use columns::parquet;
use csv_rows::csv_rows;
use gzip::Gzip;
use json_lines::json_lines;
use text::text;
use unix_lines::UnixLines;

use crate::{AnyError, during};

/// The extensions of the files that can be read, and what the files contain.
const EXTENSIONS: [(&str, Kind); 7] = [
    ("txt", Kind::Text),
    ("md", Kind::Text),
    ("jsonl", Kind::Jsonl),
    ("ndjson", Kind::Jsonl),
    ("json", Kind::Jsonl),
    ("csv", Kind::Csv),
    ("parquet", Kind::Parquet),
];

/// The extensions that compression appends to another extension, as in `a.txt.gz`.
const PACKED: [(&str, Packed); 2] = [("gz", Packed::Gzip), ("zst", Packed::Zstd)];

/// Lists the extensions of the files that can be read, for messages.
pub fn extensions() -> String {
    let names = |packed: bool| {
        let all = EXTENSIONS.iter().filter(|(_, kind)| kind.can_be_packed() == packed);
        all.map(|(name, _)| format!(".{name}")).collect::<Vec<_>>().join(", ")
    };
    let packed = PACKED.map(|(name, _)| format!(".{name}")).join(", ");
    format!("{} (each also {packed}), {}", names(true), names(false))
}

/// The longest JSON line or CSV row, in bytes.
const LONGEST: u64 = 256 << 20;

/// A document, or a part of a long document.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Piece {
    /// The text.
    pub text: String,
    /// Whether the piece is the last one of its document.
    pub ends: bool,
}

/// A function that is called with each piece.
pub type Each<'a> = dyn FnMut(Piece) -> Result<()> + 'a;

/// A function that is called with each piece until it returns `Break`.
pub(super) type EachUntil<'a> = dyn FnMut(Piece) -> Result<ControlFlow<()>> + 'a;

/// What happens to a document that cannot be read.
#[derive(Debug, Clone, Copy)]
pub(super) enum BadDocuments<'a> {
    /// Reading ends with an error.
    Refused,
    /// The document is skipped and counted. If the document is a whole text file, the pieces that were read before the
    /// error are kept.
    Skipped(&'a AtomicU64),
}

impl BadDocuments<'_> {
    fn take(self, error: Error) -> Result<()> {
        match self {
            Self::Refused => Err(error),
            Self::Skipped(count) => {
                count.fetch_add(1, Ordering::Relaxed);
                Ok(())
            }
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Text,
    Jsonl,
    Csv,
    Parquet,
}

impl Kind {
    /// Whether files of this kind can also be compressed with gzip or zstd.
    fn can_be_packed(self) -> bool {
        match self {
            Self::Text | Self::Jsonl | Self::Csv => true,
            Self::Parquet => false,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Packed {
    Plain,
    Gzip,
    Zstd,
}

fn kind(path: &Path) -> Option<(Kind, Packed)> {
    // The lossy conversion keeps the extensions, because they are ASCII.
    let name = path.file_name()?.to_string_lossy().to_ascii_lowercase();
    let packed = PACKED.into_iter().find_map(|(end, packed)| {
        let name = name.strip_suffix(end)?.strip_suffix('.')?;
        Some((name, packed))
    });
    let (name, packed) = packed.unwrap_or((name.as_str(), Packed::Plain));
    let extension = name.rsplit_once('.')?.1;
    let (_, kind) = EXTENSIONS.iter().find(|(known, _)| *known == extension)?;
    (packed == Packed::Plain || kind.can_be_packed()).then_some((*kind, packed))
}

/// Whether a file's name has a known extension.
pub fn is_known(path: &Path) -> bool {
    kind(path).is_some()
}

/// Whether a file has fields or columns, one of which `--text-field` names.
pub fn has_fields(path: &Path) -> bool {
    kind(path).is_some_and(|(kind, _)| kind != Kind::Text)
}

/// Whether a file counts as text if only its folder is named. A .md, .csv or .json file may be notes or settings.
pub(super) fn is_always_text(path: &Path) -> bool {
    let name = path.file_name().map(|name| name.to_string_lossy().to_ascii_lowercase()).unwrap_or_default();
    is_known(path) && ![".md", ".csv", ".json"].iter().any(|end| name.ends_with(end))
}

pub(super) fn unknown_kind(path: &Path) -> Error {
    Error::new("the data is of an unknown kind")
        .got(path.display())
        .allowed(extensions())
        .hint("the extension defines the kind of a file; .gz and .zst after .parquet are not supported")
}

/// A rough estimate of the bytes of text in a file, from its size: a compressed file has about a third of the text's
/// bytes, and a Parquet file half of them.
pub(super) fn estimated_bytes(path: &Path) -> u64 {
    let held = path.metadata().map_or(0, |about| about.len());
    match kind(path) {
        Some((Kind::Parquet, _)) => 2 * held,
        Some((Kind::Text | Kind::Jsonl | Kind::Csv, Packed::Gzip | Packed::Zstd)) => 3 * held,
        Some((Kind::Text | Kind::Jsonl | Kind::Csv, Packed::Plain)) | None => held,
    }
}

/// Reads the documents of a file. `field` is the JSON key or the column of the text. A text file is one document.
/// If it is long, `each` receives it in pieces, split as [`super::Tokenizer::encode`] would split it. Documents in
/// other kinds of files are not split.
///
/// # Errors
/// When the file cannot be read or does not have the format that its extension names, or `each` returns an error.
pub fn read(path: &Path, field: &str, each: &mut Each<'_>) -> Result<()> {
    read_counted(path, field, BadDocuments::Refused, &AtomicU64::new(0), &mut |piece| {
        each(piece).map(ControlFlow::Continue)
    })
}

/// Like [`read`], but `each` can end the reading. Adds the number of read bytes to `done`. For Parquet this number is
/// an estimate.
pub(super) fn read_counted(
    path: &Path,
    field: &str,
    bad: BadDocuments<'_>,
    done: &AtomicU64,
    each: &mut EachUntil<'_>,
) -> Result<()> {
    let (kind, packed) = kind(path).ok_or_else(|| unknown_kind(path))?;
    let file = File::open(path).map_err(unreadable(path))?;
    if kind == Kind::Parquet {
        return parquet(path, file, field, bad, done, each);
    }
    let file = BufReader::with_capacity(1 << 18, Counted { file, done });
    let reader: Box<dyn Read + '_> = match packed {
        Packed::Plain => Box::new(file),
        Packed::Gzip => Box::new(Gzip::new(file)),
        Packed::Zstd => zstd(path, file)?,
    };
    match kind {
        Kind::Text => text(path, Box::new(UnixLines::new(reader)), bad, each),
        Kind::Csv => csv_rows(path, reader, field, bad, each),
        Kind::Parquet => unreachable!("it was read above"),
        Kind::Jsonl => json_lines(path, BufReader::with_capacity(1 << 20, reader), field, bad, each),
    }
}

/// A file that counts the bytes that are read.
struct Counted<'a> {
    file: File,
    done: &'a AtomicU64,
}

impl Read for Counted<'_> {
    fn read(&mut self, bytes: &mut [u8]) -> std::io::Result<usize> {
        let read = self.file.read(bytes)?;
        self.done.fetch_add(read as u64, Ordering::Relaxed);
        Ok(read)
    }
}

fn unreadable<E: Into<AnyError>>(path: &Path) -> impl FnOnce(E) -> Error {
    let error = during(format!("cannot read {}", path.display()));
    move |cause: E| {
        let cause = cause.into();
        let hint = match cause.to_string().contains("too much memory") {
            true => {
                "the file is compressed with a window of more than 128 MiB: decompress it with zstd -d --long=31 FILE, \
                 and compress it again with --long=27 or less"
            }
            false => "check that the file is complete, readable, and of the kind that its name says",
        };
        error(cause).hint(hint)
    }
}

/// The error for bytes that are not UTF-8. `at` is the position of the bytes, as text.
fn not_utf8(path: &Path, at: String, bytes: &[u8]) -> Error {
    let hint = match bytes {
        [0xff, 0xfe, ..] | [0xfe, 0xff, ..] => {
            "it begins like UTF-16: convert it with `iconv -f utf-16 -t utf-8`"
        }
        bytes if bytes.contains(&0) => "it does not look like text: check what kind of file it is",
        _ => "convert it, e.g. with `iconv -f latin1 -t utf-8`",
    };
    Error::new("the data is not UTF-8 text")
        .got(format!("{}, {at}", path.display()))
        .allowed("UTF-8")
        .hint(hint)
}

/// The error for a zero byte, which is valid UTF-8 but does not occur in text.
fn not_text(path: &Path, at: usize) -> Error {
    Error::new("the data is not text")
        .got(format!("{}, a zero byte (U+0000) at byte {at}", path.display()))
        .allowed("UTF-8 text without zero bytes")
        .hint("check that the file is of the kind that its name says; `tr -d '\\0'` removes zero bytes")
}

#[cfg(feature = "zstd")]
fn zstd<'a>(path: &Path, file: impl BufRead + 'a) -> Result<Box<dyn Read + 'a>> {
    Ok(Box::new(zstd::Decoder::with_buffer(file).map_err(unreadable(path))?))
}

/// Returns an error: this build lacks zstd.
#[cfg(not(feature = "zstd"))]
fn zstd<'a>(path: &Path, _: impl BufRead + 'a) -> Result<Box<dyn Read + 'a>> {
    Err(Error::new("this build does not read .zst")
        .got(path.display())
        .allowed("uncompressed files, .gz")
        .hint("build without --no-default-features, or with --features zstd"))
}

#[cfg(all(test, feature = "parquet", feature = "zstd"))]
pub(crate) mod tests {
    use std::sync::Arc;

    use parquet::basic::{Compression, ZstdLevel};
    use parquet::data_type::{ByteArray, ByteArrayType};
    use parquet::file::properties::WriterProperties;
    use parquet::file::writer::SerializedFileWriter;
    use parquet::schema::parser::parse_message_type;

    use super::*;

    /// Writes a parquet file with a column of ids and an optional column of text, where `None` is null.
    pub(crate) fn write_parquet(path: &Path, rows: &[Option<&str>], compression: Compression) {
        let schema = "message m { required binary id (UTF8); optional binary text (UTF8); }";
        let schema = Arc::new(parse_message_type(schema).expect("a schema"));
        let properties = WriterProperties::builder().set_compression(compression).build();
        let file = File::create(path).expect("a file");
        let mut writer = SerializedFileWriter::new(file, schema, properties.into()).expect("a writer");
        for rows in rows.chunks(7) {
            let mut group = writer.next_row_group().expect("a group");
            let ids: Vec<ByteArray> = rows.iter().map(|_| "id".into()).collect();
            let levels: Vec<i16> = rows.iter().map(|row| i16::from(row.is_some())).collect();
            let texts: Vec<ByteArray> = rows.iter().flatten().map(|&text| text.into()).collect();
            for (values, levels) in [(ids, None), (texts, Some(levels))] {
                let mut column = group.next_column().expect("next").expect("a column");
                column.typed::<ByteArrayType>().write_batch(&values, levels.as_deref(), None).expect("rows");
                column.close().expect("closed");
            }
            group.close().expect("closed");
        }
        writer.close().expect("closed");
    }

    pub(super) fn documents(path: &Path) -> Result<Vec<String>> {
        let (mut documents, mut open) = (vec![], String::new());
        read(path, "text", &mut |piece| {
            open += &piece.text;
            if piece.ends {
                documents.push(std::mem::take(&mut open));
            }
            Ok(())
        })?;
        Ok(documents)
    }

    #[test]
    fn every_kind_gives_the_same_documents() -> Result<()> {
        let folder = tempfile::tempdir().expect("a folder");
        let wanted: Vec<String> = (0..20).map(|n| format!("Document {n}: é🦀\n").repeat(1 + n * n)).collect();
        let lines: String = wanted
            .iter()
            .map(|d| serde_json::json!({"a": [{"text": 1}], "text": d, "z": null}).to_string() + "\r\n\n")
            .chain(["{\"text\": null, \"a\": 1}\n".into()])
            .collect();
        let gzip = |bytes: &[u8]| {
            let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
            std::io::Write::write_all(&mut encoder, bytes).expect("gzip");
            encoder.finish().expect("gzip")
        };
        let at = |name: &str| folder.path().join(name);
        for (name, bytes) in [
            ("a.jsonl", lines.clone().into_bytes()),
            ("a.JSONL.gz", gzip(lines.as_bytes())),
            ("a.jsonl.zst", zstd::encode_all(lines.as_bytes(), 3).expect("zstd")),
        ] {
            std::fs::write(at(name), bytes).expect("a file");
            assert_eq!(documents(&at(name))?, wanted, "{name}");
        }
        let mut rows: Vec<Option<&str>> = wanted.iter().map(|d| Some(d.as_str())).collect();
        rows.insert(3, None);
        for (name, compression) in [
            ("plain", Compression::UNCOMPRESSED),
            ("snappy", Compression::SNAPPY),
            ("gzip", Compression::GZIP(Default::default())),
            ("zstd", Compression::ZSTD(ZstdLevel::default())),
            ("lz4", Compression::LZ4_RAW),
            ("brotli", Compression::BROTLI(Default::default())),
        ] {
            let path = at(&format!("{name}.parquet"));
            write_parquet(&path, &rows, compression);
            assert_eq!(documents(&path)?, wanted, "{name}");
        }
        Ok(())
    }

    #[test]
    fn bad_documents_are_refused_or_skipped_and_counted() -> Result<()> {
        let folder = tempfile::tempdir().expect("a folder");
        let at = |name: &str| folder.path().join(name);
        let good = |n: u32| format!("{{\"text\": \"document {n}\"}}\n").into_bytes();
        let lines = [
            good(1),
            b"{\"text\": 7}\n".to_vec(),
            b"{\"text\": \"caf\xe9\"}\n".to_vec(),
            good(2),
            b"no JSON\n".to_vec(),
            b"{\"other\": \"x\"}\n".to_vec(),
            good(3),
        ];
        std::fs::write(at("a.jsonl"), lines.concat()).expect("a file");
        let long = "x\n".repeat(400_000);
        std::fs::write(at("late.txt"), [long.as_bytes(), &[0xff], b"rest"].concat()).expect("a file");
        std::fs::write(at("utf16.txt"), [0xff, 0xfe, b'a', 0, b'b', 0]).expect("a file");
        std::fs::write(at("utf16.csv"), [0xff, 0xfe, b'i', 0, b'd', 0]).expect("a file");
        std::fs::write(at("binary.txt"), b"\x7fELF\x02\0\0").expect("a file");
        // Rows 1 and 4 are bad: their texts have commas but no quotes. The empty extra field of row 2 is allowed.
        std::fs::write(at("a.csv"), "id,text\n1,a, b\n2,\"c, d\",\n3,e\n4,f,g\n").expect("a file");
        let empty = ["utf16.txt", "binary.txt"].map(|name| (name, 0, 1));
        let some = [("a.jsonl", 3, 4), ("late.txt", 1, 1), ("a.csv", 2, 2)];
        for (name, wanted, left_out) in some.into_iter().chain(empty) {
            assert!(documents(&at(name)).is_err(), "{name}");
            let (count, mut documents, mut bytes) = (AtomicU64::new(0), 0, 0);
            let skipped = BadDocuments::Skipped(&count);
            read_counted(&at(name), "text", skipped, &AtomicU64::new(0), &mut |piece| {
                documents += u32::from(piece.ends);
                bytes += piece.text.len();
                Ok(ControlFlow::Continue(()))
            })?;
            assert_eq!((documents, count.into_inner()), (wanted, left_out), "{name}");
            assert!(bytes <= long.len());
        }
        for (name, word) in [("utf16.txt", "utf-16"), ("utf16.csv", "utf-16"), ("binary.txt", "zero byte")] {
            let error = documents(&at(name)).expect_err("not UTF-8").to_string();
            assert!(error.contains(word), "{error}");
        }
        Ok(())
    }

    #[test]
    fn a_long_text_comes_in_the_pieces_that_the_tokenizer_would_cut() -> Result<()> {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("long.txt");
        for text in ["", "short", &"a line of é\n".repeat(50_000), &"🦀".repeat(100_000)] {
            std::fs::write(&path, text).expect("a file");
            let mut pieces = Vec::new();
            read(&path, "text", &mut |piece| {
                pieces.push(piece);
                Ok(())
            })?;
            assert_eq!(pieces.iter().map(|piece| piece.text.as_str()).collect::<String>(), text);
            assert!(pieces.last().expect("one").ends && pieces[..pieces.len() - 1].iter().all(|p| !p.ends));
            let cut: Vec<&str> =
                pieces.iter().flat_map(|piece| super::super::tokenizer::pieces(&piece.text)).collect();
            assert_eq!(cut, super::super::tokenizer::pieces(text).collect::<Vec<_>>());
        }
        for (bytes, at) in [(&b"abc\xff"[..], "byte 3"), (b"abc\xe2\x82", "byte 3")] {
            std::fs::write(&path, bytes).expect("a file");
            let error = documents(&path).expect_err("not UTF-8").to_string();
            assert!(error.contains(at), "{error}");
        }
        let long = [&"x".repeat(300_000).into_bytes()[..], &[0xff], &b"y".repeat(300_000)].concat();
        std::fs::write(&path, long).expect("a file");
        assert!(documents(&path).expect_err("not UTF-8").to_string().contains("byte 300000"));
        Ok(())
    }

    /// Reads texts of up to seven characters, each `a`, `\r` or `\n`, with buffers of 1 to 3 bytes.
    #[test]
    fn lines_end_as_on_unix() {
        for n in 0..3usize.pow(7) {
            let text: String = (0..7).map(|at| ['a', '\r', '\n'][n / 3usize.pow(at) % 3]).collect();
            let text = &text[n % 8..];
            for size in 1..4 {
                let (mut read, mut bytes) = (Vec::new(), [0; 3]);
                let mut lines = UnixLines::new(text.as_bytes());
                loop {
                    match lines.read(&mut bytes[..size]).expect("memory") {
                        0 => break,
                        len => read.extend_from_slice(&bytes[..len]),
                    }
                }
                assert_eq!(String::from_utf8(read).expect("text"), text.replace("\r\n", "\n"), "{text:?}");
            }
        }
    }
}
