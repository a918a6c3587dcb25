//! The settings of SLA2 in a model, and the parameters that they add.

use candle_sage::ops::{Alpha, Tail};

use super::spec::{Kind, ParameterSpec, Start};

/// How blocks of keys are selected.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Choice {
    /// By a router that is trained to match dense attention's probability mass per block.
    Learned,
    /// By an untrained router: dot products of block means.
    Identity,
    /// The blocks nearest to the query block, and the first block of the sequence.
    Window,
}

/// The SLA2 settings of a run.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sla2Config {
    /// Largest number of past key blocks that a query block selects.
    pub blocks: usize,
    /// This many of the `blocks` are always the past blocks nearest to the query block; the router selects the others.
    pub nearest: usize,
    /// Tokens per block, of queries and of keys.
    pub block: usize,
    /// How the blocks are selected.
    pub choice: Choice,
    /// The blocks that the tail (linear attention) covers; `None` leaves the tail out.
    pub tail: Option<Tail>,
    /// How the parameter `theta` determines the weight of exact attention in its mixture with the tail.
    pub alpha: Alpha,
    /// Number of steps with dense attention at the start, including `router_steps`.
    pub dense_steps: u64,
    /// Number of steps, at the end of the dense steps, in which the router and `theta` learn from dense attention.
    pub router_steps: u64,
}

/// What the model attends to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    /// All keys.
    Dense,
    /// All keys. The router and `theta` learn from dense attention.
    Router,
    /// The selected blocks and the linear tail.
    Sparse,
}

impl Sla2Config {
    /// The stage of a step (from 0).
    pub fn stage(&self, step: u64) -> Stage {
        if step >= self.dense_steps {
            Stage::Sparse
        } else if step + self.router_steps >= self.dense_steps {
            Stage::Router
        } else {
            Stage::Dense
        }
    }

    /// The fraction of a causal sequence's (query, key) pairs that attention to the selected blocks skips.
    pub fn sparsity(&self, context: usize) -> f64 {
        let pairs = |len: usize| len as f64 * (len as f64 + 1.0) / 2.0;
        let (whole, rest) = (context / self.block, context % self.block);
        // The first `growing` whole query blocks see 0, 1, 2, ... past blocks. Each later one sees `blocks` past
        // blocks.
        let growing = whole.min(self.blocks + 1);
        let past =
            growing as f64 * (growing as f64 - 1.0) / 2.0 + (whole - growing) as f64 * self.blocks as f64;
        let tokens = past * self.block as f64 + (rest * self.blocks.min(whole)) as f64;
        let seen = whole as f64 * pairs(self.block) + pairs(rest) + tokens * self.block as f64;
        1.0 - seen / pairs(context)
    }

    /// The parameters that SLA2 adds to an attention layer.
    pub(super) fn parameter_specs(
        &self,
        (heads, key_heads, head_dim): (usize, usize, usize),
        at: &str,
    ) -> Vec<ParameterSpec> {
        let spec = |name: &str, kind, dims: Vec<usize>, start| ParameterSpec {
            name: format!("{at}.{name}"),
            kind,
            dims,
            start,
            follows: false,
            fp8: false,
        };
        let mut specs = Vec::new();
        if self.choice == Choice::Learned {
            let dims = vec![key_heads, head_dim, head_dim];
            specs.push(spec("q_router.weight", Kind::Router, dims.clone(), Start::Identity));
            specs.push(spec("k_router.weight", Kind::Router, dims, Start::Identity));
        }
        if self.tail.is_some() {
            specs.push(spec("theta", Kind::Theta, vec![heads], Start::Value(2.0)));
        }
        specs
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CONFIG: Sla2Config = Sla2Config {
        blocks: 2,
        block: 16,
        choice: Choice::Learned,
        tail: Some(Tail::Past),
        alpha: Alpha::Count,
        nearest: 0,
        dense_steps: 60,
        router_steps: 10,
    };

    #[test]
    fn stages_follow_one_another() {
        let stages = [0, 49, 50, 59, 60, 1000].map(|step| CONFIG.stage(step));
        use Stage::{Dense, Router, Sparse};
        assert_eq!(stages, [Dense, Dense, Router, Router, Sparse, Sparse]);
        assert_eq!(Sla2Config { dense_steps: 0, ..CONFIG }.stage(0), Sparse);
    }

    /// Four blocks of 16 tokens: the second block selects one past block, the third and the fourth select two each.
    #[test]
    fn sparsity_counts_pairs() {
        let seen = 4 * (16 * 17 / 2) + 16 * 16 + 2 * 2 * 16 * 16;
        let sparsity = CONFIG.sparsity(64);
        assert!((sparsity - (1.0 - f64::from(seen) / f64::from(64 * 65 / 2))).abs() < 1e-12, "{sparsity}");
        assert_eq!(Sla2Config { blocks: 3, ..CONFIG }.sparsity(64), 0.0);
    }
}
