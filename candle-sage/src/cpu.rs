//! Attention on the CPU: the algorithms as a kernel would run them, tile for tile, on all threads.
//!
//! `forward` and `backward` walk the tiles; what happens inside a tile is a scheme's
//! [`numerics`], in the file of its name. On one machine, results depend on the inputs and
//! the shape alone, never on the number of threads.

mod attn_qat;
mod backward;
pub(crate) mod blend;
mod forward;
mod full_precision;
pub(crate) mod lanes;
mod numerics;
pub(crate) mod past_linear;
pub(crate) mod product;
pub(crate) mod quantize;
pub(crate) mod route;
mod rows;
mod sagebwd;
pub(crate) mod view;
mod visits;

use std::fmt::Debug;

use full_precision::FullPrecision;
pub(crate) use numerics::Problem;
use view::View;

use crate::scheme::Scheme;

/// A scheme on the CPU: one implementation each, in the file of its name.
trait OnCpu: Debug + Send + Sync + 'static {
    /// What the forward keeps for the backward.
    type Kept: Debug + Send + Sync + 'static;

    /// Computes the output, as (batch, query, query heads, head_dim) without gaps.
    fn forward(&self, problem: &Problem<'_>) -> (Vec<f32>, Self::Kept);

    /// Computes the gradients from what the forward kept, its output and the output's gradient.
    fn backward(&self, problem: &Problem<'_>, kept: &Self::Kept, past: &Past<'_>) -> Gradients;
}

/// The forward's output, and the gradient that came back.
#[derive(Debug)]
pub(crate) struct Past<'a> {
    pub(crate) out: &'a View<'a>,
    pub(crate) dout: &'a View<'a>,
}

/// A forward that ran: its scheme with what that kept. There is no other way to a backward, so that the two always fit.
pub(crate) trait Ran: Debug + Send + Sync {
    fn backward(&self, problem: &Problem<'_>, past: &Past<'_>) -> Gradients;
}

#[derive(Debug)]
struct Pair<S: OnCpu>(S, S::Kept);

impl<S: OnCpu> Ran for Pair<S> {
    fn backward(&self, problem: &Problem<'_>, past: &Past<'_>) -> Gradients {
        self.0.backward(problem, &self.1, past)
    }
}

/// Gradients as f32, in the layouts of query, key and value without gaps.
#[derive(Debug)]
pub(crate) struct Gradients {
    pub(crate) dq: Vec<f32>,
    pub(crate) dk: Vec<f32>,
    pub(crate) dv: Vec<f32>,
}

/// Computes the output, as (batch, query, query heads, head_dim) without gaps.
pub(crate) fn forward(scheme: &Scheme, problem: &Problem<'_>) -> (Vec<f32>, Box<dyn Ran>) {
    fn run<S: OnCpu>(scheme: S, problem: &Problem<'_>) -> (Vec<f32>, Box<dyn Ran>) {
        let (out, kept) = scheme.forward(problem);
        (out, Box::new(Pair(scheme, kept)))
    }
    match *scheme {
        Scheme::FullPrecision => run(FullPrecision, problem),
        Scheme::SageBwd(settings) => run(settings, problem),
        Scheme::AttnQat(settings) => run(settings, problem),
    }
}
