//! Finished runs as a table.

use std::fmt::Write;

use crate::metrics::Outcome;
use crate::probe::{LayerErrors, RESULTS};

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

/// Errors of every layer, cosine and relative L2, as the paper's Table 2 gives them.
pub fn layer_errors(title: &str, layers: &[LayerErrors]) -> String {
    let mut out = format!("{title}\n\n{:<7}", "layer");
    for name in RESULTS {
        let _ = write!(out, " {:>17}", format!("{name} cos / rel L2"));
    }
    out.push('\n');
    for LayerErrors { layer, results } in layers {
        let _ = write!(out, "{layer:<7}");
        for result in results {
            let _ = write!(out, " {:>17}", format!("{:.4} / {:.4}", result.cosine, result.relative_l2));
        }
        out.push('\n');
    }
    // SageBwd, Table 2: layer 11, the worst of 20, QK-norm, 2.1M tokens a step.
    let published = ["0.9969 / 0.0793", "0.9664 / 0.2579", "0.9537 / 0.3074", "0.9985 / 0.0540"];
    let _ = write!(out, "{:<7}", "paper");
    published.iter().for_each(|text| out += &format!(" {text:>17}"));
    out + "\n\npaper: the worst layer of a 325M model (arXiv 2603.02170, Table 2)\n"
}
