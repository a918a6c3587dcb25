//! How a scheme's settings affect the error of dQ if the keys have a large mean: `cargo run --release -p candle-sage
//! --example scheme`

use candle_core::{Device, Result, Tensor, Var};
use candle_sage::{Attention, Granularity, SageBwd, Scheme, Smoothing};

fn main() -> Result<()> {
    let dims = (1, 1024, 4, 64);
    let var = |tensor: Tensor| Var::from_tensor(&tensor);
    let randn = |dims: (usize, usize, usize, usize), std| Tensor::randn(0f32, std, dims, &Device::Cpu);
    let query = var(randn(dims, 1.)?)?;
    // In trained models, keys often have a large mean. Here the mean's elements have a standard deviation of 5.
    let key = var(randn(dims, 1.)?.broadcast_add(&randn((1, 1, 4, 64), 5.)?)?)?;
    let value = var(randn(dims, 1.)?)?;
    let direction = randn(dims, 1.)?;

    let gradient = |scheme: Scheme| -> Result<Tensor> {
        let out = Attention::new(scheme).causal(true).apply(&query, &key, &value)?;
        Ok((out * &direction)?.sum_all()?.backward()?.get(&query).expect("a gradient").clone())
    };
    let exact = gradient(Scheme::Unquantized)?;
    let norm = |t: &Tensor| -> Result<f32> { t.sqr()?.sum_all()?.sqrt()?.to_scalar() };

    println!("{:<10} {:<12} {:>8}  error of dQ", "smoothing", "granularity", "tile");
    for smoothing in [Smoothing::None, Smoothing::K, Smoothing::Qk] {
        for (granularity, tile) in [
            (Granularity::Vector, 64),
            (Granularity::Group(16), 64),
            (Granularity::Tile, 64),
            (Granularity::Tile, 128),
        ] {
            let scheme =
                SageBwd::default().smoothing(smoothing).granularity(granularity).tile_q(tile).tile_k(tile);
            let error = norm(&(gradient(scheme.into())? - &exact)?)? / norm(&exact)?;
            println!(
                "{:<10} {:<12} {:>8}  {:.2} %",
                format!("{smoothing:?}"),
                granularity.to_string(),
                format!("{tile}x{tile}"),
                100.0 * error
            );
        }
    }
    Ok(())
}
