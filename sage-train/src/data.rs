//! Text to batches: `source` reads documents, `tokenizer` makes ids of them, `batches` orders them, `feed` has
//! them ready.

mod batches;
pub mod corpus;
mod feed;
mod source;
mod tokenizer;

pub use batches::{Batch, Batches, Sequences};
pub use feed::Feed;
pub use source::files;
pub use tokenizer::Tokenizer;

use candle_sage::{Error, Result};
use rayon::prelude::*;

use crate::config::DataConfig;

/// Everything a run reads: tokens to train on, tokens to validate on, and their tokenizer.
#[derive(Debug)]
pub struct Dataset {
    /// Tokens to train on.
    pub train: Vec<u32>,
    /// Tokens to validate on.
    pub validation: Vec<u32>,
    /// Entropy of single tokens over all the data, in nats: what a model that knows frequencies only
    /// reaches.
    pub unigram_entropy: f64,
    /// Bytes of text in all.
    pub bytes: u64,
    /// Documents in all.
    pub documents: usize,
    /// The tokenizer.
    pub tokenizer: Tokenizer,
}

impl Dataset {
    /// Reads, splits and tokenizes the text.
    ///
    /// # Errors
    /// When the text cannot be read, or is too short for the context.
    pub fn load(config: &DataConfig, say: &dyn Fn(&str)) -> Result<Self> {
        let documents = source::documents(config)?;
        let (bytes, count) = (documents.iter().map(|d| d.len() as u64).sum::<u64>(), documents.len());
        let tokenizer = Tokenizer::trained_on(&documents, config, say)?;
        say(&format!("tokenizing {:.1} MB", bytes as f64 / 1e6));
        let (train_text, validation_text) = split(&documents, config.val_fraction);
        let encode = |text: &[&str]| encode(&tokenizer, text);
        let (train, validation) = (encode(&train_text)?, encode(&validation_text)?);
        for (part, tokens) in [("training", &train), ("validation", &validation)] {
            if tokens.len() <= config.context {
                return Err(Error::new(format!("the {part} text is shorter than one sequence"))
                    .got(format!("{} tokens of {part} text", tokens.len()))
                    .allowed(format!(
                        "at least {} (context {} and the token after it)",
                        config.context + 1,
                        config.context
                    ))
                    .hint("give more text, a shorter --context, or another --val-fraction"));
            }
        }
        tokenizer.cache()?;
        Ok(Self {
            unigram_entropy: entropy(train.iter().chain(&validation), tokenizer.vocab_size()),
            train,
            validation,
            bytes,
            documents: count,
            tokenizer,
        })
    }
}

/// Cuts the last part of the text off for validation: whole documents where they fit, and where one
/// is too long, its end.
fn split(documents: &[String], fraction: f64) -> (Vec<&str>, Vec<&str>) {
    let bytes: usize = documents.iter().map(String::len).sum();
    let wanted = ((bytes as f64 * fraction) as usize).max(1);
    let mut train: Vec<&str> = documents.iter().map(String::as_str).collect();
    let mut validation = Vec::new();
    let mut held = 0;
    while let Some(document) = train.pop() {
        let room = wanted.saturating_sub(held);
        if room == 0 {
            train.push(document);
            break;
        }
        // A tenth too much is better than half a document.
        if train.is_empty() || document.len() > room + wanted / 10 {
            let (before, after) = document.split_at(cut(document, room));
            train.push(before);
            validation.push(after);
            break;
        }
        held += document.len();
        validation.push(document);
    }
    validation.reverse();
    (train, validation)
}

/// Where to cut the last `room` bytes off: behind a line end close by, or else at a character.
fn cut(document: &str, room: usize) -> usize {
    let mut at = document.len().saturating_sub(room);
    while !document.is_char_boundary(at) {
        at -= 1;
    }
    match document[at..].find('\n') {
        Some(line) if line < room / 10 => at + line + 1,
        _ => at,
    }
}

/// The tokens of all documents, each followed by the end-of-text token.
fn encode(tokenizer: &Tokenizer, documents: &[&str]) -> Result<Vec<u32>> {
    let parts: Vec<Vec<u32>> = documents.par_iter().map(|d| tokenizer.encode(d)).collect::<Result<_>>()?;
    let mut tokens = Vec::with_capacity(parts.iter().map(|p| p.len() + 1).sum());
    for part in parts {
        tokens.extend(part);
        tokens.push(tokenizer.end_of_text());
    }
    Ok(tokens)
}

fn entropy<'a>(tokens: impl Iterator<Item = &'a u32>, vocab: usize) -> f64 {
    let mut counts = vec![0u64; vocab];
    for &token in tokens {
        counts[token as usize] += 1;
    }
    let total = counts.iter().sum::<u64>() as f64;
    counts.iter().filter(|&&c| c > 0).map(|&c| c as f64 / total).map(|p| -p * p.ln()).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_asked_part_is_kept_for_validation() {
        let line = "a line of text\n".repeat(100);
        let cases: Vec<Vec<String>> = vec![
            vec![line.clone()],
            vec!["é".repeat(700)],
            vec!["title\n".into(), "x".repeat(5000)],
            vec!["title\n".to_string() + &"x".repeat(5000)],
            vec!["x".repeat(100), "y".repeat(10_000)],
            vec!["x".repeat(10_000), "y".repeat(100)],
            (0..200).map(|n| n.to_string().repeat(10)).collect(),
        ];
        for documents in cases {
            for fraction in [0.05, 0.3] {
                let (train, validation) = split(&documents, fraction);
                assert_eq!(train.concat() + &validation.concat(), documents.concat());
                let (all, kept) = (documents.concat().len() as f64, validation.concat().len() as f64);
                assert!((0.85..1.15).contains(&(kept / (all * fraction))), "{kept} of {all} at {fraction}");
            }
        }
        let lines = [line];
        let (train, _) = split(&lines, 0.1);
        assert!(train[0].ends_with('\n'));
    }

    #[test]
    fn entropy_of_a_fair_coin() {
        assert!((entropy([0, 1, 0, 1].iter(), 3) - 2f64.ln()).abs() < 1e-12);
    }
}
