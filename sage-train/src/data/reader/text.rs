//! Reads a text file, which is one document.

use std::io::Read;
use std::path::Path;

use candle_sage::Result;

use super::{BadDocuments, EachUntil, Piece, not_text, not_utf8, unreadable};
use crate::data::tokenizer::{PIECE, piece_end};

pub(super) fn text(
    path: &Path,
    mut reader: Box<dyn Read + '_>,
    bad: BadDocuments<'_>,
    each: &mut EachUntil<'_>,
) -> Result<()> {
    let (mut held, mut before) = (Vec::new(), 0);
    // A byte order mark is not part of the text.
    let mark = "\u{feff}".as_bytes();
    reader.by_ref().take(mark.len() as u64).read_to_end(&mut held).map_err(unreadable(path))?;
    if held == mark {
        held.clear();
        before = mark.len();
    }
    loop {
        // More than PIECE bytes, unless the file ends: [`piece_end`] does not split a shorter text.
        let wanted = (2 * PIECE).saturating_sub(held.len()) as u64;
        let read = reader.by_ref().take(wanted).read_to_end(&mut held).map_err(unreadable(path))?;
        let last = (read as u64) < wanted;
        let valid = match std::str::from_utf8(&held) {
            Ok(valid) => valid,
            // The bytes may end inside a character, except at the end of the file.
            Err(error) if !last && error.error_len().is_none() => {
                std::str::from_utf8(&held[..error.valid_up_to()]).expect("checked so far")
            }
            Err(error) => {
                bad.take(not_utf8(path, format!("byte {}", before + error.valid_up_to()), &held))?;
                return end_early(before > 0, each);
            }
        };
        if let Some(at) = valid.find('\0') {
            bad.take(not_text(path, before + at))?;
            return end_early(before > 0, each);
        }
        if last {
            let text = valid.to_owned();
            return each(Piece { text, ends: true }).map(drop);
        }
        let end = piece_end(valid);
        if each(Piece { text: valid[..end].to_owned(), ends: false })?.is_break() {
            return Ok(());
        }
        held.drain(..end);
        before += end;
    }
}

/// Ends the document with an empty piece if `each` has already received pieces of the document.
fn end_early(begun: bool, each: &mut EachUntil<'_>) -> Result<()> {
    if begun { each(Piece { text: String::new(), ends: true }).map(drop) } else { Ok(()) }
}
