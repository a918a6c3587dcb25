//! All parameters of a model in a few pieces of memory, with their moments, gradients and 16-bit copy: an optimizer's step is
//! one pass over each, and a parameter is a view of one.
//!
//! Where several ranks train, each owns a part of every piece: it alone has the part's weights in f32 and its moments, and
//! updates it (ZeRO-1, arXiv 1910.02054, section 5.1). Gradients and what the model reads are whole everywhere.

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use candle_core::{DType, Device, Result, Tensor};
use candle_sage::ops;
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use rand_distr::{Distribution, Normal};

use super::config::{LlamaConfig, ParameterSpec, Start};
use super::pieces::{Layout, Piece, overlap};
use super::snapshot::{ROWS, Snapshot};
use super::state::{State, StateFile};
use crate::during;
use crate::ranks::{Mesh, Ranks};

/// The table of the embedding, and of the output.
pub(super) const EMBEDDING: &str = "model.embed_tokens.weight";

/// Elements that are summed at once where weights are compared.
const SLICE: usize = 1 << 23;

/// The trained tensors of a model. What computes with them holds views: updates show at once.
#[derive(Debug)]
pub struct Parameters {
    pub(super) specs: Vec<ParameterSpec>,
    pub(super) layout: Layout,
    mesh: Mesh,
    /// Of each piece.
    held: Vec<Held>,
    /// Of all, where something is trained; what was reduced lies in this rank's parts.
    gradients: Option<Tensor>,
    /// What other ranks of the node send of a piece: one comes while the other is added up. And what other nodes send. Where
    /// there are others.
    pub(super) received: Option<[Tensor; 3]>,
    /// Of each parameter: see [`Weight`].
    pub(super) filled: Vec<Arc<AtomicBool>>,
}

/// A piece.
#[derive(Debug)]
struct Held {
    /// The weights as the model reads them, of the whole piece.
    values: Tensor,
    /// Weights and moments of this rank's part, (3, part), or (1, part) where nothing is trained.
    state: Tensor,
}

/// Where values come from.
struct Values<'a> {
    /// The weights of a parameter.
    weights: &'a dyn Fn(&ParameterSpec) -> candle_sage::Result<Vec<f32>>,
    /// Elements of a row of moments, where they are not zero.
    moments: Option<&'a Moments<'a>>,
}

type Moments<'a> = dyn Fn(&str, &ParameterSpec, Range<usize>) -> candle_sage::Result<Vec<f32>> + 'a;

/// A parameter of a model, or several as one: its value, and the place for its gradient where it is trained.
#[derive(Debug, Clone)]
pub struct Weight {
    /// In the type that the model computes in; vectors and routers in f32.
    pub value: Tensor,
    /// In f32.
    pub gradient: Option<Tensor>,
    /// Whether something is in there since it was cleared: of each parameter that this is.
    filled: Vec<Arc<AtomicBool>>,
}

impl Weight {
    /// The place for the gradient.
    ///
    /// # Errors
    /// When the model was not made for training.
    pub fn gradient(&self) -> Result<&Tensor> {
        match &self.gradient {
            Some(gradient) => Ok(gradient),
            None => candle_core::bail!("the model was not made for training"),
        }
    }

    /// For products that fill the whole gradient: whether this one is to be added to what is there, or is the first since
    /// [`Parameters::clear_gradients`].
    pub(super) fn take_turn(&self) -> bool {
        let turns: Vec<bool> =
            self.filled.iter().map(|filled| filled.swap(true, Ordering::Relaxed)).collect();
        debug_assert!(turns.iter().all(|turn| *turn == turns[0]), "filled in part");
        turns[0]
    }
}

impl Parameters {
    /// Draws every parameter, for training on this rank. Each has a stream of its own, so that two models that differ in one
    /// part agree in the others. `dtype` is what the model computes in.
    ///
    /// # Errors
    /// When a tensor cannot be allocated.
    pub fn init(
        config: &LlamaConfig,
        seed: u64,
        mesh: Mesh,
        device: &Device,
        dtype: DType,
    ) -> candle_sage::Result<Self> {
        Self::from_values(config, &|spec| Ok(draw(spec, seed)), device, dtype, Some(mesh))
    }

