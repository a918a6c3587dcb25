//! Finished runs as a table.

use std::fmt::Write;

use crate::metrics::Outcome;

/// One row a run; losses and speeds are compared with the first.
pub fn comparison(outcomes: &[Outcome]) -> String {
    let mut out = String::new();
    let _ = writeln!(
        out,
        "{:<9} {:>9} {:>11} {:>9} {:>10} {:>9}  folder",
        "attention", "val loss", "bits / byte", "loss", "tokens/s", "speed"
    );
    let Some(first) = outcomes.first() else { return out };
    for run in outcomes {
        let _ = writeln!(
            out,
            "{:<9} {:>9.4} {:>11.4} {:>9} {:>10.0} {:>9}  {}",
            run.attn.to_string(),
            run.val_loss,
            run.val_bits_per_byte,
            format!("{:+.2} %", 100.0 * (run.val_loss / first.val_loss - 1.0)),
            run.tokens_per_second,
            format!("{:.2}x", run.tokens_per_second / first.tokens_per_second),
            run.folder.display(),
        );
    }
    let _ = writeln!(
        out,
        "\nunigram entropy {:.4} nats: {:.2} above the best validation loss",
        first.unigram_entropy,
        first.unigram_entropy - outcomes.iter().map(|run| run.val_loss).fold(f64::INFINITY, f64::min),
    );
    out
}
