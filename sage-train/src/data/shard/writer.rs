//! Writes shards: tokens are appended, and the sidecar is written when the shard is complete.

use std::fs::File;
use std::io::{BufWriter, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use candle_sage::{Error, Result};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::{Format, Sidecar};
use crate::{hex, partial, writing};

/// The state of a shard that is being written, from which writing can be resumed.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PartialShard {
    sidecar: Sidecar,
    /// Tokens of the current document so far.
    document: u64,
}

/// Writes one shard, which is incomplete until [`ShardWriter::finish`].
#[derive(Debug)]
pub struct ShardWriter {
    path: PathBuf,
    file: BufWriter<File>,
    sidecar: Sidecar,
    /// Tokens of the current document so far.
    document: u64,
    buffer: Vec<u8>,
}

impl ShardWriter {
    /// Creates a new shard.
    ///
    /// # Errors
    /// When the file cannot be created.
    pub fn create(path: &Path, format: Format, tokenizer: &str, vocab_size: usize) -> Result<Self> {
        let mut file = BufWriter::with_capacity(1 << 20, File::create_new(path).map_err(writing(path))?);
        let mut header = vec![0; format.header() as usize];
        if let Some((magic, version)) = format.magic() {
            // Until the shard is complete, its header states 2^32 - 1 tokens. This does not match the file's length, so
            // [`Shard::open`] rejects an incomplete shard.
            let numbers = [magic.to_le_bytes(), version.to_le_bytes(), [0xff; 4]];
            header[..12].copy_from_slice(numbers.as_flattened());
        }
        file.write_all(&header).and_then(|()| file.flush()).map_err(writing(path))?;
        let sidecar = Sidecar {
            format,
            tokens: 0,
            sha256: String::new(),
            tokenizer: tokenizer.into(),
            vocab_size,
            text_bytes: 0,
            token_bytes: Some(0),
            document_tokens: Vec::new(),
            continues: false,
        };
        Ok(Self { path: path.to_owned(), file, sidecar, document: 0, buffer: Vec::new() })
    }

    /// Syncs the tokens to disk, and returns the state so far, for [`ShardWriter::reopen`].
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn begun(&mut self) -> Result<PartialShard> {
        let written = self.file.flush().and_then(|()| self.file.get_ref().sync_data());
        written.map_err(writing(&self.path))?;
        Ok(PartialShard { sidecar: self.sidecar.clone(), document: self.document })
    }

    /// Continues a shard from a saved state. Tokens that were written after that state are removed.
    ///
    /// # Errors
    /// When the file does not exist, or is shorter than in the saved state.
    pub fn reopen(path: &Path, PartialShard { sidecar, document }: PartialShard) -> Result<Self> {
        let failed = || writing(path);
        let mut file = File::options().write(true).open(path).map_err(failed())?;
        let format = sidecar.format;
        let (len, there) =
            (format.header() + sidecar.tokens * format.width(), file.metadata().map_err(failed())?.len());
        if there < len {
            return Err(Error::new("an incomplete shard is shorter than when the progress was saved")
                .got(format!("{}: {there} bytes", path.display()))
                .allowed(format!("at least {len}"))
                .hint("remove the folder and prepare the data again"));
        }
        let _ = std::fs::remove_file(Sidecar::path(path));
        file.set_len(len).map_err(failed())?;
        if format.magic().is_some() {
            // Marks the shard as incomplete: it may have been completed after the `PartialShard` was saved.
            file.seek(SeekFrom::Start(8)).and_then(|_| file.write_all(&[0xff; 4])).map_err(failed())?;
        }
        file.seek(SeekFrom::Start(len)).map_err(failed())?;
        let file = BufWriter::with_capacity(1 << 20, file);
        Ok(Self { path: path.to_owned(), file, sidecar, document, buffer: Vec::new() })
    }

    /// Tokens written so far.
    pub fn tokens(&self) -> u64 {
        self.sidecar.tokens
    }

    /// Appends tokens, which encode `text_bytes` bytes of text and decode to `token_bytes` bytes. The two numbers
    /// differ if the tokenizer changes text.
    ///
    /// # Errors
    /// When the file cannot be written, or an id does not fit the format.
    pub fn write(&mut self, tokens: &[u32], text_bytes: u64, token_bytes: u64) -> Result<()> {
        if let Some(token) = tokens.iter().find(|&&t| self.sidecar.format.width() == 2 && t > 0xffff) {
            return Err(Error::new("a token does not fit the format")
                .got(format!("id {token} in {}", self.sidecar.format))
                .allowed("ids up to 65535")
                .hint("--format llmc-u32"));
        }
        self.buffer.clear();
        self.sidecar.format.encode(tokens, &mut self.buffer);
        self.file.write_all(&self.buffer).map_err(writing(&self.path))?;
        self.sidecar.tokens += tokens.len() as u64;
        self.document += tokens.len() as u64;
        // If an earlier version of the program began the shard, the sidecar has no `token_bytes`, and its `text_bytes`
        // counts the bytes to which the tokens decode.
        self.sidecar.token_bytes =
            Some(self.sidecar.token_bytes.unwrap_or(self.sidecar.text_bytes) + token_bytes);
        self.sidecar.text_bytes += text_bytes;
        Ok(())
    }

    /// Ends the current document.
    pub fn end_document(&mut self) {
        self.sidecar.document_tokens.push(std::mem::take(&mut self.document));
    }

    /// Completes the shard on disk, and writes its sidecar.
    ///
    /// # Errors
    /// When a file cannot be written, or the shard has too many tokens for its header.
    pub fn finish(mut self) -> Result<Sidecar> {
        self.sidecar.continues = self.document > 0;
        if self.sidecar.continues {
            self.end_document();
        }
        let path = self.path;
        let failed = || writing(&path);
        let mut file = self.file.into_inner().map_err(|error| failed()(error.into_error()))?;
        if self.sidecar.format.magic().is_some() {
            let count = u32::try_from(self.sidecar.tokens).map_err(|_| {
                Error::new("a shard has too many tokens for its header")
                    .got(self.sidecar.tokens)
                    .allowed("up to 4,294,967,295")
                    .hint("--shard-tokens 100m")
            })?;
            file.seek(SeekFrom::Start(8)).map_err(failed())?;
            file.write_all(&count.to_le_bytes()).map_err(failed())?;
        }
        file.sync_all().map_err(failed())?;
        drop(file);
        let mut hash = Sha256::new();
        std::io::copy(&mut File::open(&path).map_err(failed())?, &mut hash).map_err(failed())?;
        self.sidecar.sha256 = hex(&hash.finalize());
        let beside = Sidecar::path(&path);
        let text = serde_json::to_vec(&self.sidecar).expect("plain values");
        partial::file(&beside, |to| std::fs::write(to, text).map_err(writing(to)))?;
        Ok(self.sidecar)
    }
}
