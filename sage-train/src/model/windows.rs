//! Sliding windows of attention: how many tokens a query sees, and in which layers.

use std::fmt;
use std::str::FromStr;

use candle_sage::{Error, Result};
use serde::{Deserialize, Serialize};

/// The sliding windows of a model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Windows {
    /// The most tokens that a query sees, including its own token.
    pub tokens: usize,
    /// The layers that have the window.
    pub pattern: WindowPattern,
}

impl Windows {
    /// The most tokens that a query of a layer sees. `None`: all.
    pub fn of(&self, layer: usize) -> Option<usize> {
        self.pattern.slides(layer).then_some(self.tokens)
    }
}

/// The approximate number of (query, key) pairs of causal attention over `tokens` tokens, where a query sees at most
/// `window` keys. Without a window: half of all pairs.
pub fn causal_pairs(tokens: usize, window: Option<usize>) -> f64 {
    let n = tokens as f64;
    // The window hides `hidden` keys from the last query, one fewer from the query before it, and so on.
    let hidden = n - window.map_or(n, |window| n.min(window as f64));
    0.5 * (n * n - hidden * hidden)
}

impl fmt::Display for Windows {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "of {} tokens (layer pattern {})", self.tokens, self.pattern)
    }
}

/// Which layers attend to a window, in the letters that modded-nanogpt and nanochat use: `S` for a window (short),
/// `L` for all tokens (long). The letters repeat over the layers: with `SSSL` every fourth layer sees all tokens.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct WindowPattern(Vec<bool>);

impl WindowPattern {
    /// The pattern from one value for each layer: `true` if the layer has a sliding window.
    pub fn by_layer(slides: impl IntoIterator<Item = bool>) -> Self {
        Self(slides.into_iter().collect())
    }

    /// Whether a layer has the window.
    pub fn slides(&self, layer: usize) -> bool {
        self.0[layer % self.0.len()]
    }
}

impl Default for WindowPattern {
    /// The window in every layer.
    fn default() -> Self {
        Self(vec![true])
    }
}

impl FromStr for WindowPattern {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let letters = text.trim().chars().map(|letter| match letter.to_ascii_uppercase() {
            'S' => Some(true),
            'L' => Some(false),
            _ => None,
        });
        match letters.collect::<Option<Vec<bool>>>() {
            Some(letters) if !letters.is_empty() => Ok(Self(letters)),
            _ => Err(Error::new("not a pattern of windows")
                .got(format!("`{text}`"))
                .allowed("a letter for each layer (S: window, L: all tokens); a short pattern repeats")
                .hint("with SSSL every fourth layer sees all tokens")),
        }
    }
}

impl fmt::Display for WindowPattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|slides| f.write_str(if *slides { "S" } else { "L" }))
    }
}

impl TryFrom<String> for WindowPattern {
    type Error = Error;

    fn try_from(text: String) -> Result<Self> {
        text.parse()
    }
}

impl From<WindowPattern> for String {
    fn from(pattern: WindowPattern) -> Self {
        pattern.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_repeat_over_the_layers() {
        let windows = Windows { tokens: 4, pattern: "sSL".parse().expect("a pattern") };
        let of: Vec<Option<usize>> = (0..5).map(|layer| windows.of(layer)).collect();
        assert_eq!(of, [Some(4), Some(4), None, Some(4), Some(4)]);
        assert_eq!(windows.to_string(), "of 4 tokens (layer pattern SSL)");
        for bad in ["", "SX", "S L"] {
            assert!(bad.parse::<WindowPattern>().is_err(), "{bad}");
        }
    }

    #[test]
    fn pairs_are_those_within_the_window() {
        // In the approximation, query n sees n - 0.5 keys for n = 1 to 4, and each later query sees 4 keys.
        assert_eq!(causal_pairs(8, Some(4)), 0.5 + 1.5 + 2.5 + 3.5 + 4.0 * 4.0);
        assert_eq!((causal_pairs(8, None), causal_pairs(4, Some(4))), (4.0 * 8.0, 2.0 * 4.0));
    }
}
