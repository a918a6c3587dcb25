//! Optimizers that implement candle's `Optimizer` trait with the updates of [`crate::ops`].

use std::sync::PoisonError;

use candle_core::backprop::GradStore;
use candle_core::{DType, Result, Tensor, Var};
use candle_nn::{Optimizer, VarMap};

use crate::error::Error;
use crate::ops::{self, MuonPart, sum_of_squares};

/// A variable's state is padded to a multiple of this number of elements, because GPUs move 16 bytes at a time: four
/// elements of the f32 state, or eight elements of the bf16 [`ops::Muon::directions`].
const MULTIPLE: usize = 8;

/// AdamW that runs [`ops::AdamW`] for each variable: weights and moments are f32 whatever type the variables have,
/// gradients are clipped by their global norm if [`clip`](ops::AdamW::clip) is set, and a step does not wait for the
/// device. A step does not change variables that have no gradient.
///
/// Weight decay applies to tensors with two or more dimensions, so not to biases and norms. The optimizer overwrites
/// `step` and `decayed` of the [`ops::AdamW`] that it is given.
///
/// **Load weights before making the optimizer**: it keeps an f32 copy of the weights, and each step overwrites the
/// variables with this copy. The optimizer's state cannot be saved.
///
/// ```
/// use candle_core::{Device, Tensor, Var};
/// use candle_nn::Optimizer;
/// use candle_sage::{nn, ops};
///
/// let weight = Var::new(&[3f32, -2.], &Device::Cpu)?;
/// let mut settings = ops::AdamW::new(0.1);
/// settings.clip = Some(1.0);
/// let mut optimizer = nn::AdamW::new(vec![weight.clone()], settings)?;
/// for _ in 0..200 {
///     optimizer.backward_step(&weight.sqr()?.sum_all()?)?;
/// }
/// assert!(weight.to_vec1::<f32>()?.iter().all(|w| w.abs() < 0.05));
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Debug)]
pub struct AdamW {
    settings: ops::AdamW,
    held: Vec<Held>,
}

/// Muon that runs [`ops::Muon`] for matrices, and [`AdamW`] for all other variables: tensors that do not have two
/// dimensions, and the variables that [`MuonConfig::embeddings`] lists. The list must contain the embeddings, the
/// matrix that computes the logits, and on CUDA also matrices whose number of elements is not a multiple of 8. As with
/// [`AdamW`], load weights before making the optimizer; the optimizer's state cannot be saved.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_nn::{Module, Optimizer, VarBuilder, VarMap};
/// use candle_sage::nn::{self, MuonConfig};
///
/// let variables = VarMap::new();
/// let vb = VarBuilder::from_varmap(&variables, DType::F32, &Device::Cpu);
/// let embedding = candle_nn::embedding(16, 8, vb.pp("embedding"))?;
/// let layer = candle_nn::linear(8, 8, vb.pp("layer"))?;
/// let mut config = MuonConfig::new(8e-3);
/// config.others.lr = 2e-3;
/// config.matrices.clip = Some(1.0);
/// // The embedding has two dimensions too, but its rows are tokens, so AdamW updates it, as it does the layer's bias.
/// let mut optimizer = nn::Muon::of_map(&variables, &["embedding.weight"], config)?;
/// let tokens = Tensor::arange(0u32, 16, &Device::Cpu)?;
/// let loss = || layer.forward(&embedding.forward(&tokens)?)?.sqr()?.mean_all();
/// let first = loss()?.to_scalar::<f32>()?;
/// for _ in 0..10 {
///     optimizer.backward_step(&loss()?)?;
/// }
/// assert!(loss()?.to_scalar::<f32>()? < first);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Debug)]
pub struct Muon {
    settings: ops::Muon,
    matrices: Vec<Held>,
    others: AdamW,
    /// The learning rate of the other variables divided by the learning rate of matrices.
    ratio: f64,
}

/// The configuration of [`Muon`]. `clip` and `gradient_factor` are read from `matrices` for all variables, and ignored
/// in `others`.
#[derive(Debug, Clone)]
pub struct MuonConfig {
    /// Settings of matrices.
    pub matrices: ops::Muon,
    /// Settings of all other variables.
    pub others: ops::AdamW,
    /// Variables of two dimensions that use the settings `others`: embeddings and output matrices.
    pub embeddings: Vec<Var>,
}

impl MuonConfig {
    /// [`ops::Muon::new`] and [`ops::AdamW::new`] with learning rate `lr`. Neither has weight decay or clipping.
    pub fn new(lr: f64) -> Self {
        Self { matrices: ops::Muon::new(lr), others: ops::AdamW::new(lr), embeddings: Vec::new() }
    }
}

