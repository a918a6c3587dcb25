//! Errors of probes as tables.

use std::fmt::Write;

use super::table::csv_cell;
use crate::metrics::{Probed, QUANTITIES, RESULTS, Row, Sizes};
use crate::probe::SigmaRow;

/// Table 2 of the SageBwd paper (arXiv 2603.02170): for each of [`QUANTITIES`], the cosine with the exact value and
/// the relative L2 error. Measured in layer 11, the least accurate of 20, with QK-norm and 2.1M tokens per step.
const PAPER: [(f64, f64); 8] = [
    (0.9973, 0.0736),
    (0.9917, 0.1293),
    (1.0, 0.0),
    (0.9789, 0.2045),
    (0.9969, 0.0793),
    (0.9664, 0.2579),
    (0.9537, 0.3074),
    (0.9985, 0.0540),
];

/// Tables by layer. The first has the cosine and relative L2 of each of [`QUANTITIES`], as in the SageBwd paper's
/// Table 2. Others follow if measured: magnitudes of tensors, the fractions of NVFP4 groups that are out of range, and
/// errors when only one matmul or operand is quantized.
pub fn layer_errors(title: &str, probed: &Probed) -> String {
    let rows = &probed.rows;
    let names: Vec<&str> =
        QUANTITIES.into_iter().filter(|name| rows.iter().any(|row| row.errors.contains_key(*name))).collect();
    let mut out = format!("{title}\n\n{:<7}", "layer");
    for name in &names {
        let _ = write!(out, " {:>16}", format!("{name} cos/rel L2"));
    }
    out.push('\n');
    let cell = |cosine: f64, l2: f64| format!("{cosine:.4} / {l2:.4}");
    for row in rows {
        let _ = write!(out, "{:<7}", place(row));
        for name in &names {
            let text =
                row.errors.get(*name).map_or("-".into(), |error| cell(error.cosine, error.relative_l2));
            let _ = write!(out, " {text:>16}");
        }
        out.push('\n');
    }
    // The paper's table is about SageBwd.
    if probed.scheme.starts_with("SageBwd") {
        let _ = write!(out, "{:<7}", "paper");
        for name in &names {
            let at = QUANTITIES.iter().position(|other| other == name).expect("one of them");
            let _ = write!(out, " {:>16}", cell(PAPER[at].0, PAPER[at].1));
        }
        out += "\n\npaper: the worst layer of a 325M model (arXiv 2603.02170, Table 2)\n";
    }
    // The table of saturated groups appears only if a group saturates.
    let saturates = rows.iter().any(|row| row.saturated.iter().any(|(_, share)| *share > 0.0));
    let saturated = if saturates { rows.as_slice() } else { &[] };
    out + &sizes(rows)
        + &out_of_range(rows, |row| &row.vanished, "groups of 16 whose scale is zero")
        + &out_of_range(
            saturated,
            |row| &row.saturated,
            "groups of 16 with a value above 2688, which saturates",
        )
        + &products(rows)
}

fn place(row: &Row) -> String {
    row.head.map_or(row.layer.to_string(), |head| format!("{}.{head}", row.layer))
}

fn sizes(rows: &[Row]) -> String {
    if rows.iter().all(|row| row.sizes.is_none()) {
        return String::new();
    }
    let heads = [
        "RMS P",
        "RMS dP",
        "RMS dS",
        "its bound",
        "max |q|",
        "max |k|",
        "max |logit|",
        "outliers q",
        "outliers k",
    ];
    let mut out = format!("\n{:<7}", "layer");
    heads.iter().for_each(|head| out += &format!(" {head:>11}"));
    out.push('\n');
    for row in rows {
        let Some(s) = &row.sizes else { continue };
        out += &format!("{:<7}", place(row));
        for x in [s.rms_p, s.rms_dp, s.rms_ds, s.bound_ds] {
            out += &format!(" {x:>11.2e}");
        }
        for x in [s.largest_q, s.largest_k, s.largest_logit] {
            out += &format!(" {x:>11.2}");
        }
        for x in [s.outlying_queries, s.outlying_keys] {
            out += &format!(" {:>11}", format!("{:.2} %", 100.0 * x));
        }
        out.push('\n');
    }
    out + "\nbound: max |dP - delta| sqrt(2 / (N + 1)), an upper bound of RMS dS; outliers: tokens above ten times \
           the median of their tile\n"
}

/// A table of [`Row::vanished`] or [`Row::saturated`], with a column for each operand.
fn out_of_range(rows: &[Row], of: fn(&Row) -> &Vec<(String, f64)>, caption: &str) -> String {
    let Some(first) = rows.iter().find(|row| !of(row).is_empty()) else { return String::new() };
    let mut out = format!("\n{:<7}", "layer");
    of(first).iter().for_each(|(name, _)| out += &format!(" {name:>16}"));
    out.push('\n');
    for row in rows.iter().filter(|row| !of(row).is_empty()) {
        out += &format!("{:<7}", place(row));
        of(row).iter().for_each(|(_, share)| out += &format!(" {:>16}", format!("{:.2} %", 100.0 * share)));
        out.push('\n');
    }
    out + &format!("\n{caption}\n")
}

