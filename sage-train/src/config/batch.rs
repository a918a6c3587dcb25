//! Resolves the settings of table `[batch]`: batch size and number of steps.

use candle_sage::{Error, Result};

use crate::checks::{in_range, need};
use crate::quantity::{Quantity, grouped};
use crate::settings::BatchSettings;

const MOST_MICRO_BATCHES: u64 = 1 << 16;

/// The number of steps from the settings.
///
/// # Errors
/// When a setting is out of range.
pub(super) fn steps(s: &BatchSettings) -> Result<u64> {
    let steps = match (s.steps, s.tokens) {
        (Some(steps), _) => steps.0,
        (None, Some(tokens)) => tokens.0.div_ceil(tokens_per_step(s)?),
        (None, None) => unreachable!("presets name steps"),
    };
    in_range("steps", steps, 1, 1 << 40)
}

fn tokens_per_step(s: &BatchSettings) -> Result<u64> {
    in_range("tokens-per-step", need(s.tokens_per_step).0, 1, 1 << 40)
}

/// The number of sequences in a micro-batch, and the number of micro-batches in a step. The run has `steps` steps over
/// sequences of `context` tokens.
///
/// # Errors
/// When a setting is out of range, or a step is not a whole number of micro-batches.
pub(super) fn resolve(s: &BatchSettings, context: usize, steps: u64) -> Result<(usize, usize)> {
    let micro_batch = in_range("micro-batch", need(s.micro_batch) as u64, 1, 1 << 20)? as usize;
    let tokens_per_step = tokens_per_step(s)?;
    let accumulation = accumulation(tokens_per_step, micro_batch, context)?;
    if steps.checked_mul(tokens_per_step).is_none() {
        return Err(Error::new("the run is too long to count its tokens")
            .got(format!("{steps} steps of {tokens_per_step} tokens"))
            .allowed("fewer than 2^64 tokens")
            .hint("lower --steps or --tokens-per-step"));
    }
    Ok((micro_batch, accumulation))
}

/// The number of micro-batches of a step. `micro_batch * context` cannot overflow: both settings have upper limits.
fn accumulation(tokens_per_step: u64, micro_batch: usize, context: usize) -> Result<usize> {
    let micro = (micro_batch * context) as u64;
    if tokens_per_step.is_multiple_of(micro) {
        let count = tokens_per_step / micro;
        return match count <= MOST_MICRO_BATCHES {
            true => Ok(count as usize),
            false => Err(Error::new("a step has too many micro-batches")
                .got(format!("{} micro-batches of {} tokens each", grouped(count), grouped(micro)))
                .allowed(format!("at most {}", grouped(MOST_MICRO_BATCHES)))
                .hint("raise --micro-batch, or lower --tokens-per-step")),
        };
    }
    let below = tokens_per_step / micro * micro;
    let nearest: Vec<String> = [below, below + micro]
        .into_iter()
        .filter(|&tokens| tokens > 0)
        .map(|tokens| format!("--tokens-per-step {}", Quantity(tokens)))
        .collect();
    let sequences = tokens_per_step / context as u64;
    let fits = (tokens_per_step.is_multiple_of(context as u64) && sequences > 0)
        .then(|| (1..=sequences.min(micro_batch as u64)).rev().find(|m| sequences.is_multiple_of(*m)))
        .flatten()
        .map(|m| format!(", or --micro-batch {m}"))
        .unwrap_or_default();
    Err(Error::new("tokens per step is not a whole number of micro-batches")
        .got(format!(
            "{} tokens = {:.3} x (micro-batch {micro_batch} x context {context})",
            grouped(tokens_per_step),
            tokens_per_step as f64 / micro as f64,
        ))
        .allowed(format!("a multiple of {} tokens", grouped(micro)))
        .hint(format!("nearest: {}{fits}", nearest.join(" or "))))
}
