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
    ///
    /// # Errors
    /// When tensors cannot be allocated.
    pub fn shuffled(&mut self, first: u64, count: usize, device: &Device) -> Result<Batch> {
        let starts: Vec<usize> = (first..first + count as u64).map(|n| self.place(n)).collect();
        self.batch(&starts, device)
    }

    /// Sequences `first..first + count` of an epoch in the order of the text.
    ///
    /// # Errors
    /// When tensors cannot be allocated.
    pub fn in_order(&self, first: u64, count: usize, device: &Device) -> Result<Batch> {
        let starts: Vec<usize> = (first..first + count as u64).map(|n| n as usize * self.context).collect();
        self.batch(&starts, device)
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

    fn batch(&self, starts: &[usize], device: &Device) -> Result<Batch> {
        let gather = |shift: usize| {
            let ids: Vec<u32> = starts
                .iter()
                .flat_map(|s| &self.tokens[s + shift..s + shift + self.context])
                .copied()
                .collect();
            Tensor::from_vec(ids, (starts.len(), self.context), device)
        };
        Ok(Batch { ids: gather(0)?, targets: gather(1)? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_epoch_visits_every_sequence_once_and_order_depends_on_seed_and_place_alone() -> Result<()> {
        let tokens: Vec<u32> = (0..103).collect();
        let firsts = |batches: &mut Batches<'_>, range: std::ops::Range<u64>| -> Result<Vec<u32>> {
            range
                .map(|n| {
                    batches.shuffled(n, 1, &Device::Cpu)?.ids.flatten_all()?.to_vec1::<u32>().map(|v| v[0])
                })
                .collect()
        };
        let mut batches = Batches::new(&tokens, 10, 4);
        assert_eq!(batches.sequences(), 10);
        let first = firsts(&mut batches, 0..10)?;
        let second = firsts(&mut batches, 10..20)?;
        let mut sorted = first.clone();
        sorted.sort_unstable();
        assert_eq!(sorted, (0..10).map(|n| n * 10).collect::<Vec<_>>());
        assert_ne!(first, second);
        // Looking back gives the same again.
        assert_eq!(firsts(&mut batches, 3..7)?, first[3..7]);
        assert_ne!(firsts(&mut Batches::new(&tokens, 10, 5), 0..10)?, first);
        let batch = batches.shuffled(8, 4, &Device::Cpu)?;
        assert_eq!(batch.ids.affine(1., 1.)?.to_vec2::<u32>()?, batch.targets.to_vec2::<u32>()?);
        Ok(())
    }
}
