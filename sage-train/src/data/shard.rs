//! Shards, which are files of tokens: the `.bin` format of llm.c and modded-nanogpt with a header, and nanoGPT's format
//! without a header. Each shard that this program writes has a sidecar, `NAME.bin.json`, with the hashes of the shard
//! and of its tokenizer, and the lengths of its documents.

mod format;
mod sidecar;
mod writer;

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use candle_sage::{Error, Result};
use sha2::{Digest, Sha256};

pub use format::Format;
use format::HEADER;
pub use sidecar::Sidecar;
pub use writer::{PartialShard, ShardWriter};

use super::Tokenizer;
use crate::{during, hex, read_exact_at};

/// A file of tokens, which are not kept in memory. The file is opened for each read, because data may have more shards
/// than a process may have open files.
#[derive(Debug)]
pub struct Shard {
    path: PathBuf,
    /// The file that [`Shard::open`] checked.
    checked: Mutex<FileIdentity>,
    format: Format,
    tokens: u64,
    /// The sidecar, if there is one.
    pub sidecar: Option<Sidecar>,
}

impl Shard {
    /// Opens a shard, and checks its header, its length and its sidecar against each other.
    ///
    /// # Errors
    /// When the shard cannot be read, or its header, its length and its sidecar do not agree.
    pub fn open(path: &Path) -> Result<Self> {
        let failed = || during::<std::io::Error>(format!("cannot read the shard {}", path.display()));
        let file = File::open(path).map_err(failed())?;
        let about = file.metadata().map_err(failed())?;
        let size = about.len();
        let mut start = Vec::new();
        (&file).take(HEADER).read_to_end(&mut start).map_err(failed())?;
        let format = Format::of(&start);
        let refuse = |got: String, allowed: String| {
            Err(Error::new(format!("{} is not a complete shard", path.display()))
                .got(got)
                .allowed(allowed)
                .hint(
                    "copy or prepare it again; `sage-train data check` compares every shard with its .bin.json file",
                ))
        };
        let payload = size.saturating_sub(format.header());
        let tokens = match format.magic() {
            None => payload / format.width(),
            Some((_, version)) => {
                let number = |n: usize| start.get(4 * n..4 * n + 4).and_then(|b| b.first_chunk()).copied();
                let (Some(got), Some(count)) = (number(1), number(2)) else {
                    return refuse(format!("{size} bytes"), format!("a header of {HEADER} bytes"));
                };
                if i32::from_le_bytes(got) != version {
                    return refuse(
                        format!("version {} of format {format}", i32::from_le_bytes(got)),
                        format!("version {version}"),
                    );
                }
                u64::from(u32::from_le_bytes(count))
            }
        };
        if size == 0 {
            return refuse("0 bytes".into(), "a header, or tokens".into());
        }
        if size < format.header() || payload != tokens * format.width() {
            return refuse(
                format!("{size} bytes"),
                format!("{} bytes: {tokens} tokens in {format}", format.header() + tokens * format.width()),
            );
        }
        let sidecar = Sidecar::read(path)?;
        if let Some(sidecar) = sidecar.as_ref().filter(|s| (s.format, s.tokens) != (format, tokens)) {
            return refuse(
                format!("{tokens} tokens in {format}"),
                format!("{} in {}, as its .bin.json file says", sidecar.tokens, sidecar.format),
            );
        }
        let checked = Mutex::new(FileIdentity::of(&about));
        Ok(Self { path: path.to_owned(), checked, format, tokens, sidecar })
    }

    /// Number of tokens.
    pub fn len(&self) -> u64 {
        self.tokens
    }

    /// Whether the shard has no tokens.
    pub fn is_empty(&self) -> bool {
        self.tokens == 0
    }

    /// Checks that the sidecar, if there is one, names this tokenizer.
    ///
    /// # Errors
    /// When the sidecar names another tokenizer.
    pub fn check_tokenizer(&self, tokenizer: &Tokenizer) -> Result<()> {
        match &self.sidecar {
            Some(sidecar) if sidecar.tokenizer != tokenizer.hash() => {
                Err(Error::new("a shard was made with another tokenizer")
                    .got(format!("{}: tokenizer {:.12}", self.path.display(), sidecar.tokenizer))
                    .allowed(format!("tokenizer {:.12}", tokenizer.hash()))
                    .hint(
                        "prepare all shards with one tokenizer, and give no other one with --tokenizer; eval \
                         needs text, or shards made with the run's tokenizer",
                    ))
            }
            _ => Ok(()),
        }
    }

    /// Appends tokens `start..start + count` to `tokens`.
    ///
    /// # Errors
    /// When the file cannot be read, or has become shorter.
    ///
    /// # Panics
    /// When the range exceeds the shard.
    pub fn read(&self, start: u64, count: usize, tokens: &mut Vec<u32>) -> Result<()> {
        assert!(start + count as u64 <= self.tokens, "tokens of the shard");
        let mut bytes = vec![0; count * self.format.width() as usize];
        let at = self.format.header() + start * self.format.width();
        let failed = || {
            let error = during::<std::io::Error>(format!("cannot read the shard {}", self.path.display()));
            move |cause| error(cause).hint("check whether it was changed or removed after the run began")
        };
        let file = File::open(&self.path).map_err(failed())?;
        self.check_unchanged(&FileIdentity::of(&file.metadata().map_err(failed())?))?;
        read_exact_at(&file, &mut bytes, at).map_err(failed())?;
        self.format.decode(&bytes, tokens);
        Ok(())
    }

