//! A mixture of several lists of tokens. Each list gives sequences in proportion to its weight.

use super::Tokens;

/// Lists of tokens, each with a weight.
#[derive(Debug, Clone)]
pub struct Mixture {
    sources: Vec<(Tokens, f64)>,
    /// Whether the weights are numbers of sequences.
    counted: bool,
}

impl Mixture {
    /// A mixture of sources with weights above zero; only the ratios of the weights count.
    pub fn new(sources: Vec<(Tokens, f64)>) -> Self {
        Self { sources, counted: false }
    }

    /// A mixture in which every sequence of `context` tokens of every source appears equally often.
    pub fn by_size(sources: Vec<Tokens>, context: usize) -> Self {
        let sequences = |tokens: &Tokens| (tokens.len().saturating_sub(1) / context as u64) as f64;
        let sources = sources.into_iter().map(|tokens| (sequences(&tokens), tokens)).map(|(n, t)| (t, n));
        Self { sources: sources.collect(), counted: true }
    }

    /// For each source, the fraction of all draws that it gets.
    pub fn shares(&self) -> Vec<f64> {
        let all: f64 = self.sources.iter().map(|(_, weight)| weight).sum();
        self.sources.iter().map(|(_, weight)| weight / all).collect()
    }

    /// The lists.
    pub fn sources(&self) -> impl Iterator<Item = &Tokens> {
        self.sources.iter().map(|(tokens, _)| tokens)
    }

    /// The list of source `n`.
    pub fn source(&self, n: usize) -> &Tokens {
        &self.sources[n].0
    }

    /// Tokens of all lists.
    pub fn len(&self) -> u64 {
        self.sources().map(Tokens::len).sum()
    }

    /// Whether the mixture has no tokens.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The source of draw `n`, and the number of earlier draws from that source. The result is a pure function of `n`:
    /// the first source takes its share of all draws, the second takes its share of the rest, and so on. After any
    /// number of draws, the number of draws from each source is proportional to its weight, up to rounding.
    pub fn draw(&self, mut n: u64) -> (usize, u64) {
        let mut left: f64 = self.sources.iter().map(|(_, weight)| weight).sum();
        let last = self.sources.len() - 1;
        for (source, (_, weight)) in self.sources[..last].iter().enumerate() {
            let share = (weight / left).min(1.0);
            let taken = |draws: u64| match self.counted {
                // Uses integers, because the rounding error of `share` could change the floor of `draws * share`.
                true => (u128::from(draws) * *weight as u128 / (left as u128).max(1)) as u64,
                false => (draws as f64 * share).floor() as u64,
            };
            if taken(n + 1) > taken(n) {
                return (source, taken(n));
            }
            n -= taken(n);
            left -= weight;
        }
        (last, n)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn by_size_every_sequence_of_every_source_comes_once_an_epoch() {
        let of = |len: u32| Tokens::from((0..len).collect::<Vec<u32>>());
        // 600, 3 and 1 sequences of 4 tokens.
        let mixture = Mixture::by_size(vec![of(2403), of(13), of(7)], 4);
        let mut counts = [0; 3];
        (0..2 * 604).for_each(|n| counts[mixture.draw(n).0] += 1);
        assert_eq!(counts, [1200, 6, 2]);
        let shares: Vec<f64> = mixture.shares().iter().map(|share| (share * 604.0).round()).collect();
        assert_eq!(shares, [600.0, 3.0, 1.0]);
        for (n, all) in (2..120).flat_map(|all| (1..all).map(move |n| (n, all))) {
            let mixture = Mixture::by_size(vec![of(n + 1), of(all - n + 1)], 1);
            let first = (0..u64::from(all)).filter(|&draw| mixture.draw(draw).0 == 0).count();
            assert_eq!(first, n as usize, "{n} of {all}");
        }
    }

    #[test]
    fn draws_follow_the_weights_and_count_themselves() {
        for weights in [&[1.0][..], &[0.7, 0.3], &[1.0, 2.0, 3.0], &[0.001, 5.0], &[1.0, 1.0, 1e-9]] {
            let mixture = Mixture::new(weights.iter().map(|&w| (Tokens::default(), w)).collect());
            let mut counts = vec![0u64; weights.len()];
            for n in 0..20_000 {
                let (source, index) = mixture.draw(n);
                assert_eq!(index, counts[source], "draw {n} of {weights:?}");
                counts[source] += 1;
            }
            let total: f64 = weights.iter().sum();
            for (count, weight) in counts.iter().zip(weights) {
                let wanted = 20_000.0 * weight / total;
                assert!((*count as f64 - wanted).abs() < weights.len() as f64, "{counts:?} of {weights:?}");
            }
        }
    }
}
