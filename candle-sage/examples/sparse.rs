//! Attention to selected blocks: (1) a sliding window plus the first block, (2) blocks that a router selects, (3) SLA2
//! with its linear tail. `cargo run --release -p candle-sage --example sparse`

use std::time::Instant;

use candle_core::{Device, Result, Tensor, Var};
use candle_sage::{Attention, AttentionShape, Router, Scheme, Selection, Sla2};

fn main() -> Result<()> {
    let device = Device::Cpu;
    let dims = (1, 2048, 4, 64);
    // Each of four topics is a random vector. Tokens of a topic come in runs, and attend to tokens of the same topic.
    let topics = Tensor::randn(0f32, 2., (4, 1, 4, 64), &device)?;
    let order: Vec<u32> = (0..16).map(|stretch: u32| stretch * 7 % 4).collect();
    let stretches = topics.index_select(&Tensor::new(order, &device)?, 0)?.repeat((1, 128, 1, 1))?;
    let inputs = || stretches.reshape(dims)? + Tensor::randn(0f32, 1., dims, &device)?;
    let (q, k, v) =
        (Var::from_tensor(&inputs()?)?, Var::from_tensor(&inputs()?)?, Var::randn(0f32, 1., dims, &device)?);
    let shape = AttentionShape::new(dims, dims, dims, true, None)?;
    let block = (64, 64);

    let attention = Attention::new(Scheme::Unquantized).causal(true);
    let exact = attention.apply(&q, &k, &v)?;
    let norm = |t: &Tensor| t.sqr()?.sum_all()?.sqrt()?.to_scalar::<f32>();
    let show = |name: &str, sparsity: f64, run: &dyn Fn() -> Result<Tensor>| -> Result<()> {
        let started = Instant::now();
        let out = run()?;
        let gradients = out.sqr()?.mean_all()?.backward()?;
        let ms = started.elapsed().as_secs_f64() * 1e3;
        assert!(gradients.get(&k).is_some());
        let error = norm(&(out - &exact)?)? / norm(&exact)?;
        println!("{name:<26} {:>6.1} % {:>8.1} % {ms:>8.0} ms", sparsity * 100.0, error * 100.0);
        Ok(())
    };
    println!("{:<26} {:>8} {:>10} {:>11}", "", "sparsity", "error of O", "fwd + bwd");
    show("dense", 0.0, &|| attention.apply(&q, &k, &v))?;

    // Selects the first block of keys, and the four before the diagonal. The diagonal is seen without selection.
    let window = Selection::window(&shape, block, 4, 1, &device)?;
    show("window and sink", window.sparsity()?, &|| attention.clone().select(&window).apply(&q, &k, &v))?;

    let comb = Selection::from_lists(&shape, block, &device, |at| (0..at.candidates).step_by(3).collect())?;
    show("every third block", comb.sparsity()?, &|| attention.clone().select(&comb).apply(&q, &k, &v))?;

    // The router's blocks: eight for each block of queries.
    let sla2 = Sla2::new(Scheme::Unquantized).blocks(8).block(block).causal(true);
    let router = Router::new(4, 64, &device)?;
    let picked = sla2.select(&router, &q, &k)?;
    show("router's blocks", picked.sparsity()?, &|| attention.clone().select(&picked).apply(&q, &k, &v))?;

    // The learned weight `theta` mixes attention to the router's blocks with linear attention over all earlier blocks.
    let theta = Var::from_tensor(&Tensor::full(2f32, 4, &device)?)?;
    show("SLA2", picked.sparsity()?, &|| sla2.apply(&q, &k, &v, &picked, &theta))?;
    println!("the router's blocks have {:.0} % of the mass", 100.0 * sla2.mass_caught(&picked, &q, &k)?);
    Ok(())
}
