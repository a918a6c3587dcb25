//! Reads gzip files with any number of members (concatenated gzip streams).

use std::io::{BufRead, Read, Result};

use flate2::bufread::GzDecoder;

/// Reads the members of a gzip file one after the other. Ignores zeros (padding) after the last member, as `gzip` does.
pub(super) struct Gzip<R>(Option<GzDecoder<R>>);

impl<R: BufRead> Gzip<R> {
    pub(super) fn new(file: R) -> Self {
        Self(Some(GzDecoder::new(file)))
    }
}

impl<R: BufRead> Read for Gzip<R> {
    fn read(&mut self, bytes: &mut [u8]) -> Result<usize> {
        if bytes.is_empty() {
            return Ok(0);
        }
        // `self.0` keeps the member during the read: after an error, such as an interruption, a caller may read again.
        while let Some(member) = &mut self.0 {
            let read = member.read(bytes)?;
            if read > 0 {
                return Ok(read);
            }
            self.0 = match skip_zeros(member.get_mut())? {
                true => self.0.take().map(|member| GzDecoder::new(member.into_inner())),
                false => None,
            };
        }
        Ok(0)
    }
}

/// Skips zeros. Returns whether anything follows them.
fn skip_zeros(file: &mut impl BufRead) -> Result<bool> {
    loop {
        let there = file.fill_buf()?;
        let (zeros, len) = (there.iter().take_while(|&&byte| byte == 0).count(), there.len());
        file.consume(zeros);
        if zeros < len || len == 0 {
            return Ok(len > 0);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{BufReader, Error, ErrorKind, Write};

    use flate2::Compression;
    use flate2::write::GzEncoder;

    use super::*;

    /// The first read is interrupted, the second read returns one byte, and so on.
    struct Interrupted<'a>(&'a [u8], bool);

    impl Read for Interrupted<'_> {
        fn read(&mut self, bytes: &mut [u8]) -> Result<usize> {
            self.1 = !self.1;
            match self.1 {
                true => Err(Error::from(ErrorKind::Interrupted)),
                false => self.0.read(&mut bytes[..1]),
            }
        }
    }

    #[test]
    fn an_interrupted_read_is_no_end() -> Result<()> {
        let member = |text: &str| {
            let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
            encoder.write_all(text.as_bytes())?;
            encoder.finish()
        };
        let file = [member("one, ")?, member("two")?, vec![0; 100]].concat();
        let mut text = String::new();
        Gzip::new(BufReader::with_capacity(1, Interrupted(&file, false))).read_to_string(&mut text)?;
        assert_eq!(text, "one, two");
        Ok(())
    }
}