fn products(rows: &[Row]) -> String {
    if rows.iter().all(|row| row.products.is_empty()) {
        return String::new();
    }
    let mut out = format!("\n{:<7} {:<16}", "layer", "in low bits");
    RESULTS.iter().for_each(|name| out += &format!(" {:>17}", format!("{name} L2 (share)")));
    out.push('\n');
    for row in rows.iter().filter(|row| !row.products.is_empty()) {
        for (product, errors) in &row.products {
            out += &format!("{:<7} {product:<16}", place(row));
            for (n, error) in errors.iter().enumerate() {
                let all: f64 =
                    row.products.iter().filter_map(|(_, errors)| errors[n]).map(|e| e.powi(2)).sum();
                let share = |error: f64| if all > 0.0 { 100.0 * error.powi(2) / all } else { 0.0 };
                let text = error.map_or("-".into(), |error| format!("{error:.4} ({:>3.0} %)", share(error)));
                out += &format!(" {text:>17}");
            }
            out.push('\n');
        }
    }
    out + "\nin each row only one matmul or operand is quantized; share: of the sum of the squared errors\n"
}

/// A table of attention's errors on random tensors, and of the errors in the SageBwd paper's Table 1.
pub fn sigma_errors(title: &str, rows: &[SigmaRow]) -> String {
    let mut out = format!("{title}\n\n{:<7}", "sigma");
    RESULTS.iter().for_each(|name| out += &format!(" {:>16}", format!("{name} cos/rel L2")));
    out.push('\n');
    for row in rows {
        out += &format!("{:<7}", row.sigma);
        for error in row.errors {
            out += &format!(" {:>16}", format!("{:.4} / {:.4}", error.cosine, error.relative_l2));
        }
        out.push('\n');
        if let Some((_, published)) = TABLE_1.iter().find(|(sigma, _)| *sigma == row.sigma) {
            out += &format!("{:<7}", "  paper");
            for (cosine, l2) in published {
                out += &format!(" {:>16}", format!("{cosine:.4} / {l2:.4}"));
            }
            out.push('\n');
        }
    }
    out + "\npaper: SageBwd (arXiv 2603.02170, Table 1), which does not state shape and mask\n"
}

/// SageBwd (arXiv 2603.02170), Table 1: for each sigma, cosine and relative L2 error of O, dQ, dK, dV.
const TABLE_1: [(f64, [(f64, f64); 4]); 5] = [
    (1.0, [(0.9999, 0.0160), (0.9998, 0.0184), (0.9998, 0.0220), (0.9999, 0.0159)]),
    (3.0, [(0.9992, 0.0389), (0.9971, 0.0758), (0.9970, 0.0777), (0.9992, 0.0387)]),
    (5.0, [(0.9982, 0.0603), (0.9798, 0.2014), (0.9799, 0.2007), (0.9982, 0.0605)]),
    (8.0, [(0.9953, 0.0972), (0.8900, 0.4666), (0.8886, 0.4699), (0.9953, 0.0973)]),
    (10.0, [(0.9933, 0.1161), (0.7823, 0.6648), (0.7820, 0.6684), (0.9933, 0.1157)]),
];

/// CSV with a line for each quantity of each [`Row`]. Errors fill the column `relative_l2` and, if it was measured,
/// `cosine`. Other quantities fill `value`.
pub fn probe_csv(probes: &[Probed]) -> String {
    let mut out = String::from(
        "scheme,step,context,sequences,qk_scale,token_scales,layer,head,codes_in,quantity,cosine,relative_l2,value\n",
    );
    for probed in probes {
        let Probed { scheme, context, sequences, qk_scale, token_scales, .. } = probed;
        let step = probed.step.map_or(String::new(), |step| step.to_string());
        // The scheme is always in quotes: existing scripts split the lines of the CSV at the closing quote.
        let scheme = csv_cell(scheme);
        let scheme = if scheme.starts_with('"') { scheme } else { format!("\"{scheme}\"") };
        for row in &probed.rows {
            let head = row.head.map_or(String::new(), |head| head.to_string());
            let start = format!(
                "{scheme},{step},{context},{sequences},{qk_scale},{token_scales},{},{head}",
                row.layer
            );
            for (name, error) in &row.errors {
                out += &format!("{start},all,{},{},{},\n", csv_cell(name), error.cosine, error.relative_l2);
            }
            for (product, errors) in &row.products {
                for (name, error) in RESULTS.iter().zip(errors) {
                    let Some(error) = error else { continue };
                    out += &format!("{start},{},{name},,{error},\n", csv_cell(product));
                }
            }
            for (name, size) in row.sizes.iter().flat_map(Sizes::named) {
                out += &format!("{start},,{name},,,{size}\n");
            }
            for (name, share) in &row.vanished {
                out += &format!("{start},{},vanished_groups,,,{share}\n", csv_cell(name));
            }
            for (name, share) in &row.saturated {
                out += &format!("{start},{},saturated_groups,,,{share}\n", csv_cell(name));
            }
        }
    }
    out
}
