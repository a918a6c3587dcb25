//! Error of SageBwd against exact attention as the logits spread: Table 1 of arXiv 2603.02170.
//!
//! `cargo bench -p candle-sage --bench accuracy`

#[path = "../tests/it/support.rs"]
mod support;

use candle_core::Result;
use candle_sage::{Granularity, SageBwd, Scheme};
use support::{PUBLISHED, sigma_errors};

const SEEDS: u64 = 6;

fn main() -> Result<()> {
    println!(
        "relative L2 error, causal, N 1024, one head, mean of {SEEDS} seeds; beside it the ratio to the published figure\n"
    );
    println!(
        "{:>3} {:>5}  {:<15} {:>16} {:>16} {:>16} {:>16}",
        "d", "sigma", "scheme", "O", "dQ", "dK", "dV"
    );
    let sage = SageBwd::default();
    let schemes: [(&str, Scheme); 4] = [
        ("vector", sage.into()),
        ("group-16", sage.granularity(Granularity::Group(16)).into()),
        ("tile", sage.granularity(Granularity::Tile).into()),
        ("full precision", Scheme::FullPrecision),
    ];
    for head_dim in [64, 128] {
        for (sigma, published) in PUBLISHED {
            for (name, scheme) in schemes {
                let mut mean = [0.0; 4];
                for seed in 0..SEEDS {
                    let errors = sigma_errors(scheme, head_dim, sigma, seed)?;
                    mean.iter_mut().zip(errors).for_each(|(mean, e)| *mean += e / SEEDS as f64);
                }
                let cells: String =
                    mean.iter().zip(published).map(|(e, p)| format!(" {e:>9.5} {:>5.2}x", e / p)).collect();
                println!("{head_dim:>3} {sigma:>5}  {name:<15}{cells}");
            }
        }
        println!();
    }
    Ok(())
}
