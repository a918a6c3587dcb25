//! The parameters of a model, with their moments, gradients and copies in the compute type, stored in a few pieces. An
//! optimizer step is one pass over each piece, and each parameter is a view into a piece.
//!
//! If several ranks train, each rank owns one shard of every piece: only this rank stores the shard's f32 weights and
//! moments, and updates them (ZeRO-1, arXiv 1910.02054, section 5.1). Every rank stores all gradients. It
//! also stores all weights, in the type that training reads: the compute type, or FP8.

mod arrivals;
mod draw;
mod loading;
mod matrices;
mod scales;
mod snapshots;
mod values;
mod weight;

use std::ops::Range;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use candle_core::{DType, Device, Result, Tensor};
use candle_sage::ops::{self, Fp8Scales};
use rayon::prelude::*;

use super::pieces::{Layout, overlap};
use super::spec::ParameterSpec;
use super::training::{Matrices, Moments, Shard, Training};
use crate::during;
use crate::ranks::{Group, Mesh, Ranks};

use arrivals::PendingGathers;
use matrices::matrices_of;
use scales::rescale;
pub use values::WeightCopies;
use values::{Values, quantize_shards};
pub use weight::Weight;
use weight::{Quantized, Source};

/// The trained tensors of a model. Models contain views of these tensors, so optimizer updates change the models.
#[derive(Debug)]
pub struct Parameters {
    pub(super) specs: Vec<ParameterSpec>,
    pub(super) layout: Layout,
    mesh: Mesh,
    moments: Moments,
    /// Declared before `held`, so that it is dropped first: its drop waits for transfers that write to `held`. Models
    /// have clones of this `Rc`, but are dropped before their `Parameters`.
    arrivals: Rc<PendingGathers>,
    /// By piece.
    held: Vec<Held>,
    /// Gradients of all parameters, if the model is trained. After `Reduction::finish`, this rank's shards contain the
    /// gradients' sums over all ranks.
    gradients: Option<Tensor>,
    /// Receive buffers for gradients, if there are other ranks. The first two receive from ranks of this node: while
    /// one receives a piece, the piece in the other is added to `gradients`. The third receives from other nodes.
    pub(super) received: Option<[Tensor; 3]>,
    /// By parameter: whether the gradient has been written since it was cleared.
    pub(super) filled: Vec<Arc<AtomicBool>>,
    /// Number of updates so far.
    updates: Arc<AtomicU64>,
    /// Weights in FP8, shared by all models of these parameters.
    quantized: Rc<Quantized>,
    /// For each piece with FP8 weights and several shards: the sum and the sum of squares of its initial weights. They
    /// detect ranks that read different files. FP8 values would not show this: each rank quantizes only its shard, and
    /// all ranks gather the same FP8 values.
    initial: Vec<f64>,
    /// The scales of FP8 operands with delayed scaling.
    scales: OnceLock<Arc<Fp8Scales>>,
}

/// The values of one piece.
#[derive(Debug)]
struct Held {
    /// The weights of the whole piece, which the forward and the backward read.
    values: Values,
    /// Weights and moments of this rank's shard. Shape: (1 + number of moments, length of the shard).
    state: Tensor,
    /// The optimizer's row statistics: one number for each row of the piece's matrices. The matrices are in the order
    /// of [`matrices_of`].
    rows: Option<Tensor>,
}

/// Sources of initial values.
pub(crate) struct InitialValues<'a> {
    /// Returns the weights of a parameter; called from any thread.
    pub(crate) weights: &'a Weights<'a>,
    /// Returns elements of a parameter's moment. The arguments are the moment's name (from [`Training::moments`]), the
    /// parameter and the range of elements. `None` if the moments are zero.
    pub(crate) moments: Option<&'a InitialMoments<'a>>,
    /// Returns the optimizer's statistics of a matrix, one for each row. The arguments are the name of the statistics'
    /// tensor and the matrix's number of rows. `None` if the statistics are zero.
    pub(crate) rows: Option<&'a InitialRows<'a>>,
}

