//! Text to batches: `source` reads documents, `tokenizer` makes ids of them, `batches` orders them.

mod batches;
pub mod corpus;
mod source;
mod tokenizer;

pub use batches::{Batch, Batches};
pub use source::documents;
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
    /// Bytes of text in a validation token, on average.
    pub bytes_per_token: f64,
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
        let bytes: u64 = documents.iter().map(|d| d.len() as u64).sum();
        let tokenizer = Tokenizer::trained_on(&documents, config, say)?;
        let count = documents.len();
        let (train, validation) = split(documents, config.val_fraction);
        say(&format!("tokenizing {:.1} MB", bytes as f64 / 1e6));
        let validation_bytes: usize = validation.iter().map(String::len).sum();
        let (train, validation) = (encode(&tokenizer, &train)?, encode(&tokenizer, &validation)?);
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
        Ok(Self {
            bytes_per_token: validation_bytes as f64 / validation.len() as f64,
            unigram_entropy: entropy(train.iter().chain(&validation), tokenizer.vocab_size()),
            train,
            validation,
            bytes,
            documents: count,
            tokenizer,
        })
    }
}

/// The last documents, up to a part of the bytes, are for validation. A text of one document is cut
/// in two at a line.
fn split(mut documents: Vec<String>, fraction: f64) -> (Vec<String>, Vec<String>) {
    let bytes: usize = documents.iter().map(String::len).sum();
    let wanted = ((bytes as f64 * fraction) as usize).max(1);
    if let [document] = documents.as_mut_slice() {
        let mut at = document.len().saturating_sub(wanted);
        while !document.is_char_boundary(at) {
            at -= 1;
        }
        let at = document[..at].rfind('\n').map_or(at, |line| line + 1);
        let validation = document.split_off(at);
        return (documents, vec![validation]);
    }
    let mut held = 0;
    let mut first = documents.len();
    while first > 1 && held < wanted {
        first -= 1;
        held += documents[first].len();
    }
    let validation = documents.split_off(first);
    (documents, validation)
}

/// The tokens of all documents, each followed by the end-of-text token.
fn encode(tokenizer: &Tokenizer, documents: &[String]) -> Result<Vec<u32>> {
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
    fn one_document_is_cut_at_a_line_and_many_between() {
        let text = "a line of text\n".repeat(100);
        let (train, validation) = split(vec![text.clone()], 0.1);
        assert_eq!(train.concat() + &validation.concat(), text);
        assert!(train[0].ends_with('\n') && (150..180).contains(&validation[0].len()));
        let (train, validation) = split(vec!["é".repeat(50)], 0.33);
        assert_eq!(train[0].len() + validation[0].len(), 100);
        let documents: Vec<String> = (0..10).map(|n| n.to_string().repeat(10)).collect();
        let (train, validation) = split(documents, 0.15);
        assert_eq!((train.len(), validation.len()), (8, 2));
    }

    #[test]
    fn entropy_of_a_fair_coin() {
        assert!((entropy([0, 1, 0, 1].iter(), 3) - 2f64.ln()).abs() < 1e-12);
    }
}
