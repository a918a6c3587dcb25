//! How several ranks share a step.

use candle_core::Device;
use candle_sage::{Error, Result};
use clap::ValueEnum;

use crate::config::Config;
use crate::quantity::Quantity;
use crate::ranks::{ControlChannel, CopyEngines, FEW_TOKENS, Mesh, PIECE, PIECE_BESIDE, Rank, Ranks};

/// How several ranks share a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Parallel {
    /// The position of this rank among the ranks of its node.
    pub local: Rank,
    /// Number of adjacent ranks that share each sequence.
    pub context: usize,
    /// When gradients are reduced.
    pub overlap: Overlap,
    /// Target number of gradient elements per transfer ([`Mesh::piece`]). `None` means `PIECE`, or `PIECE_BESIDE` for
    /// transfers during a backward.
    pub piece: Option<usize>,
    /// Whether copy engines (units of the GPU that only copy memory) transfer gradients and weights within a node.
    pub engines: CopyEngines,
}

impl Parallel {
    /// Connects the ranks' devices. In a step, all ranks together process `tokens` tokens.
    ///
    /// # Errors
    /// When the ranks are not distributed evenly among the nodes, or their devices cannot reach each other.
    pub(super) fn connect(&self, channel: &ControlChannel, device: &Device, tokens: u64) -> Result<Ranks> {
        let mesh = Mesh::agree(channel, self.local, self.context)?;
        let ranks = Ranks::connect(channel.clone(), mesh, self.engines, device)?;
        Ok(ranks.planned(|mesh| self.plan(mesh, tokens)))
    }

    /// Returns `mesh` with its fields `during_backward` and `piece` set. In a step, all ranks together process `tokens`
    /// tokens.
    pub fn plan(&self, mesh: Mesh, tokens: u64) -> Mesh {
        let few = tokens / (mesh.rank().of as u64) < FEW_TOKENS;
        let during_backward = mesh.rank().of > 1
            && match self.overlap {
                Overlap::After => false,
                Overlap::During => true,
                Overlap::Auto => mesh.replica.of > 1 || mesh.engines && few,
            };
        let usual = if during_backward { PIECE_BESIDE } else { PIECE };
        Mesh { during_backward, piece: self.piece.unwrap_or(usual), ..mesh }
    }

    /// A single rank.
    pub const ALONE: Self = Self {
        local: Rank::ALONE,
        context: 1,
        overlap: Overlap::Auto,
        piece: None,
        engines: CopyEngines::Auto,
    };
}

/// When gradients are reduced.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Overlap {
    /// After the backward
    After,
    /// Overlapped with the backward: a layer's gradients as soon as its backward is done
    #[value(alias = "beside")]
    During,
    /// On several nodes: `during`. On one node: `during` if copy engines transfer the gradients (--copy-engines) and
    /// each GPU has fewer than 16k tokens a step, otherwise `after`
    Auto,
}

/// How the ranks of a mesh exchange gradients, as text.
pub(super) fn summary(mesh: Mesh) -> String {
    let when = if mesh.during_backward { "during" } else { "after" };
    let engines = if mesh.engines { ", on copy engines" } else { "" };
    format!("{} ranks: gradients are exchanged {when} the backward{engines}", mesh.rank().of)
}

/// Checks that a step can be divided among `ranks` ranks. Each group of `context` ranks computes the same sequences
/// together, and needs at least one micro-batch.
///
/// # Errors
/// When a sequence cannot be split into `context` parts, or a group would have no micro-batch.
pub fn check_parallel(config: &Config, ranks: usize, context: usize) -> Result<()> {
    check_context(config, ranks, context)?;
    let groups = ranks / context;
    if config.accumulation >= groups {
        return Ok(());
    }
    let tokens = config.tokens_per_step() / config.accumulation as u64;
    let each = if context > 1 { "each group of ranks that share a sequence" } else { "each rank" };
    let several = if context > 1 { format!(", {context} of them for each sequence") } else { String::new() };
    Err(Error::new("there are more ranks than micro-batches in a step")
        .got(format!("{ranks} ranks{several}, {} micro-batches of {tokens} tokens", config.accumulation))
        .allowed(match config.accumulation * context {
            1 => "1 rank".into(),
            most => format!("up to {most} ranks"),
        })
        .hint(format!(
            "--tokens-per-step {} gives {each} one micro-batch; a smaller --micro-batch also makes more \
             micro-batches",
            Quantity(tokens * groups as u64)
        )))
}

fn check_context(config: &Config, ranks: usize, context: usize) -> Result<()> {
    let model = &config.model;
    let part = model.context / context.max(1);
    model.linear.check("micro-batch x context / context-parallel", config.micro_batch * part)?;
    model.linear_in_evaluation.check("context / context-parallel", part)?;
    let wrong = |got: String, allowed: String| {
        Err(Error::new("a sequence cannot be split into this many parts")
            .got(format!("--context-parallel {context}, {got}"))
            .allowed(allowed)
            .hint(match ranks < context {
                true => format!("one sequence over {context} GPUs needs {context} ranks: --gpus {context}"),
                false => "2, 4 and 8 fit most models".into(),
            }))
    };
    if context == 1 {
        return Ok(());
    }
    if context == 0 || !ranks.is_multiple_of(context) {
        return wrong(format!("{ranks} ranks"), "a divisor of the number of ranks (--gpus)".into());
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
    // In SLA2, the query heads of one key head use the same selection of blocks, so one rank must compute all of them.
    if model.sla2.is_some() && !model.key_heads.is_multiple_of(context) {
        return wrong(
            format!("{} key heads", model.key_heads),
            "with SLA2 a divisor of the key heads".into(),
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `Overlap::Auto` chooses between `During` and `After` as docs/several-gpus.md says.
    #[test]
    fn gradients_travel_when_it_is_faster() {
        let node = Mesh::node(Rank { index: 0, of: 2 });
        let (engines, nodes) =
            (Mesh { engines: true, ..node }, Mesh { replica: Rank { index: 0, of: 3 }, ..node });
        let auto = Parallel::ALONE;
        for (mesh, tokens, during_backward) in [
            (Mesh::ALONE, 4096, false),
            (node, 2 * 4096, false),
            (engines, 2 * 8192, true),
            (engines, 2 * 16_384, false),
            (nodes, 6 * 32_768, true),
        ] {
            let plan = auto.plan(mesh, tokens);
            assert_eq!(
                (plan.during_backward, plan.piece),
                (during_backward, if during_backward { PIECE_BESIDE } else { PIECE })
            );
        }
        let after = Parallel { overlap: Overlap::After, piece: Some(7), ..auto }.plan(nodes, 6);
        assert_eq!((after.during_backward, after.piece), (false, 7));
        assert!(!Parallel { overlap: Overlap::During, ..auto }.plan(Mesh::ALONE, 1).during_backward);
    }
}
