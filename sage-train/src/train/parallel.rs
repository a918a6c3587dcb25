//! How several ranks share a step.

use candle_sage::{Error, Result};
use clap::ValueEnum;

use crate::config::Config;
use crate::quantity::Quantity;
use crate::ranks::{Mesh, PIECE, PIECE_BESIDE, Rank, Words};

/// How several ranks share a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Parallel {
    /// This rank among the ranks of its node.
    pub local: Rank,
    /// Number of adjacent ranks that share each sequence.
    pub context: usize,
    /// When gradients are reduced.
    pub overlap: Overlap,
    /// Elements of gradient in one transfer, at least; `None` takes the default.
    pub piece: Option<usize>,
}

impl Parallel {
    /// The arrangement of the ranks, and the size of the pieces in which gradients are reduced.
    ///
    /// # Errors
    /// When the ranks are not distributed evenly.
    pub(super) fn mesh(&self, words: &Words) -> Result<Mesh> {
        Ok(self.in_pieces(Mesh::agree(words, self.local, self.context)?))
    }

    /// `mesh` with the size of the pieces set.
    pub fn in_pieces(&self, mesh: Mesh) -> Mesh {
        let usual = if self.overlap.is_beside(mesh) { PIECE_BESIDE } else { PIECE };
        Mesh { piece: self.piece.unwrap_or(usual), ..mesh }
    }

    /// A single rank.
    pub const ALONE: Self = Self { local: Rank::ALONE, context: 1, overlap: Overlap::Auto, piece: None };
}

/// When gradients are reduced.
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
    /// Whether gradients are transferred during the backward, on the ranks of this mesh.
    pub(super) fn is_beside(self, mesh: Mesh) -> bool {
        mesh.rank().of > 1
            && match self {
                Self::After => false,
                Self::Beside => true,
                Self::Auto => mesh.replica.of > 1,
            }
    }
}

/// Checks that `ranks` ranks, in groups of `context` that share each sequence, can share a step, and that
/// each has a micro-batch to compute.
///
/// # Errors
/// When a sequence cannot be cut into `context` parts, or a group would have no micro-batch.
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
    // A selection is one of a key head and of all query heads of its group.
    if model.sla2.is_some() && !model.key_heads.is_multiple_of(context) {
        return wrong(
            format!("{} key heads", model.key_heads),
            "with SLA2 a divisor of the key heads".into(),
        );
    }
    Ok(())
}
