//! Tables of the errors that FP8 causes in linear layers.

use std::fmt::Write;

use crate::probe::linear::{LinearErrors, LinearLayerErrors};

/// The matrices of a Llama's layer, in the order of the table's columns.
const NAMES: [&str; 4] = ["query-key-value", "output", "gate-up", "down"];

/// A row for each layer with the errors of Y, dX and dW of each matrix, and a row for the mean.
pub fn linear_table(title: &str, errors: &LinearErrors) -> String {
    let mut names = NAMES.to_vec();
    for linear in &errors.linears {
        if !names.contains(&linear.name) {
            names.push(linear.name);
        }
    }
    let mut out = format!("{title}\n\nrelative L2\n{:<5}", "");
    names.iter().for_each(|name| out += &format!("  {name:<20}"));
    out = format!("{}\n{:<5}", out.trim_end(), "layer");
    names.iter().for_each(|_| ["Y", "dX", "dW"].iter().for_each(|of| out += &format!(" {of:>6}")));
    out.push('\n');
    let layers = errors.linears.iter().map(|linear| linear.layer + 1).max().unwrap_or(0);
    let mut row = |name: String, of: &dyn Fn(&LinearLayerErrors) -> bool| {
        let _ = write!(out, "{name:<5}");
        for matrix in &names {
            let all: Vec<_> =
                errors.linears.iter().filter(|linear| linear.name == *matrix && of(linear)).collect();
            for n in 0..3 {
                match all.len() {
                    // A layer without attention lacks some matrices.
                    0 => out += &format!(" {:>6}", "-"),
                    count => {
                        let mean = all.iter().map(|linear| linear.errors[n]).sum::<f64>() / count as f64;
                        out += &format!(" {mean:>6.4}");
                    }
                }
            }
        }
        out.push('\n');
    };
    (0..layers).for_each(|layer| row(layer.to_string(), &|linear| linear.layer == layer));
    row("mean".into(), &|_| true);
    out
}

/// The errors as CSV.
pub fn linear_csv(errors: &LinearErrors) -> String {
    let mut out = String::from("layer,matrix,y,dx,dw\n");
    for LinearLayerErrors { layer, name, errors: [y, dx, dw] } in &errors.linears {
        let _ = writeln!(out, "{layer},{name},{y},{dx},{dw}");
    }
    out
}