    /// Reads every parameter from a safetensors file. `trained`: by which rank, where there will be gradients.
    ///
    /// # Errors
    /// When the file cannot be read, or is of another model.
    pub fn load(
        config: &LlamaConfig,
        path: &Path,
        device: &Device,
        dtype: DType,
        trained: Option<Mesh>,
    ) -> candle_sage::Result<Self> {
        let file = StateFile::open(path)
            .map_err(|error| error.hint("a run has model.safetensors from its first validation on"))?;
        Self::from_values(config, &|spec| file.values(spec, ""), device, dtype, trained)
    }

    /// Weights whose values `values` gives.
    ///
    /// # Errors
    /// When it gives an error, or memory is short.
    pub fn from_values(
        config: &LlamaConfig,
        values: &dyn Fn(&ParameterSpec) -> candle_sage::Result<Vec<f32>>,
        device: &Device,
        dtype: DType,
        trained: Option<Mesh>,
    ) -> candle_sage::Result<Self> {
        let values = Values { weights: values, moments: None };
        Self::new(config.parameter_specs(), &values, device, dtype, trained)
    }

    /// Goes on from a checkpoint. `trained` as in [`Parameters::load`]: without, its weights alone.
    ///
    /// # Errors
    /// When it cannot be read, or is of another model.
    pub fn restore(
        config: &LlamaConfig,
        state: &State,
        device: &Device,
        dtype: DType,
        trained: Option<Mesh>,
    ) -> candle_sage::Result<Self> {
        let values = Values {
            weights: &|spec| state.values(spec, ROWS[0], 0..spec.len() as usize),
            moments: Some(&|row, spec, range| state.values(spec, row, range)),
        };
        Self::new(config.parameter_specs(), &values, device, dtype, trained)
    }

    fn new(
        specs: Vec<ParameterSpec>,
        values: &Values<'_>,
        device: &Device,
        dtype: DType,
        trained: Option<Mesh>,
    ) -> candle_sage::Result<Self> {
        let failed = || "cannot make the model";
        let mesh = trained.unwrap_or(Mesh::ALONE);
        let layout = Layout::new(&specs, mesh);
        let mut held = Vec::with_capacity(layout.pieces.len());
        for piece in &layout.pieces {
            let (start, len) = (piece.range.start, piece.range.len());
            let own = mesh.shard.part_of(len);
            let dtype = if piece.decays { dtype } else { DType::F32 };
            let mut whole = vec![0.0f32; len];
            let mut state = vec![0.0f32; own.len() * if trained.is_some() { ROWS.len() } else { 1 }];
            for spec in &specs {
                let at = layout.places[&spec.name].1;
                if !piece.range.contains(&at) {
                    continue;
                }
                let here = at - start..at - start + spec.len() as usize;
                whole[here.clone()].copy_from_slice(&(values.weights)(spec)?);
                let (Some(moments), Some(part)) = (values.moments, overlap(&here, &own)) else { continue };
                for (row, state) in ROWS.iter().zip(state.chunks_mut(own.len())).skip(1) {
                    let of_spec = part.start - here.start..part.end - here.start;
                    state[part.start - own.start..part.end - own.start]
                        .copy_from_slice(&moments(row, spec, of_spec)?);
                }
            }
            state[..own.len()].copy_from_slice(&whole[own.clone()]);
            let make = || -> Result<Held> {
                let rows = state.len() / own.len();
                let state = Tensor::from_vec(state, (rows, own.len()), device)?;
                // What one rank has whole in the type that the model reads, it reads there.
                let values = match own.len() == len && dtype == DType::F32 {
                    true => state.get(0)?,
                    false => Tensor::from_vec(whole, len, device)?.to_dtype(dtype)?,
                };
                Ok(Held { values, state })
            };
            held.push(make().map_err(during(failed()))?);
        }
        let zeros = |len| Tensor::zeros(len, DType::F32, device).map_err(during(failed()));
        let gradients = trained.map(|_| zeros(layout.len())).transpose()?;
        let [others, nodes] = layout.largest_received(mesh);
        let received = match others + nodes {
            0 => None,
            _ => Some([zeros(others)?, zeros(others)?, zeros(nodes)?]),
        };
        let filled = specs.iter().map(|_| Arc::default()).collect();
        Ok(Self { specs, layout, mesh, held, gradients, received, filled })
    }

