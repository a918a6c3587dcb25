//! Output and gradients of INT8 attention, compared with unquantized attention: `cargo run --release -p candle-sage
//! --example attention`

use candle_core::{Device, Result, Var};
use candle_sage::{Attention, SageBwd, Scheme};

fn main() -> Result<()> {
    // (batch, sequence, heads, head_dim); four query heads share each key head.
    let query = Var::randn(0f32, 1., (2, 512, 8, 64), &Device::Cpu)?;
    let key = Var::randn(0f32, 1., (2, 512, 2, 64), &Device::Cpu)?;
    let value = Var::randn(0f32, 1., (2, 512, 2, 64), &Device::Cpu)?;

    let attend = |scheme: Scheme| Attention::new(scheme).causal(true).apply(&query, &key, &value);
    let (exact, int8) = (attend(Scheme::Unquantized)?, attend(SageBwd::default().into())?);

    let error = |a: &candle_core::Tensor, b: &candle_core::Tensor| -> Result<f32> {
        Ok(((a - b)?.sqr()?.sum_all()?.to_scalar::<f32>()? / b.sqr()?.sum_all()?.to_scalar::<f32>()?).sqrt())
    };
    println!("output   {:?}: INT8 differs by {:.2} %", int8.dims(), 100.0 * error(&int8, &exact)?);

    let (exact, int8) = (exact.sqr()?.mean_all()?.backward()?, int8.sqr()?.mean_all()?.backward()?);
    for (name, var) in [("dquery", &query), ("dkey", &key), ("dvalue", &value)] {
        let (a, b) = (int8.get(var).expect("a gradient"), exact.get(var).expect("a gradient"));
        println!("{name:<8} {:?}: INT8 differs by {:.2} %", a.dims(), 100.0 * error(a, b)?);
    }
    Ok(())
}