/// A variable and its optimizer state.
#[derive(Debug)]
struct Held {
    variable: Var,
    /// (1 + moments, padded elements) in f32: weights, then moments.
    state: Tensor,
    /// For Muon with `beta2`: `mean_squares` of [`ops::Muon::normalize_rows`], one value per row of the matrix.
    rows: Option<Tensor>,
}

impl Held {
    fn new(variable: Var, moments: usize) -> Result<Self> {
        if !variable.dtype().is_float() {
            return Err(Error::new("an optimizer needs variables of floating-point types")
                .got(variable.dtype().as_str())
                .allowed("f32, f16, bf16, f64")
                .hint("exclude variables of other types from the optimizer")
                .into());
        }
        let state = Tensor::zeros(
            (1 + moments, variable.elem_count().next_multiple_of(MULTIPLE)),
            DType::F32,
            variable.device(),
        )?;
        let weights = padded(variable.as_tensor())?.unsqueeze(0)?;
        state.slice_set(&weights, 0, 0)?;
        Ok(Self { variable, state, rows: None })
    }

    /// The gradient in f32, padded; `None` if the variable has no gradient.
    fn gradient(&self, gradients: &GradStore) -> Result<Option<Tensor>> {
        gradients.get(&self.variable).map(padded).transpose()
    }

    /// Copies the weights in `state` to the variable.
    fn publish(&self) -> Result<()> {
        let weights = self.state.get(0)?.narrow(0, 0, self.variable.elem_count())?;
        self.variable.set(&weights.to_dtype(self.variable.dtype())?.reshape(self.variable.shape())?)
    }
}

fn check_device(variables: &[Var]) -> Result<()> {
    let other = variables.iter().find(|variable| !variable.device().same_device(variables[0].device()));
    other.map_or(Ok(()), |other| {
        Err(Error::new("an optimizer's variables are on several devices")
            .got(format!("{:?} and {:?}", variables[0].device().location(), other.device().location()))
            .allowed("one device, because gradients are clipped by their global norm")
            .hint("use one optimizer per device")
            .into())
    })
}

/// The elements in f32, with zeros up to a multiple of [`MULTIPLE`].
fn padded(x: &Tensor) -> Result<Tensor> {
    let x = x.detach().flatten_all()?.to_dtype(DType::F32)?.contiguous()?;
    let missing = x.elem_count().next_multiple_of(MULTIPLE) - x.elem_count();
    if missing == 0 { Ok(x) } else { x.pad_with_zeros(0, 0, missing) }
}

fn with_gradients<'a>(all: &'a [Held], gradients: &GradStore) -> Result<Vec<(&'a Held, Tensor)>> {
    let with = |held: &'a Held| Ok(held.gradient(gradients)?.map(|gradient| (held, gradient)));
    all.iter().filter_map(|held| with(held).transpose()).collect()
}

/// The sum of squares of gradients; `None` without gradients.
fn squares<'a>(gradients: impl Iterator<Item = &'a Tensor>) -> Result<Option<Tensor>> {
    let mut sum: Option<Tensor> = None;
    for gradient in gradients {
        let of_one = sum_of_squares(gradient)?;
        sum = Some(match sum {
            None => of_one,
            Some(sum) => (sum + of_one)?,
        });
    }
    Ok(sum)
}

impl Optimizer for AdamW {
    type Config = ops::AdamW;

    fn new(variables: Vec<Var>, config: ops::AdamW) -> Result<Self> {
        check_device(&variables)?;
        let held = variables.into_iter().map(|variable| Held::new(variable, 2)).collect::<Result<_>>()?;
        Ok(Self { settings: ops::AdamW { step: 0, ..config }, held })
    }

    fn step(&mut self, gradients: &GradStore) -> Result<()> {
        let with = with_gradients(&self.held, gradients)?;
        let squares = squares(with.iter().map(|(_, gradient)| gradient))?;
        self.settings.step += 1;
        squares.map_or(Ok(()), |squares| self.update(&with, &squares))
    }

    fn learning_rate(&self) -> f64 {
        self.settings.lr
    }

    fn set_learning_rate(&mut self, lr: f64) {
        self.settings.lr = lr;
    }
}

impl AdamW {
    fn update(&self, with: &[(&Held, Tensor)], squares: &Tensor) -> Result<()> {
        for (held, gradient) in with {
            let mut settings = self.settings;
            settings.decayed = if held.variable.rank() >= 2 { gradient.elem_count() } else { 0 };
            settings.step(&held.state, gradient, squares, None)?;
            held.publish()?;
        }
        Ok(())
    }
}