    /// A parameter as the model takes it.
    ///
    /// # Errors
    /// When there is none of this name.
    pub fn weight(&self, name: &str) -> Result<Weight> {
        self.joined(&[name.to_owned()])
    }

    /// Matrices that follow one another, as one with the rows of all.
    ///
    /// # Errors
    /// When there is none of a name, or they do not follow one another, or are not of one width.
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
        let value = view(&self.held[piece].values, at - first)?;
        let gradient = self.gradients.as_ref().map(|all| view(all, at)).transpose()?;
        Ok(Weight { value, gradient, filled })
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

    /// What the parameters are, in the order of [`LlamaConfig::parameter_specs`].
    pub fn specs(&self) -> &[ParameterSpec] {
        &self.specs
    }

    /// The sum of gradients since [`Parameters::clear_gradients`].
    ///
    /// # Errors
    /// When nothing is trained.
    pub fn gradients(&self) -> Result<&Tensor> {
        match &self.gradients {
            Some(gradients) => Ok(gradients),
            None => candle_core::bail!("the model was not made for training"),
        }
    }

    /// Begins new sums of gradients. What the next backward fills whole is left as it is: a pass over the memory less.
    ///
    /// # Errors
    /// When nothing is trained.
    pub fn clear_gradients(&self) -> Result<()> {
        self.filled.iter().for_each(|filled| filled.store(false, Ordering::Relaxed));
        let gradients = self.gradients()?;
        for piece in self.layout.pieces.iter().filter(|piece| !piece.decays) {
            gradients.narrow(0, piece.range.start, piece.range.len())?.zero_set()?;
        }
        // The embedding, which two sides add to.
        self.view(gradients, EMBEDDING)?.zero_set()
    }

    /// The first parameter whose gradient is not finite.
    ///
    /// # Errors
    /// When nothing is trained.
    pub fn first_non_finite(&self) -> Result<Option<&str>> {
        for spec in &self.specs {
            let sum = ops::sum_of_squares(&self.view(self.gradients()?, &spec.name)?)?;
            if !sum.to_scalar::<f64>()?.is_finite() {
                return Ok(Some(&spec.name));
            }
        }
        Ok(None)
    }

    /// This rank's part of a piece of something that lies as all parameters do.
    pub(super) fn own(&self, all: &Tensor, piece: usize) -> Result<Tensor> {
        let range = &self.layout.pieces[piece].range;
        let part = self.mesh.shard.part_of(range.len());
        all.narrow(0, range.start + part.start, part.len())
    }

    /// Updates all parameters with the gradients that were reduced, whose sum of squares over all ranks is `squares`. Which
    /// decay is known here.
    ///
    /// # Errors
    /// When nothing is trained, or a rank cannot be reached.
    pub fn update(&self, adamw: ops::AdamW, squares: &Tensor, ranks: &Ranks) -> Result<()> {
        let (shards, mut last) = (ranks.shards(), None);
        for (n, (piece, Held { values, state })) in self.layout.pieces.iter().zip(&self.held).enumerate() {
            let gradient = self.own(self.gradients()?, n)?;
            let decayed = if piece.decays { gradient.elem_count() } else { 0 };
            let adamw = ops::AdamW { decayed, ..adamw };
            let part = self.mesh.shard.part_of(piece.range.len());
            let copy = (values.dtype() != DType::F32).then(|| values.narrow(0, part.start, part.len()));
            let copy = copy.transpose()?;
            adamw.step(state, &gradient, squares, copy.as_ref())?;
            if self.mesh.shard.of > 1 {
                // It travels while the next piece is updated.
                last = Some(shards.gather(&copy.map_or_else(|| state.get(0), Ok)?, values)?);
            }
        }
        last.map_or(Ok(()), |last| shards.wait(last))
    }