    /// Checks that the file has not changed since [`Shard::open`]. A new modification time or inode is accepted if the
    /// contents still match the hash in the sidecar.
    fn check_unchanged(&self, now: &FileIdentity) -> Result<()> {
        let mut checked = self.checked.lock().unwrap_or_else(PoisonError::into_inner);
        if *checked == *now {
            return Ok(());
        }
        let changed = |got: &str| {
            Error::new("a shard was changed or replaced after it was opened")
                .got(format!("{}: {got}", self.path.display()))
                .allowed("the file as it was opened")
                .hint("restore the file; --resume then continues the run from its newest checkpoint")
        };
        match self.hashed() {
            Some((path, hash)) if now.len == checked.len => match Self::compare(&path, &hash) {
                Compared::Same => *checked = now.clone(),
                Compared::Another(_) => return Err(changed("the contents differ")),
                Compared::Unread(error) => return Err(error),
            },
            _ => return Err(changed("the size, modification time or inode differs")),
        }
        Ok(())
    }

    /// Adds to a hash what identifies the shard: the SHA-256 in its sidecar, if it has one, and its first and
    /// last 4096 tokens.
    ///
    /// # Errors
    /// When the shard cannot be read.
    pub fn fingerprint(&self, hash: &mut Sha256) -> Result<()> {
        const ENDS: u64 = 4096;
        if let Some(sidecar) = &self.sidecar {
            hash.update(&sidecar.sha256);
        }
        let mut tokens = Vec::new();
        let count = ENDS.min(self.tokens);
        for start in [0, self.tokens - count] {
            self.read(start, count as usize, &mut tokens)?;
        }
        tokens.iter().for_each(|token| hash.update(token.to_le_bytes()));
        Ok(())
    }

    /// Reads the whole file and compares its SHA-256 with the sidecar's. A shard without a sidecar passes.
    ///
    /// # Errors
    /// When the hashes differ, or the file cannot be read.
    pub fn check(&self) -> Result<()> {
        match self.hashed().map_or(Compared::Same, |(path, hash)| Self::compare(&path, &hash)) {
            Compared::Same => Ok(()),
            Compared::Another(error) | Compared::Unread(error) => Err(error),
        }
    }

    /// Path and expected SHA-256, if there is a sidecar.
    pub(super) fn hashed(&self) -> Option<(PathBuf, String)> {
        self.sidecar.as_ref().map(|sidecar| (self.path.clone(), sidecar.sha256.clone()))
    }

    /// Reads a whole file and compares its SHA-256 with `expected`.
    pub(super) fn compare(path: &Path, expected: &str) -> Compared {
        let mut hash = Sha256::new();
        if let Err(error) = File::open(path).and_then(|mut file| std::io::copy(&mut file, &mut hash)) {
            let unread = during(format!("cannot compare {} with its .bin.json file", path.display()));
            return Compared::Unread(unread(error));
        }
        let got = hex(&hash.finalize());
        if got == expected {
            return Compared::Same;
        }
        Compared::Another(
            Error::new(format!("{} does not match its .bin.json file", path.display()))
                .got(format!("SHA-256 {got}"))
                .allowed(expected)
                .hint("copy or prepare the shard again"),
        )
    }
}

/// Metadata that shows whether the file at a path was changed or replaced.
#[derive(Debug, Clone, PartialEq, Eq)]
struct FileIdentity {
    len: u64,
    modified: Option<std::time::SystemTime>,
    /// Device and inode.
    #[cfg(unix)]
    inode: (u64, u64),
}

impl FileIdentity {
    fn of(about: &std::fs::Metadata) -> Self {
        #[cfg(unix)]
        use std::os::unix::fs::MetadataExt;
        Self {
            len: about.len(),
            modified: about.modified().ok(),
            #[cfg(unix)]
            inode: (about.dev(), about.ino()),
        }
    }
}

/// The result of comparing a file with the hash in its sidecar.
#[derive(Debug)]
pub(super) enum Compared {
    /// The hashes are the same.
    Same,
    /// The hashes differ.
    Another(Error),
    /// The file could not be read.
    Unread(Error),
}

#[cfg(test)]
mod tests {
    use clap::ValueEnum;

    use super::*;

    fn shard(folder: &Path, format: Format) -> PathBuf {
        let path = folder.join(format!("{format}.bin"));
        let mut writer = ShardWriter::create(&path, format, "t", 70_000).expect("a shard");
        for document in 0..5u32 {
            let tokens: Vec<u32> = (0..100 + document).map(|n| n * 300 + document).collect();
            writer.write(&tokens[..50], 70, 70).expect("tokens");
            writer.write(&tokens[50..], 71, 71).expect("tokens");
            if document < 4 {
                writer.end_document();
            }
        }
        let sidecar = writer.finish().expect("whole");
        assert_eq!(sidecar.document_tokens, [100, 101, 102, 103, 104]);
        assert!(sidecar.continues && sidecar.tokens == 510 && sidecar.text_bytes == 705);
        path
    }