type Weights<'a> = dyn Fn(&ParameterSpec) -> candle_sage::Result<Vec<f32>> + Sync + 'a;
type InitialMoments<'a> =
    dyn Fn(&'static str, &ParameterSpec, Range<usize>) -> candle_sage::Result<Vec<f32>> + 'a;
type InitialRows<'a> = dyn Fn(String, usize) -> candle_sage::Result<Vec<f32>> + 'a;

impl<'a> InitialValues<'a> {
    /// These weights, with zero moments.
    pub(crate) fn weights(weights: &'a Weights<'a>) -> Self {
        Self { weights, moments: None, rows: None }
    }
}

impl Parameters {
    /// Draws the initial values of all parameters. Each parameter has its own random stream, so that adding a parameter
    /// to a model does not change the initial values of the others. `dtype` is the model's compute type.
    ///
    /// # Errors
    /// When a tensor cannot be allocated.
    pub fn init(
        specs: Vec<ParameterSpec>,
        seed: u64,
        training: Training<'_>,
        device: &Device,
        dtype: DType,
    ) -> candle_sage::Result<Self> {
        let values = |spec: &ParameterSpec| Ok(draw::draw(spec, seed));
        Self::from_values(specs, &InitialValues::weights(&values), device, dtype, Some(training))
    }

    /// Makes parameters with these values. `trained` is as in [`Parameters::load`].
    ///
    /// # Errors
    /// When a function in `values` fails, or memory is short.
    pub(crate) fn from_values(
        mut specs: Vec<ParameterSpec>,
        values: &InitialValues<'_>,
        device: &Device,
        dtype: DType,
        trained: Option<Training<'_>>,
    ) -> candle_sage::Result<Self> {
        if trained.is_none() {
            specs.iter_mut().for_each(|spec| spec.fp8 = false);
        }
        let failed = || "cannot make the model";
        let group = trained.map_or_else(Group::alone, |trained| trained.ranks.shards().clone());
        let mesh = trained.map_or(Mesh::ALONE, |trained| trained.ranks.mesh());
        let moments = trained.map_or_else(Moments::default, |trained| trained.moments);
        let layout = Layout::new(&specs, mesh, moments.whole_matrices);
        let (mut held, mut initial) = (Vec::with_capacity(layout.pieces.len()), Vec::new());
        for piece in &layout.pieces {
            let (start, len) = (piece.range.start, piece.range.len());
            let own = mesh.shard.part_of(len);
            let of_piece = if piece.common.apart { moments.matrices } else { moments.others };
            let dtype = if piece.common.wide { DType::F32 } else { dtype };
            let mut whole = vec![0.0f32; len];
            let mut state = vec![0.0f32; own.len() * (1 + of_piece.len())];
            let place = |spec: &ParameterSpec| {
                let at = layout.places[&spec.name].1;
                piece.range.contains(&at).then(|| at - start..at - start + spec.len() as usize)
            };
            let mut here: Vec<_> = specs.iter().filter_map(|spec| Some((place(spec)?, spec))).collect();
            here.sort_by_key(|(range, _)| range.start);
            let slices = disjoint(&mut whole, here.iter().map(|(range, _)| range.clone()));
            let filled = slices.into_par_iter().zip(&here).map(|(slice, (_, spec))| {
                slice.copy_from_slice(&(values.weights)(spec)?);
                Ok(())
            });
            // Returns the first of several errors, so that the message does not depend on thread timing.
            filled.find_first(candle_sage::Result::is_err).unwrap_or(Ok(()))?;
            for (here, spec) in here {
                let (Some(values), Some(part)) = (values.moments, overlap(&here, &own)) else { continue };
                for (moment, state) in of_piece.iter().zip(state.chunks_mut(own.len()).skip(1)) {
                    let of_spec = part.start - here.start..part.end - here.start;
                    state[part.start - own.start..part.end - own.start]
                        .copy_from_slice(&values(moment, spec, of_spec)?);
                }
            }
            state[..own.len()].copy_from_slice(&whole[own.clone()]);
            let of_rows = matrices::initial_rows(&specs, &layout, piece, moments.rows, values.rows)?;
            if piece.common.fp8 && own.len() < len {
                initial.extend(sums_of(&whole));
            }
            let make = || -> Result<Held> {
                let rows = state.len() / own.len();
                let state = Tensor::from_vec(state, (rows, own.len()), device)?;
                let rows = (!of_rows.is_empty()).then(|| Tensor::new(of_rows, device)).transpose()?;
                let matmuls = piece.common.fp8.then(|| layout.matmuls(&specs, piece));
                let values = Values::new(whole, (own, state.get(0)?), dtype, matmuls, &group)?;
                Ok(Held { values, state, rows })
            };
            held.push(make().map_err(during(failed()))?);
        }
        let zeros = |len| group.zeros(len, DType::F32, device).map_err(during(failed()));
        let plain = |len| Tensor::zeros(len, DType::F32, device).map_err(during(failed()));
        let gradients = trained.map(|_| zeros(layout.len())).transpose()?;
        let [node, nodes] = layout.largest_received(mesh);
        let received = match node + nodes {
            0 => None,
            _ => Some([zeros(node)?, zeros(node)?, plain(nodes)?]),
        };
        let filled = specs.iter().map(|_| Arc::default()).collect();
        let (updates, scales) = (Arc::default(), OnceLock::new());
        let arrivals = Rc::new(PendingGathers::new(&group, layout.pieces.len()));
        let parameters = Self {
            specs,
            layout,
            mesh,
            moments,
            arrivals,
            held,
            gradients,
            received,
            filled,
            updates,
            quantized: Rc::default(),
            initial,
            scales,
        };
        let gather = || parameters.gather(quantize_shards(&parameters.fp8_pieces(), &group)?, &group);
        gather().map_err(during(failed()))?;
        Ok(parameters)
    }

    /// Starts the all-gathers of pieces, in the order of a forward. `pieces` has, for each piece, its index, this
    /// rank's part, and the tensor that receives the whole piece.
    fn gather(&self, mut pieces: Vec<(usize, Tensor, Tensor)>, group: &Group) -> Result<()> {
        let order = self.layout.forward_order();
        pieces.sort_by_key(|(n, ..)| order.iter().position(|other| other == n));
        for (n, part, values) in pieces {
            self.arrivals.start(n, group.gather(&part, &values)?);
        }
        Ok(())
    }

    /// The value of a parameter, and its gradient if it is trained.
    ///
    /// # Errors
    /// When no parameter has this name.
    pub fn weight(&self, name: &str) -> Result<Weight> {
        self.joined(&[name.to_owned()])
    }

    /// Matrices that are adjacent in memory, as one matrix with all of their rows.
    ///
    /// # Errors
    /// When a name is unknown, or the matrices are not adjacent or have different widths.
    pub fn joined(&self, names: &[String]) -> Result<Weight> {
        let Some(first) = names.first() else { candle_core::bail!("no matrices to join") };
        let (number, at) = self.place(first)?;
        let columns = &self.specs[number].dims[1..];
        let (mut rows, mut end, mut filled) = (0, at, Vec::with_capacity(names.len()));
        for name in names {
            let (number, next) = self.place(name)?;
            let spec = &self.specs[number];
            if next != end || spec.dims[1..] != *columns {
                candle_core::bail!("{names:?} are not matrices of one width that follow one another");
            }
            (rows, end) = (rows + spec.dims[0], end + spec.len() as usize);
            filled.push(self.filled[number].clone());
        }
        let dims = [&[rows], columns].concat();
        let view = |all: &Tensor, start| all.narrow(0, start, end - at)?.reshape(dims.as_slice());
        let piece = self.layout.piece_of(at);
        let first = self.layout.pieces[piece].range.start;
        let source = match &self.held[piece].values {
            Values::Stored(values) => Source::Stored(view(values, at - first)?),
            Values::Fp8(piece) => {
                Source::Fp8 { piece: piece.clone(), range: at - first..end - first, dims: dims.clone() }
            }
        };
        let gradient = self.gradients.as_ref().map(|all| view(all, at)).transpose()?;
        let (arrivals, updates, quantized) =
            (self.arrivals.clone(), self.updates.clone(), self.quantized.clone());
        Ok(Weight { source, at, rows, piece, arrivals, gradient, filled, updates, quantized })
    }

    fn place(&self, name: &str) -> Result<(usize, usize)> {
        match self.layout.places.get(name) {
            Some(&place) => Ok(place),
            None => candle_core::bail!("the model has no parameter {name}"),
        }
    }

    fn view(&self, all: &Tensor, name: &str) -> Result<Tensor> {
        let (number, at) = self.place(name)?;
        let spec = &self.specs[number];
        all.narrow(0, at, spec.len() as usize)?.reshape(spec.dims.as_slice())
    }

    /// The specs of all parameters, in the order of initialization.
    pub fn specs(&self) -> &[ParameterSpec] {
        &self.specs
    }

    /// The range of a parameter's elements in [`Parameters::gradients`].
    ///
    /// # Errors
    /// When no parameter has this name.
    pub fn range(&self, name: &str) -> Result<Range<usize>> {
        let (number, at) = self.place(name)?;
        Ok(at..at + self.specs[number].len() as usize)
    }

    /// The sum of gradients since [`Parameters::clear_gradients`].
    ///
    /// # Errors
    /// When the model was not made for training.
    pub fn gradients(&self) -> Result<&Tensor> {
        match &self.gradients {
            Some(gradients) => Ok(gradients),
            None => candle_core::bail!("the model was not made for training"),
        }
    }

    /// Resets the gradients. To save a pass over memory, the gradients of matrices are only marked as empty: the next
    /// backward overwrites them.
    ///
    /// # Errors
    /// When the model was not made for training.
    pub fn clear_gradients(&self) -> Result<()> {
        self.filled.iter().for_each(|filled| filled.store(false, Ordering::Relaxed));
        let gradients = self.gradients()?;
        for range in &self.layout.cleared {
            gradients.narrow(0, range.start, range.len())?.zero_set()?;
        }
        Ok(())
    }

    /// The first parameter whose gradient is not finite.
    ///
    /// # Errors
    /// When the model was not made for training.
    pub fn first_non_finite(&self) -> Result<Option<&str>> {
        for spec in &self.specs {
            let sum = ops::sum_of_squares(&self.view(self.gradients()?, &spec.name)?)?;
            if !sum.to_scalar::<f64>()?.is_finite() {
                return Ok(Some(&spec.name));
            }
        }
        Ok(None)
    }

    /// This rank's shard of a piece. The tensor `all` contains all pieces.
    pub(super) fn own(&self, all: &Tensor, piece: usize) -> Result<Tensor> {
        let range = &self.layout.pieces[piece].range;
        let part = self.mesh.shard.part_of(range.len());
        all.narrow(0, range.start + part.start, part.len())
    }

    /// Updates this rank's shard of each piece with the reduced gradients, and starts to all-gather the new weights
    /// within the node. The first read of a weight waits for the all-gather of its piece.
    ///
    /// # Errors
    /// When the model was not made for training, an update fails, or a rank cannot be reached.
    pub fn update(&self, update: impl Fn(&Shard<'_>) -> Result<()>, ranks: &Ranks) -> Result<()> {
        self.updates.fetch_add(1, Ordering::Relaxed);
        self.scales.get().map_or(Ok(()), |scales| rescale(scales, ranks))?;
        self.arrivals.wait_for_all()?;
        let (shards, mut later) = (ranks.shards(), Vec::new());
        let fp8_pieces = self.fp8_pieces();
        for n in self.layout.forward_order() {
            let (piece, Held { values, state, rows }) = (&self.layout.pieces[n], &self.held[n]);
            let gradient = self.own(self.gradients()?, n)?;
            let part = self.mesh.shard.part_of(piece.range.len());
            let copy = match values {
                Values::Stored(values) if values.dtype() != DType::F32 => {
                    Some(values.narrow(0, part.start, part.len())?)
                }
                Values::Stored(_) | Values::Fp8(_) => None,
            };
            let decays = piece.common.decays;
            let elements = piece.range.len();
            let matrices = matrices_of(&self.specs, &self.layout, piece).map(|all| Matrices {
                rows: rows.as_ref(),
                all: all.into_iter().map(|matrix| (matrix.of, matrix.head)).collect(),
                elements,
                ranks: shards,
            });
            update(&Shard { state, gradient: &gradient, copy: copy.as_ref(), decays, matrices })?;
            match values {
                Values::Stored(values) if self.mesh.shard.of > 1 => {
                    let updated = (n, copy.map_or_else(|| state.get(0), Ok)?, values.clone());
                    // The all-gather starts after the loop if it would delay other exchanges between ranks: those of
                    // Muon's update directions (pieces with `apart`), or those of the largest absolute values of FP8
                    // weights.
                    match piece.common.apart || !fp8_pieces.is_empty() {
                        true => later.push(updated),
                        false => self.gather(vec![updated], shards)?,
                    }
                }
                Values::Stored(_) => {}
                Values::Fp8(piece) => piece.free_copies(),
            }
        }
        later.extend(quantize_shards(&fp8_pieces, shards)?);
        self.gather(later, shards)
    }

    /// Number of elements of all parameters, including the padding between them.
    pub fn elements(&self) -> usize {
        self.layout.len()
    }
}

/// The sum, and the sum of squares.
fn sums_of(values: &[f32]) -> [f64; 2] {
    let all = values.iter().map(|x| f64::from(*x));
    [all.clone().sum(), all.map(|x| x * x).sum()]
}

/// The slices of `all` at `ranges`, which are in ascending order and do not overlap.
fn disjoint(mut all: &mut [f32], ranges: impl Iterator<Item = Range<usize>>) -> Vec<&mut [f32]> {
    let mut end = 0;
    let mut next = |range: Range<usize>| {
        let (_, from) = std::mem::take(&mut all).split_at_mut(range.start - end);
        let (slice, rest) = from.split_at_mut(range.len());
        (all, end) = (rest, range.end);
        slice
    };
    ranges.map(&mut next).collect()
}
