//! Error of SageBwd relative to exact attention. The first table has several standard deviations of query and key, as
//! Table 1 of arXiv 2603.02170. The second table compares means that are subtracted from the keys: the mean of all
//! keys, of a sample of the keys, or of another case's keys.
//!
//! `cargo bench -p candle-sage --bench accuracy`

#[path = "../tests/it/support.rs"]
mod support;

use candle_core::{DType, Result};
use candle_sage::{Granularity, Int8Products, KeyMean, SageBwd, Scheme, Smoothing};
use support::{Case, Normals, PUBLISHED, sigma_errors};

const SEEDS: u64 = 6;
const TOKENS: usize = 1024;

fn over_seeds(errors: impl Fn(u64) -> Result<[f64; 4]>) -> Result<[f64; 4]> {
    let mut mean = [0.0; 4];
    for seed in 0..SEEDS {
        mean.iter_mut().zip(errors(seed)?).for_each(|(mean, e)| *mean += e / SEEDS as f64);
    }
    Ok(mean)
}

fn cells(errors: [f64; 4], beside: [f64; 4]) -> String {
    errors.iter().zip(beside).map(|(e, other)| format!(" {e:>9.5} {:>5.2}x", e / other)).collect()
}

fn table_1() -> Result<()> {
    println!(
        "relative L2 error, causal, N {TOKENS}, one head, mean of {SEEDS} seeds; followed by the ratio to the published figure\n"
    );
    println!(
        "{:>3} {:>5}  {:<15} {:>16} {:>16} {:>16} {:>16}",
        "d", "sigma", "scheme", "O", "dQ", "dK", "dV"
    );
    let sage = SageBwd::default();
    let schemes: [(&str, Scheme); 6] = [
        ("vector", sage.into()),
        ("group-16", sage.granularity(Granularity::Group(16)).into()),
        ("tile", sage.granularity(Granularity::Tile).into()),
        ("forward-and-s", sage.products(Int8Products::FORWARD_AND_S).into()),
        ("scores", sage.products(Int8Products::SCORES).into()),
        ("unquantized", Scheme::Unquantized),
    ];
    for head_dim in [64, 128] {
        for (sigma, published) in PUBLISHED {
            for (name, scheme) in schemes {
                let errors = over_seeds(|seed| sigma_errors(scheme, head_dim, sigma, seed))?;
                println!("{head_dim:>3} {sigma:>5}  {name:<15}{}", cells(errors, published));
            }
        }
        println!();
    }
    Ok(())
}

/// Values of `common` in [`case_with`], each after its name.
const COMMON: [(&str, f32, f32); 3] =
    [("nothing", 0.0, 0.0), ("10 sigma", 10.0, 10.0), ("0 to 20 sigma", 0.0, 20.0)];

/// A random case. A random vector, the same for all seeds, is multiplied by a factor and added to each key. The vector
/// has standard deviation `sigma`. The factor changes linearly from `common.0` at the first key to `common.1` at the
/// last.
fn case_with(common: (f32, f32), head_dim: usize, sigma: f32, seed: u64) -> Case {
    let mut case = Case::new(1, (TOKENS, TOKENS), (1, 1), head_dim, true);
    case.draw(sigma, seed);
    let direction = Normals::new(1000).vec(head_dim, sigma);
    case.add_to_keys(&direction, |token| {
        common.0 + (common.1 - common.0) * token as f32 / (TOKENS - 1) as f32
    });
    case
}

fn means_of_keys() -> Result<()> {
    println!(
        "the same by what keys have in common and whose mean is subtracted; followed by the ratio to the mean of all keys\n"
    );
    println!(
        "{:>3} {:>5}  {:<13} {:<7} {:<10} {:>15} {:>16} {:>16} {:>16}",
        "d", "sigma", "in common", "set", "mean of", "O", "dQ", "dK", "dV"
    );
    for (head_dim, sigma) in [(64, 1.0), (64, 3.0), (128, 1.0), (128, 3.0)] {
        for (common, first, last) in COMMON {
            for (set, products) in [("paper", Int8Products::PAPER), ("scores", Int8Products::SCORES)] {
                let sage = SageBwd::default().products(products);
                let errors = |settings: SageBwd, earlier: bool| {
                    over_seeds(|seed| {
                        let mut case = case_with((first, last), head_dim, sigma, seed);
                        if earlier {
                            // Subtracting one vector from all keys changes neither the exact output nor any exact
                            // gradient.
                            let other = case_with((first, last), head_dim, sigma, seed + SEEDS);
                            case.add_to_keys(&other.mean_of_keys(), |_| -1.0);
                        }
                        case.errors(settings.into(), DType::F32)
                    })
                };
                let all = errors(sage, false)?;
                let rows = [
                    ("all", all),
                    ("sample-64", errors(sage.key_mean(KeyMean::Sample(64)), false)?),
                    ("other keys", errors(sage.smoothing(Smoothing::None), true)?),
                    ("none", errors(sage.smoothing(Smoothing::None), false)?),
                ];
                for (name, errors) in rows {
                    println!(
                        "{head_dim:>3} {sigma:>5}  {common:<13} {set:<7} {name:<10}{}",
                        cells(errors, all)
                    );
                }
            }
        }
        println!();
    }
    Ok(())
}

fn main() -> Result<()> {
    table_1()?;
    means_of_keys()
}
