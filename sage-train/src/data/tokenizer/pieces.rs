//! Splits a long text into pieces, which are encoded independently.

/// The largest size of a piece, in bytes.
pub(in crate::data) const PIECE: usize = 64 << 10;

/// Splits a text into pieces that end at line ends, or else between words, or else at character boundaries.
pub(in crate::data) fn pieces(text: &str) -> impl Iterator<Item = &str> {
    let mut rest = text;
    std::iter::from_fn(move || {
        let (piece, after) = rest.split_at(piece_end(rest));
        rest = after;
        (!piece.is_empty()).then_some(piece)
    })
}

/// The end of a text's first piece. It depends only on the first [`PIECE`] bytes, and on whether more bytes follow.
pub(in crate::data) fn piece_end(text: &str) -> usize {
    if text.len() <= PIECE {
        return text.len();
    }
    let end = (0..=PIECE).rev().find(|&end| text.is_char_boundary(end)).unwrap_or(text.len());
    let piece = &text[..end];
    let line = piece.rfind('\n').map(|line| line + 1);
    // Tokens of words begin with the space before the word, so pieces end before a space.
    line.or_else(|| between_words(piece)).unwrap_or(end)
}

/// The index of the last single space between two words.
fn between_words(text: &str) -> Option<usize> {
    let bytes = text.as_bytes();
    let space = |at: &usize| {
        bytes[*at] == b' ' && !bytes[at - 1].is_ascii_whitespace() && !bytes[at + 1].is_ascii_whitespace()
    };
    (1..bytes.len().saturating_sub(1)).rev().find(space)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_make_up_the_text() {
        let words = "word and words ".repeat(20_000);
        for text in ["", "a", &"line\n".repeat(40_000), &"é".repeat(70_000), &"x".repeat(200_000), &words] {
            assert_eq!(pieces(text).collect::<String>(), text);
            assert!(pieces(text).all(|piece| !piece.is_empty() && piece.len() <= PIECE));
        }
        assert!(pieces(&words).skip(1).all(|piece| piece.starts_with(" w") || piece.starts_with(" a")));
    }
}