impl Muon {
    /// The optimizer of all variables of a map. `embeddings` are the names of variables with two dimensions that are
    /// not matrices of hidden layers.
    ///
    /// # Errors
    /// When one of `embeddings` is not in the map; also the errors of `Muon::new`.
    pub fn of_map(variables: &VarMap, embeddings: &[&str], config: MuonConfig) -> Result<Self> {
        let variables = variables.data().lock().unwrap_or_else(PoisonError::into_inner);
        let mut names: Vec<&str> = variables.keys().map(String::as_str).collect();
        // The map's order varies between runs, and the order of gradients changes the last bits of their global norm.
        names.sort_unstable();
        let named = |name: &&str| match variables.get(*name) {
            Some(variable) => Ok(variable.clone()),
            None => Err(Error::new("the map does not contain this variable")
                .got(*name)
                .allowed(names.join(", "))
                .hint("name an embedding by its full path in the `VarBuilder`")
                .into()),
        };
        let of_map = embeddings.iter().map(named).collect::<Result<Vec<_>>>()?;
        let embeddings = [config.embeddings, of_map].concat();
        let all = names.iter().filter_map(|name| variables.get(*name).cloned()).collect();
        Self::new(all, MuonConfig { embeddings, ..config })
    }
}

impl Optimizer for Muon {
    type Config = MuonConfig;

    fn new(variables: Vec<Var>, config: MuonConfig) -> Result<Self> {
        check_device(&variables)?;
        let MuonConfig { matrices: settings, others, embeddings } = config;
        let is_embedding = |variable: &Var| embeddings.iter().any(|other| other.id() == variable.id());
        let is_matrix = |variable: &Var| variable.rank() == 2 && !is_embedding(variable);
        let (matrices, rest): (Vec<Var>, Vec<Var>) = variables.into_iter().partition(is_matrix);
        let others = ops::AdamW { gradient_factor: settings.gradient_factor, clip: settings.clip, ..others };
        let odd =
            |variable: &&Var| variable.device().is_cuda() && !variable.elem_count().is_multiple_of(MULTIPLE);
        if let Some(odd) = matrices.iter().find(odd) {
            return Err(Error::unsupported("Muon on CUDA needs matrices with a multiple of 8 elements")
                .got(format!("{:?}", odd.dims()))
                .allowed("a multiple of 8 elements; AdamW supports any number")
                .hint("list the matrix in `embeddings`: AdamW then updates it")
                .into());
        }
        if settings.lr <= 0.0 || !settings.lr.is_finite() {
            return Err(Error::new("the learning rate of matrices is out of range")
                .got(settings.lr)
                .allowed("above 0 and finite, because the rate of `others` is stored as a multiple of it")
                .hint("to warm up from 0: pass the highest rate, then call `set_learning_rate`")
                .into());
        }
        let ratio = others.lr / settings.lr;
        let mut matrices =
            matrices.into_iter().map(|variable| Held::new(variable, 1)).collect::<Result<Vec<_>>>()?;
        if settings.beta2.is_some() {
            for held in &mut matrices {
                held.rows = Some(Tensor::zeros(held.variable.dim(0)?, DType::F32, held.variable.device())?);
            }
        }
        // Matrices of one shape are orthogonalized together.
        matrices.sort_by_key(|held| held.variable.dims().to_vec());
        Ok(Self { settings, matrices, others: AdamW::new(rest, others)?, ratio })
    }

    fn step(&mut self, gradients: &GradStore) -> Result<()> {
        let matrices = with_gradients(&self.matrices, gradients)?;
        self.others.settings.step += 1;
        let others = with_gradients(&self.others.held, gradients)?;
        let Some(squares) = squares(matrices.iter().chain(&others).map(|(_, gradient)| gradient))? else {
            return Ok(());
        };
        self.others.update(&others, &squares)?;
        for same in matrices.chunk_by(|(a, _), (b, _)| a.variable.dims() == b.variable.dims()) {
            let shape = same[0].0.variable.dims2()?;
            let len = shape.0 * shape.1;
            let part = |n| MuonPart { at: 0, to: n * len, len, shape };
            let directions = same.iter().map(|(held, gradient)| {
                self.settings.directions(&held.state, gradient, &squares, &[part(0)], len)
            });
            let directions = Tensor::cat(&directions.collect::<Result<Vec<_>>>()?, 0)?;
            self.settings.orthogonalize(&directions, &vec![shape; same.len()])?;
            for (n, (held, _)) in same.iter().enumerate() {
                let own = directions.narrow(0, n * len, len)?;
                self.settings.normalize_rows(&own, &squares, &[shape], held.rows.as_ref())?;
                self.settings.apply(&held.state, &directions, &squares, &[part(n)], None)?;
                held.publish()?;
            }
        }
        Ok(())
    }

    fn learning_rate(&self) -> f64 {
        self.settings.lr
    }

    /// Sets the learning rate of matrices to `lr`, and the rate of all other variables to `lr` times `ratio`.
    fn set_learning_rate(&mut self, lr: f64) {
        self.settings.lr = lr;
        self.others.settings.lr = lr * self.ratio;
    }
}
