//! Converts line ends of Windows to line ends of Unix.

use std::io::{BufRead, BufReader, Read};

/// A reader that replaces `\r\n` by `\n`. A `\r` without a following `\n` is kept.
pub(super) struct UnixLines<R> {
    inner: BufReader<R>,
    /// Whether the last byte that was read from `inner` is a `\r` that has not been returned yet.
    held: bool,
}

impl<R: Read> UnixLines<R> {
    pub(super) fn new(inner: R) -> Self {
        Self { inner: BufReader::with_capacity(1 << 16, inner), held: false }
    }
}

impl<R: Read> Read for UnixLines<R> {
    fn read(&mut self, bytes: &mut [u8]) -> std::io::Result<usize> {
        let mut read = 0;
        while read < bytes.len() {
            let Some(&next) = self.inner.fill_buf()?.first() else {
                if std::mem::take(&mut self.held) {
                    (bytes[read], read) = (b'\r', read + 1);
                }
                break;
            };
            if std::mem::take(&mut self.held) && next != b'\n' {
                (bytes[read], read) = (b'\r', read + 1);
                continue;
            }
            let there = self.inner.fill_buf()?;
            let len =
                there.iter().position(|&byte| byte == b'\r').unwrap_or(there.len()).min(bytes.len() - read);
            bytes[read..read + len].copy_from_slice(&there[..len]);
            read += len;
            self.held = there.get(len) == Some(&b'\r') && read < bytes.len();
            let taken = len + usize::from(self.held);
            self.inner.consume(taken);
        }
        Ok(read)
    }
}
