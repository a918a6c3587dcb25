//! The results of `probe --selections` as tables and as CSV.

use std::fmt::Write;

use crate::probe::selected::{Chosen, Selections, Unselected, WAYS};

fn chosen(chosen: Chosen) -> &'static str {
    match chosen {
        Chosen::Best => "best",
        Chosen::Learned => "learned",
        Chosen::Identity => "identity",
        Chosen::Window => "window",
    }
}

fn rest(rest: Unselected) -> &'static str {
    match rest {
        Unselected::Linear => "linear",
        Unselected::Constant => "a = .85",
        Unselected::Mean => "mean of V",
        Unselected::Pooled => "pooled",
        Unselected::Nothing => "nothing",
    }
}

/// [`Selections`] as two tables, each with a row for each layer and a row of means over layers.
pub fn selections_table(title: &str, found: &Selections) -> String {
    let mut out = format!("{title}\n\nrelative L2 of the output\n{:<7}", "blocks");
    WAYS.iter().for_each(|way| out += &format!(" {:>9}", chosen(way.0)));
    out += &format!("\n{:<7}", "rest");
    WAYS.iter().for_each(|way| out += &format!(" {:>9}", rest(way.1)));
    out.push('\n');
    out += &rows(found.layers.iter().map(|layer| layer.errors.clone()).collect());
    out += "\nfraction of dense attention's probabilities of past blocks that falls on the selected blocks\n";
    out += &format!("{:<7}", "layer");
    let all = [Chosen::Best, Chosen::Learned, Chosen::Identity, Chosen::Window];
    all.iter().for_each(|&of| out += &format!(" {:>9}", chosen(of)));
    out.push('\n');
    out + &rows(found.layers.iter().map(|layer| layer.mass.to_vec()).collect())
}

/// A row for each layer, and a row of means over the layers.
fn rows(layers: Vec<Vec<f64>>) -> String {
    let width = layers.first().map_or(0, Vec::len);
    let mean =
        (0..width).map(|n| layers.iter().map(|row| row[n]).sum::<f64>() / layers.len() as f64).collect();
    let names = (0..layers.len()).map(|layer| layer.to_string()).chain(["mean".into()]);
    let mut out = String::new();
    for (name, row) in names.zip(layers.iter().chain([&mean])) {
        let _ = write!(out, "{name:<7}");
        row.iter().for_each(|x| out += &format!(" {x:>9.4}"));
        out.push('\n');
    }
    out
}

/// The errors as CSV.
pub fn selections_csv(found: &Selections) -> String {
    let mut out = String::from("layer,blocks,rest,relative_l2\n");
    for layer in &found.layers {
        for (way, error) in WAYS.iter().zip(&layer.errors) {
            let _ = writeln!(out, "{},{},{},{error}", layer.layer, chosen(way.0), rest(way.1));
        }
    }
    out
}