    /// If a shard's contents were changed, the next read fails with an error that names the shard. Another file with
    /// the same contents is accepted.
    #[test]
    fn a_shard_that_is_replaced_is_noticed() -> Result<()> {
        let folder = tempfile::tempdir().expect("a folder");
        let path = shard(folder.path(), Format::LlmcU16);
        let replace = |bytes: &[u8]| {
            let other = folder.path().join("other");
            std::fs::write(&other, bytes).expect("a file");
            std::fs::rename(&other, &path).expect("replaced");
        };
        let (opened, whole) = (Shard::open(&path)?, std::fs::read(&path).expect("a file"));
        let read = |shard: &Shard| shard.read(0, 4, &mut Vec::new());
        read(&opened)?;
        replace(&whole);
        read(&opened)?;
        let mut changed = whole.clone();
        changed[1030] ^= 1;
        replace(&changed);
        let error = read(&opened).expect_err("another file").to_string();
        assert!(error.contains("replaced") && error.contains("llmc-u16.bin"), "{error}");
        replace(&whole);
        read(&opened)?;
        std::fs::remove_file(&path).expect("removed");
        assert!(read(&opened).is_err());
        Ok(())
    }

    #[test]
    fn every_format_reads_what_it_wrote() -> Result<()> {
        let folder = tempfile::tempdir().expect("a folder");
        for &format in Format::value_variants() {
            let path = shard(folder.path(), format);
            let shard = Shard::open(&path)?;
            assert_eq!(shard.len(), 510);
            shard.check()?;
            let mut tokens = Vec::new();
            shard.read(98, 5, &mut tokens)?;
            assert_eq!(tokens, [98 * 300, 99 * 300, 1, 301, 601]);
            // A shard without a sidecar can be read.
            std::fs::remove_file(Sidecar::path(&path)).expect("removed");
            assert_eq!(Shard::open(&path)?.len(), 510);
        }
        Ok(())
    }

    /// The byte layout that llm.c's `dataloader.h` and modded-nanogpt read.
    #[test]
    fn the_headered_format_is_llm_cs() -> Result<()> {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("a.bin");
        let mut writer = ShardWriter::create(&path, Format::LlmcU16, "t", 50_257)?;
        writer.write(&[50_256, 1], 0, 0)?;
        writer.finish()?;
        let bytes = std::fs::read(&path).expect("a file");
        assert_eq!(bytes.len(), 1024 + 4);
        assert_eq!(bytes[..12], [0x88, 0xd8, 0x34, 0x01, 1, 0, 0, 0, 2, 0, 0, 0]);
        assert!(bytes[12..1024].iter().all(|&b| b == 0));
        assert_eq!(bytes[1024..], [0x50, 0xc4, 1, 0]);
        Ok(())
    }

    #[test]
    fn what_is_not_whole_is_refused() {
        let folder = tempfile::tempdir().expect("a folder");
        for format in [Format::LlmcU16, Format::LlmcU32] {
            let path = folder.path().join("begun.bin");
            let mut writer = ShardWriter::create(&path, format, "t", 300).expect("a shard");
            assert!(Shard::open(&path).is_err(), "{format} begun");
            writer.write(&[1; 1 << 20], 0, 0).expect("tokens");
            assert!(Shard::open(&path).is_err(), "{format} in the making");
            drop(writer);
            std::fs::remove_file(&path).expect("gone");
        }
        let path = shard(folder.path(), Format::NanoGpt);
        let sidecar = Sidecar {
            tokens: 0,
            document_tokens: vec![],
            ..Sidecar::read(&path).expect("read").expect("one")
        };
        std::fs::write(Sidecar::path(&path), serde_json::to_vec(&sidecar).expect("json")).expect("a file");
        assert!(Sidecar::read(&path).is_err(), "a document of nothing continues");
        std::fs::remove_file(&path).expect("gone");
        for &format in Format::value_variants() {
            let path = shard(folder.path(), format);
            let whole = std::fs::read(&path).expect("a file");
            for bytes in [&whole[..whole.len() - 1], &whole[..whole.len() - 4], &whole[..10], &[]] {
                std::fs::write(&path, bytes).expect("a file");
                assert!(Shard::open(&path).is_err(), "{format}, {} bytes", bytes.len());
            }
            let mut changed = whole.clone();
            *changed.last_mut().expect("bytes") ^= 1;
            std::fs::write(&path, changed).expect("a file");
            assert!(Shard::open(&path).expect("whole").check().is_err(), "{format}");
        }
        let mut writer =
            ShardWriter::create(&folder.path().join("b.bin"), Format::NanoGpt, "t", 70_000).expect("a shard");
        assert!(writer.write(&[65_536], 0, 0).is_err());
    }
}
