//! Attention on the CPU: the tiled algorithms of the GPU kernels, on all threads.
//!
//! `forward` and `backward` are mainloops over tiles, shared by all schemes. A scheme supplies the matmuls inside a
//! tile: its file implements the traits of [`numerics`]. On one machine, results depend only on the inputs and
//! the shape, never on the number of threads.

mod attn_qat;
mod backward;
pub(crate) mod blend;
mod forward;
pub(crate) mod lanes;
mod numerics;
pub(crate) mod ops;
pub(crate) mod past_linear;
pub(crate) mod product;
pub(crate) mod quantize;
pub(crate) mod route;
mod rows;
mod sagebwd;
mod score_mod;
mod tile;
mod unquantized;
pub(crate) mod view;
mod visits;

use std::fmt::Debug;

pub(crate) use numerics::Problem;
pub(crate) use score_mod::ScoreMod;
use unquantized::Unquantized;
use view::View;

use crate::scheme::Scheme;

/// A scheme on the CPU. Each scheme implements this trait in the file with the scheme's name.
trait OnCpu: Debug + Send + Sync + 'static {
    /// State that the forward keeps for the backward.
    type Kept: Debug + Send + Sync + 'static;

    /// Computes the output, contiguous (batch, query, query heads, head_dim), and the state for the backward.
    fn forward(&self, problem: &Problem<'_>) -> (Vec<f32>, Self::Kept);

    /// The base-2 log-sum-exps of the logits, (batch, query heads, query); minus infinity for a query that sees no key.
    fn lse2(kept: &Self::Kept) -> &[f32];

    fn backward(&self, problem: &Problem<'_>, kept: &Self::Kept, output: &OutputGradient<'_>) -> Gradients;
}

/// The forward's output, its gradient, and the gradient of the log-sum-exps.
#[derive(Debug)]
pub(crate) struct OutputGradient<'a> {
    pub(crate) out: &'a View<'a>,
    pub(crate) dout: &'a View<'a>,
    /// The gradient of the log-sum-exps, (batch, query heads, query). An empty slice means zeros.
    pub(crate) dlse: &'a [f32],
}

/// A scheme, and the state that this scheme's forward kept for the backward.
pub(crate) trait CompletedForward: Debug + Send + Sync {
    /// The natural log-sum-exps, (batch, query heads, query).
    fn lse(&self) -> Vec<f32>;

    fn backward(&self, problem: &Problem<'_>, output: &OutputGradient<'_>) -> Gradients;
}

#[derive(Debug)]
struct Completed<S: OnCpu>(S, S::Kept);

impl<S: OnCpu> CompletedForward for Completed<S> {
    fn lse(&self) -> Vec<f32> {
        S::lse2(&self.1).iter().map(|lse2| lse2 * std::f32::consts::LN_2).collect()
    }

    fn backward(&self, problem: &Problem<'_>, output: &OutputGradient<'_>) -> Gradients {
        self.0.backward(problem, &self.1, output)
    }
}

/// Gradients in f32, contiguous, with the dimensions of query, key and value.
#[derive(Debug)]
pub(crate) struct Gradients {
    pub(crate) dq: Vec<f32>,
    pub(crate) dk: Vec<f32>,
    pub(crate) dv: Vec<f32>,
    /// The gradients of the sinks, one per query head; empty without sinks.
    pub(crate) dsinks: Vec<f32>,
}

/// Returns the output, contiguous (batch, query, query heads, head_dim), and a [`CompletedForward`] for the backward.
pub(crate) fn forward(scheme: &Scheme, problem: &Problem<'_>) -> (Vec<f32>, Box<dyn CompletedForward>) {
    fn run<S: OnCpu>(scheme: S, problem: &Problem<'_>) -> (Vec<f32>, Box<dyn CompletedForward>) {
        let (out, kept) = scheme.forward(problem);
        (out, Box::new(Completed(scheme, kept)))
    }
    match *scheme {
        Scheme::Unquantized => run(Unquantized, problem),
        Scheme::SageBwd(settings) => run(settings, problem),
        Scheme::AttnQat(settings) => run(settings, problem),
    }
}
