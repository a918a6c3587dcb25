//! Attention on the CPU: the algorithms as a kernel would run them, tile for tile, on all threads.
//!
//! `forward` and `backward` walk the tiles; what happens inside a tile is a scheme's
//! [`numerics::Numerics`], in the file of its name. On one machine, results depend on the inputs and
//! the shape alone, never on the number of threads.

mod backward;
mod forward;
mod full_precision;
pub(crate) mod lanes;
mod numerics;
pub(crate) mod product;
pub(crate) mod quantize;
mod sagebwd;
pub(crate) mod view;

use full_precision::FullPrecision;
pub(crate) use numerics::Problem;
use sagebwd::SageBwd;
use view::View;

use crate::scheme::Scheme;

/// What a forward keeps for its backward.
#[derive(Debug)]
pub(crate) struct Saved {
    /// Base-2 log-sum-exp of each query, (batch, query heads, query).
    lse2: Vec<f32>,
    operands: Operands,
}

/// What a scheme keeps besides the log-sum-exp.
#[derive(Debug)]
enum Operands {
    FullPrecision,
    SageBwd(sagebwd::Codes),
}

/// Gradients as f32, in the layouts of query, key and value without gaps.
#[derive(Debug)]
pub(crate) struct Gradients {
    pub(crate) dq: Vec<f32>,
    pub(crate) dk: Vec<f32>,
    pub(crate) dv: Vec<f32>,
}

/// Computes the output, as (batch, query, query heads, head_dim) without gaps.
pub(crate) fn forward(scheme: &Scheme, problem: &Problem<'_>) -> (Vec<f32>, Saved) {
    match scheme {
        Scheme::FullPrecision => {
            let (out, lse2) = forward::run(&FullPrecision::new(problem), problem);
            (out, Saved { lse2, operands: Operands::FullPrecision })
        }
        Scheme::SageBwd(settings) => {
            let codes = sagebwd::Codes::new(settings, problem);
            let (out, lse2) = forward::run(&SageBwd::forward(settings, problem, &codes), problem);
            (out, Saved { lse2, operands: Operands::SageBwd(codes) })
        }
    }
}

/// Computes the gradients from what the forward kept, its output and the output's gradient.
pub(crate) fn backward(
    scheme: &Scheme,
    problem: &Problem<'_>,
    saved: &Saved,
    out: &View<'_>,
    dout: &View<'_>,
) -> Gradients {
    let past = backward::Past { lse2: &saved.lse2, out, dout };
    match (scheme, &saved.operands) {
        (Scheme::SageBwd(settings), Operands::SageBwd(codes)) => {
            backward::run(&SageBwd::backward(settings, problem, codes), problem, &past)
        }
        (Scheme::FullPrecision, Operands::FullPrecision) => {
            backward::run(&FullPrecision::new(problem), problem, &past)
        }
        _ => unreachable!("an op has one scheme for its forward and its backward"),
    }
}
