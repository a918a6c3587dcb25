//! Which sequences make up a step: a pure function of (seed, step).

use candle_core::{Device, Result, Tensor};
use rand::SeedableRng;
use rand::seq::SliceRandom;
use rand_chacha::ChaCha8Rng;

/// Ids and the ids one position later, both (sequences, context).
#[derive(Debug)]
pub struct Batch {
    /// What the model reads.
    pub ids: Tensor,
    /// What it should say.
    pub targets: Tensor,
}

/// The same on the host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sequences {
    ids: Vec<u32>,
    targets: Vec<u32>,
    context: usize,
}

impl Sequences {
    /// Where the model computes.
    ///
    /// # Errors
    /// When tensors cannot be allocated.
    pub fn to_device(&self, device: &Device) -> Result<Batch> {
        let dims = (self.ids.len() / self.context, self.context);
        let tensor = |ids: &[u32]| Tensor::from_slice(ids, dims, device);
        Ok(Batch { ids: tensor(&self.ids)?, targets: tensor(&self.targets)? })
    }
}

/// Sequences of `context` tokens, back to back. Every epoch visits each once, in an order of its
/// own.
#[derive(Debug)]
pub struct Batches<'a> {
    tokens: &'a [u32],
    context: usize,
    seed: u64,
    /// The order of the epoch at hand.
    order: Vec<u32>,
    epoch: Option<u64>,
}

impl<'a> Batches<'a> {
    /// Sequences of a list of tokens that is longer than the context.
    pub fn new(tokens: &'a [u32], context: usize, seed: u64) -> Self {
        Self { tokens, context, seed, order: Vec::new(), epoch: None }
    }

    /// Sequences in an epoch.
    pub fn sequences(&self) -> u64 {
        ((self.tokens.len() - 1) / self.context) as u64
    }

    /// Sequences `first..first + count` of all that are ever visited.
    pub fn shuffled(&mut self, first: u64, count: usize) -> Sequences {
        let starts: Vec<usize> = (first..first + count as u64).map(|n| self.place(n)).collect();
        self.sequences_at(&starts)
    }

    /// Sequences `first..first + count` of an epoch in the order of the text.
    pub fn in_order(&self, first: u64, count: usize) -> Sequences {
        let starts: Vec<usize> = (first..first + count as u64).map(|n| n as usize * self.context).collect();
        self.sequences_at(&starts)
    }

    /// The first token of sequence `n`.
    fn place(&mut self, n: u64) -> usize {
        let (epoch, at) = (n / self.sequences(), n % self.sequences());
        if self.epoch != Some(epoch) {
            let mut rng = ChaCha8Rng::seed_from_u64(self.seed);
            rng.set_stream(epoch);
            self.order = (0..self.sequences() as u32).collect();
            self.order.shuffle(&mut rng);
            self.epoch = Some(epoch);
        }
        self.order[at as usize] as usize * self.context
    }

    fn sequences_at(&self, starts: &[usize]) -> Sequences {
        let gather = |shift: usize| {
            starts.iter().flat_map(|s| &self.tokens[s + shift..s + shift + self.context]).copied().collect()
        };
        Sequences { ids: gather(0), targets: gather(1), context: self.context }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_epoch_visits_every_sequence_once_and_order_depends_on_seed_and_place_alone() -> Result<()> {
        let tokens: Vec<u32> = (0..103).collect();
        let firsts = |batches: &mut Batches<'_>, range: std::ops::Range<u64>| -> Vec<u32> {
            range.map(|n| batches.shuffled(n, 1).ids[0]).collect()
        };
        let mut batches = Batches::new(&tokens, 10, 4);
        assert_eq!(batches.sequences(), 10);
        let first = firsts(&mut batches, 0..10);
        let second = firsts(&mut batches, 10..20);
        let mut sorted = first.clone();
        sorted.sort_unstable();
        assert_eq!(sorted, (0..10).map(|n| n * 10).collect::<Vec<_>>());
        assert_ne!(first, second);
        // Looking back gives the same again.
        assert_eq!(firsts(&mut batches, 3..7), first[3..7]);
        assert_ne!(firsts(&mut Batches::new(&tokens, 10, 5), 0..10), first);
        let batch = batches.shuffled(8, 4).to_device(&Device::Cpu)?;
        assert_eq!(batch.ids.dims(), [4, 10]);
        assert_eq!(batch.ids.affine(1., 1.)?.to_vec2::<u32>()?, batch.targets.to_vec2::<u32>()?);
        Ok(())
    }
}
