//! The numbers that ranks gather in each step.

use crate::config::Config;
use crate::ranks::{Mesh, Ranks};

/// A rank's requests to all ranks. The ranks exchange requests together with the results of a step, so that all ranks
/// act on them after the same step.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Requests {
    /// Stop, because of this signal.
    pub(super) signal: Option<u8>,
    /// Write a checkpoint.
    pub(super) save: bool,
}

impl Requests {
    /// The union of two requests.
    pub(super) fn or(self, other: Self) -> Self {
        Self { signal: self.signal.or(other.signal), save: self.save || other.save }
    }
}

/// The layout of a rank's report on a step, in f64 numbers: the losses of its micro-batches (padded with a zero on
/// ranks with one micro-batch fewer), the sum of squares of its gradient shards, its [`Requests`], and the seconds that
/// its forward and backward took in an earlier step.
#[derive(Debug, Clone, Copy)]
pub(super) struct Report {
    /// Micro-batches in a step, over all ranks.
    micro_batches: usize,
    pub(super) mesh: Mesh,
}

impl Report {
    /// How many numbers of a report follow the sum of squared gradients: signal, save, and the total seconds of forward
    /// and backward.
    pub(super) const REST: usize = 3;

    pub(super) fn of(config: &Config, ranks: &Ranks) -> Self {
        Self { micro_batches: config.accumulation, mesh: ranks.mesh() }
    }

    /// The largest number of losses of a rank.
    pub(super) fn losses(self) -> usize {
        self.micro_batches.div_ceil(self.mesh.data().of)
    }

    pub(super) fn len(self) -> usize {
        self.losses() + 1 + Self::REST
    }

    pub(super) fn ranks(self) -> usize {
        self.mesh.rank().of
    }

    /// The indices of the losses in the concatenated reports: for each micro-batch in order, one index for each rank of
    /// the group that computes it. The ranks of a group share each sequence. Group `k mod groups` computes micro-batch
    /// `k`.
    pub(super) fn places_of_losses(self) -> impl Iterator<Item = Vec<usize>> {
        let (groups, parts) = (self.mesh.data().of, self.mesh.context);
        let place = move |k: usize, part: usize| (k % groups * parts + part) * self.len() + k / groups;
        (0..self.micro_batches).map(move |k| (0..parts).map(|part| place(k, part)).collect())
    }

    /// For each rank of the first node, the index of its sum of squared gradients in the concatenated reports. The
    /// other nodes have the same sums.
    pub(super) fn places_of_squares(self) -> impl Iterator<Item = usize> {
        (0..self.mesh.shard.of).map(move |rank| rank * self.len() + self.losses())
    }

    /// The losses of all micro-batches. Each loss is the mean over the ranks that share the micro-batch's sequences.
    pub(super) fn losses_of_all(self, reports: &[f64]) -> Vec<f64> {
        let sum = |places: Vec<usize>| places.into_iter().map(|place| reports[place]).sum::<f64>();
        self.places_of_losses().map(|places| sum(places) / self.mesh.context as f64).collect()
    }

    pub(super) fn asked(self, reports: &[f64]) -> Requests {
        let of_rank = |report: &[f64]| Requests {
            signal: Some(report[self.losses() + 1] as u8).filter(|signal| *signal > 0),
            save: report[self.losses() + 2] > 0.0,
        };
        reports.chunks_exact(self.len()).map(of_rank).fold(Requests::default(), Requests::or)
    }

    /// The rank whose forward and backward took longest, and their time divided by the median over all ranks. `None`
    /// for a single rank, and until a step was timed.
    pub(super) fn slowest(self, reports: &[f64]) -> Option<(usize, f64)> {
        let times: Vec<f64> =
            reports.chunks_exact(self.len()).map(|report| report[self.losses() + 3]).collect();
        let mut sorted = times.clone();
        sorted.sort_by(f64::total_cmp);
        let (median, longest) = (sorted[(sorted.len() - 1) / 2], *sorted.last()?);
        let slowest = times.iter().position(|time| *time == longest)?;
        (self.ranks() > 1 && median > 0.0).then(|| (slowest, longest / median))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ranks::Rank;

    #[test]
    fn reports_are_read_as_they_are_written() {
        // Five micro-batches on two ranks; the second rank has a zero instead of a third loss.
        let mesh = Mesh::node(Rank { index: 0, of: 2 });
        let report = Report { micro_batches: 5, mesh };
        let reports = [1.0, 3.0, 5.0, 10.0, 0.0, 0.0, 0.5, 2.0, 4.0, 0.0, 20.0, 15.0, 1.0, 0.75];
        assert_eq!(reports.len(), 2 * report.len());
        assert_eq!(report.losses_of_all(&reports), [1.0, 2.0, 3.0, 4.0, 5.0]);
        assert_eq!(report.places_of_squares().map(|place| reports[place]).sum::<f64>(), 30.0);
        assert_eq!(report.asked(&reports), Requests { signal: Some(15), save: true });
        assert_eq!(report.slowest(&reports), Some((1, 1.5)));
        // The same reports, read as the reports of two ranks that share each sequence. Each rank is on a separate node
        // here. Only the first node's sum of squared gradients is read.
        let replica = Rank { index: 0, of: 2 };
        let mesh = Mesh { shard: Rank::ALONE, replica, context: 2, ..Mesh::ALONE };
        let report = Report { micro_batches: 3, mesh };
        assert_eq!(report.losses_of_all(&reports), [1.5, 3.5, 2.5]);
        assert_eq!(report.places_of_squares().map(|place| reports[place]).sum::<f64>(), 10.0);
    }
}