    /// Numbers that are the same, to the bit, on ranks whose model reads the same weights: two sums of each piece, of which one
    /// knows signs.
    ///
    /// # Errors
    /// When there is no memory for a slice in f32.
    pub fn checksums(&self) -> Result<Vec<f64>> {
        let mut sums = Vec::with_capacity(2 * self.held.len());
        for Held { values, .. } in &self.held {
            let len = values.elem_count();
            // In slices: there may be no room for a copy of all.
            let (mut squares, mut shifted) = (0.0, 0.0);
            for first in (0..len).step_by(SLICE) {
                let slice = values.narrow(0, first, SLICE.min(len - first))?.to_dtype(DType::F32)?;
                squares += ops::sum_of_squares(&slice)?.to_scalar::<f64>()?;
                shifted += ops::sum_of_squares(&slice.affine(1.0, 1.0)?)?.to_scalar::<f64>()?;
            }
            sums.extend([squares, shifted]);
        }
        Ok(sums)
    }

    /// Elements of all parameters, with what lies between them.
    pub fn elements(&self) -> usize {
        self.layout.len()
    }

    /// A copy of all weights on the host of the first rank: it stays as it is while training goes on. All ranks must ask for it
    /// together.
    ///
    /// # Errors
    /// When there is no memory for it, or a rank cannot be reached.
    pub fn weights(&self, ranks: &Ranks) -> Result<Option<Snapshot>> {
        let shards = ranks.shards();
        let of_piece = |held: &Held| -> Result<Option<Tensor>> {
            let own = held.state.get(0)?;
            if shards.rank().of == 1 {
                // What goes to the host goes with all that it is a view of.
                let own = || on_host(&own.force_contiguous()?.unsqueeze(0)?);
                return ranks.rank().is_first().then(own).transpose();
            }
            let all = Tensor::zeros(held.values.elem_count(), DType::F32, own.device())?;
            shards.wait(shards.gather(&own, &all)?)?;
            ranks.rank().is_first().then(|| on_host(&all.unsqueeze(0)?)).transpose()
        };
        // Every piece is gathered, whoever keeps it.
        let pieces = self.held.iter().map(of_piece).collect::<Result<Vec<_>>>()?;
        let pieces: Option<Vec<Tensor>> = pieces.into_iter().collect();
        let firsts = self.layout.pieces.iter().map(|piece| piece.range.start);
        pieces.map(|pieces| self.snapshot(firsts.zip(pieces).collect())).transpose()
    }

    /// A copy of the weights and moments that are this rank's to save, on the host: what it owns, of which each node takes a
    /// part.
    ///
    /// # Errors
    /// When there is no memory for it.
    pub fn state(&self) -> Result<Snapshot> {
        let Mesh { shard, replica, .. } = self.mesh;
        let of_piece = |(piece, held): (&Piece, &Held)| -> Result<(usize, Tensor)> {
            let own = shard.part_of(piece.range.len());
            let part = replica.part_of(own.len());
            let state = match replica.of {
                1 => held.state.clone(),
                _ => held.state.narrow(1, part.start, part.len())?.force_contiguous()?,
            };
            Ok((piece.range.start + own.start + part.start, on_host(&state)?))
        };
        self.snapshot(self.layout.pieces.iter().zip(&self.held).map(of_piece).collect::<Result<_>>()?)
    }

    fn snapshot(&self, held: Vec<(usize, Tensor)>) -> Result<Snapshot> {
        Ok(Snapshot { specs: self.specs.clone(), layout: self.layout.clone(), held })
    }
}

/// A copy, in any case.
fn on_host(tensor: &Tensor) -> Result<Tensor> {
    if tensor.device().is_cpu() { tensor.force_contiguous() } else { tensor.to_device(&Device::Cpu) }
}

fn draw(spec: &ParameterSpec, seed: u64) -> Vec<f32> {
    let len = spec.len() as usize;
    let Start::Normal(std) = spec.start else { return spec.fixed_start().unwrap_or_default() };
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    rng.set_stream(fnv1a(&spec.name));
    let normal = Normal::new(0.0, std as f32).expect("a checked standard deviation");
    (0..len).map(|_| normal.sample(&mut rng)).collect()
}

/// The 64-bit FNV-1a hash: a stream number for each name.
fn fnv1a(name: &str) -> u64 {
    name.bytes()
        .fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3))
}
