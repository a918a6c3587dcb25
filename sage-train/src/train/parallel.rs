//! How several ranks share a step.

use candle_sage::{Error, Result};
use clap::ValueEnum;

use crate::config::Config;
use crate::quantity::Quantity;
use crate::ranks::{Mesh, PIECE, PIECE_BESIDE, Rank, Words};

/// How several ranks share a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Parallel {
    /// Which this rank is on its node.
    pub local: Rank,
    /// Neighbouring ranks that have one sequence together.
    pub context: usize,
    /// When gradients travel.
    pub overlap: Overlap,
    /// Elements of gradient that travel at once, at least, where it is said.
    pub piece: Option<usize>,
}

impl Parallel {
    /// How the ranks lie, and in what pieces their gradients travel.
    ///
    /// # Errors
    /// When they are not dealt out evenly.
    pub(super) fn mesh(&self, words: &Words) -> Result<Mesh> {
        Ok(self.in_pieces(Mesh::agree(words, self.local, self.context)?))
    }

    /// Ranks that lie so, whose gradients travel in such pieces.
    pub fn in_pieces(&self, mesh: Mesh) -> Mesh {
        let usual = if self.overlap.is_beside(mesh) { PIECE_BESIDE } else { PIECE };
        Mesh { piece: self.piece.unwrap_or(usual), ..mesh }
    }

    /// One rank.
    pub const ALONE: Self = Self { local: Rank::ALONE, context: 1, overlap: Overlap::Auto, piece: None };
}

/// When gradients travel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Overlap {
    /// Behind the backward
    After,
    /// Beside it: those of a layer as soon as it was left
    Beside,
    /// Whatever is faster: behind it on one node, beside it between nodes
    Auto,
}

impl Overlap {
    /// Whether they travel beside the backward of ranks that lie so.
    pub(super) fn is_beside(self, mesh: Mesh) -> bool {
        mesh.rank().of > 1
            && match self {
                Self::After => false,
                Self::Beside => true,
                Self::Auto => mesh.replica.of > 1,
            }
    }
}

/// Checks that so many ranks, of which `context` have one sequence together, can share a step, and that each has something to
/// do.
///
/// # Errors
/// When they cannot.
pub fn check_parallel(config: &Config, ranks: usize, context: usize) -> Result<()> {
    check_context(config, ranks, context)?;
    let groups = ranks / context;
    if config.accumulation >= groups {
        return Ok(());
    }
    let tokens = config.tokens_per_step() / config.accumulation as u64;
    let several = if context > 1 { format!(", {context} of them with one sequence") } else { String::new() };
    Err(Error::new("there are more ranks than micro-batches in a step")
        .got(format!("{ranks} ranks{several}, {} micro-batches of {tokens} tokens", config.accumulation))
        .allowed(format!("up to {} ranks", config.accumulation * context))
        .hint(format!(
            "--tokens-per-step {} gives each one; a smaller --micro-batch makes more of them",
            Quantity(tokens * groups as u64)
        )))
}

fn check_context(config: &Config, ranks: usize, context: usize) -> Result<()> {
    let model = &config.model;
    let wrong = |got: String, allowed: String| {
        Err(Error::new("a sequence cannot be cut into so many parts")
            .got(format!("--context-parallel {context}, {got}"))
            .allowed(allowed)
            .hint("2, 4 and 8 fit most models"))
    };
    if context == 1 {
        return Ok(());
    }
    if context == 0 || !ranks.is_multiple_of(context) {
        return wrong(format!("{ranks} ranks"), "a divisor of the ranks: --gpus says how many".into());
    }
    if !model.context.is_multiple_of(context) {
        return wrong(format!("context {}", model.context), "a divisor of the context".into());
    }
    if model.scheme.is_some() {
        let (queries, keys) = (model.heads, model.key_heads);
        if !queries.is_multiple_of(context) {
            return wrong(format!("{queries} heads"), "a divisor of the heads".into());
        }
        if !keys.is_multiple_of(context) && !context.is_multiple_of(keys) {
            return wrong(
                format!("{keys} key heads"),
                "a divisor of the key heads, or a multiple of them".into(),
            );
        }
    }
    if model.sla2.is_some() {
        return Err(Error::new("SLA2 does not share sequences among ranks yet")
            .got(format!("--attn sla2 --context-parallel {context}"))
            .allowed("--context-parallel 1, or fpa, sagebwd, attn-qat")
            .hint("--recompute attention makes room for longer sequences on one GPU"));
    }
    Ok(())
}
