//! SLA2 in an attention layer: selects blocks of keys, mixes exact and linear attention, and trains the router.

use candle_core::{DType, Result, Tensor, Var};
use candle_sage::ops::{self};
use candle_sage::shape::{AttentionShape, Packing};
use candle_sage::sla2::{Sla2Cache, Sla2Vjp};
use candle_sage::{Router, Scheme, Selection, Sla2};

use super::config::LlamaConfig;
use super::parameters::{Parameters, Weight};
use super::sla2_config::{Choice, Sla2Config};
use super::ulysses::Ulysses;

/// Statistics of the selection in one layer, or the means of these statistics over layers.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Selected {
    /// The fraction of the (query, key) pairs that are not selected.
    pub sparsity: f64,
    /// The mean weight of exact attention in the mixture of exact attention and tail; 1 without a tail.
    pub exact_weight: f64,
    /// Dense attention's probability mass on the selected past blocks, divided by its mass on all past blocks.
    pub mass_caught: f64,
    /// The largest number of query blocks that select one key block, divided by the mean number over all key blocks.
    pub users_ratio: f64,
}

impl Selected {
    /// The mean over layers; `None` without layers.
    pub(super) fn mean(layers: &[Self]) -> Option<Self> {
        let mean = |of: fn(&Self) -> f64| layers.iter().map(of).sum::<f64>() / layers.len() as f64;
        (!layers.is_empty()).then(|| Self {
            sparsity: mean(|layer| layer.sparsity),
            exact_weight: mean(|layer| layer.exact_weight),
            mass_caught: mean(|layer| layer.mass_caught),
            users_ratio: mean(|layer| layer.users_ratio),
        })
    }
}

/// Computes [`Selected::users_ratio`].
fn users_ratio(selection: &Selection) -> Result<f64> {
    let (shape, (rows, columns)) = (selection.shape(), selection.block());
    let mut users: Vec<usize> = Vec::new();
    for (number, segment) in shape.segments().into_iter().enumerate() {
        for key_head in 0..shape.key_heads() {
            let mut of_head = vec![0; segment.key.len().div_ceil(columns)];
            for block in 0..segment.query.len().div_ceil(rows) {
                selection.list(number, key_head, block)?.into_iter().for_each(|at| of_head[at] += 1);
            }
            users.extend(of_head);
        }
    }
    let mean = users.iter().sum::<usize>() as f64 / users.len().max(1) as f64;
    Ok(users.into_iter().max().unwrap_or(0) as f64 / mean.max(1.0))
}

/// Factor of the gradients of the router and `theta` in `Stage::Router`. It is small, so that these gradients hardly
/// affect the clipping of the whole model's gradient by its norm. AdamW's updates do not depend on the scale of a
/// gradient.
const TEACHING: f64 = 0.01;

#[derive(Debug, Clone)]
pub(super) struct Sla2Layer {
    config: Sla2Config,
    op: Sla2,
    scheme: Scheme,
    head_dim: usize,
    router: Option<[Weight; 2]>,
    theta: Option<Weight>,
    /// Present if several ranks share each sequence. Each rank then computes only some heads, and trains only these
    /// heads' slices of `router` and `theta` (along the first dimension).
    ulysses: Option<Ulysses>,
}

/// The slice of a weight, or of its gradient, for some heads. `own`: the first head and the number of heads, or `None`
/// for all heads.
fn part(weight: &Tensor, own: Option<(usize, usize)>) -> Result<Tensor> {
    own.map_or(Ok(weight.clone()), |(first, len)| weight.narrow(0, first, len)?.contiguous())
}

impl Sla2Layer {
    pub(super) fn new(
        config: &Sla2Config,
        model: &LlamaConfig,
        scheme: Scheme,
        parameters: &Parameters,
        at: &str,
    ) -> Result<Self> {
        let weight = |name: &str| parameters.weight(&format!("{at}.{name}"));
        let learned = config.choice == Choice::Learned;
        let router = learned
            .then(|| Ok::<_, candle_core::Error>([weight("q_router.weight")?, weight("k_router.weight")?]));
        Ok(Self {
            config: *config,
            op: Sla2::new(scheme)
                .blocks(config.blocks)
                .nearest(config.nearest)
                .block((config.block, config.block))
                .causal(true)
                .tail(config.tail)
                .alpha(config.alpha)
                .deterministic(model.deterministic),
            scheme,
            head_dim: model.head_dim,
            router: router.transpose()?,
            theta: config.tail.map(|_| weight("theta")).transpose()?,
            ulysses: None,
        })
    }

    /// Makes this layer compute only this rank's heads, or all heads if `ulysses` is `None`.
    pub(super) fn share(&mut self, ulysses: Option<&Ulysses>) {
        self.ulysses = ulysses.cloned();
    }

    /// This rank's first query head and its number of query heads; `None` if it has all heads.
    fn queries(&self) -> Option<(usize, usize)> {
        self.ulysses.as_ref().map(|ulysses| (ulysses.first()[0], ulysses.own()[0]))
    }

    /// This rank's first key head and its number of key heads; `None` if it has all heads.
    fn keys(&self) -> Option<(usize, usize)> {
        self.ulysses.as_ref().map(|ulysses| (ulysses.first()[1], ulysses.own()[1]))
    }

    /// Adds `gradient` to the accumulated gradient of `weight`. If `own` (the first head and the number of heads) is
    /// given, `gradient` covers only these heads.
    fn add(weight: &Weight, own: Option<(usize, usize)>, gradient: &Tensor) -> Result<()> {
        match own {
            None => ops::add_into(weight.gradient()?, gradient),
            Some((first, len)) => ops::add_into(&weight.gradient()?.narrow(0, first, len)?, gradient),
        }
    }

    /// The number of ranks that share a sequence. `train_router` multiplies the gradients of `router` and `theta` by
    /// this number: only one of these ranks computes a head's gradients, but gradients are averaged over all ranks.
    fn ranks(&self) -> f64 {
        self.ulysses.as_ref().map_or(1.0, |ulysses| ulysses.ranks() as f64)
    }

    /// The op for packed documents, or for separate sequences.
    fn op(&self, documents: Option<&Packing>) -> Sla2 {
        match documents {
            Some(documents) => self.op.clone().packing(documents.clone()),
            None => self.op.clone(),
        }
    }

    /// The router; `None` with [`Choice::Window`], which needs no router.
    fn select_by(&self, k: &Tensor) -> Result<Option<Router>> {
        match (self.config.choice, &self.router) {
            (Choice::Window, _) => Ok(None),
            (_, Some([query, key])) => {
                Router::from_tensors(part(&query.value()?, self.keys())?, part(&key.value()?, self.keys())?)
                    .map(Some)
            }
            (_, None) => Router::new(k.dim(2)?, self.head_dim, k.device()).map(Some),
        }
    }

    fn select(&self, q: &Tensor, k: &Tensor, documents: Option<&Packing>) -> Result<Selection> {
        match self.select_by(k)? {
            Some(router) => self.op(documents).select(&router, q, k),
            None => {
                let (q_dims, k_dims) = (q.dims4()?, k.dims4()?);
                let shape = AttentionShape::new(q_dims, k_dims, k_dims, true, documents.cloned())?;
                let block = (self.config.block, self.config.block);
                // The first block of the sequence (the attention sink) counts as one of the selected blocks.
                let nearest = self.config.blocks.saturating_sub(1);
                Selection::window(&shape, block, nearest, self.config.blocks.min(1), q.device())
            }
        }
    }

    fn theta(&self, q: &Tensor) -> Result<Tensor> {
        match &self.theta {
            Some(theta) => part(&theta.value()?, self.queries()),
            None => Tensor::zeros(q.dim(2)?, DType::F32, q.device()),
        }
    }

    /// The forward without a backward.
    pub(super) fn forward(&self, [q, k, v]: [&Tensor; 3], documents: Option<&Packing>) -> Result<Tensor> {
        let selection = self.select(q, k, documents)?;
        self.op(documents).apply(q, k, v, &selection, &self.theta(q)?)
    }

    /// The forward of tokens that follow the tokens in a cache.
    pub(super) fn forward_cached(&self, [q, k, v]: [&Tensor; 3], cache: &mut Sla2Cache) -> Result<Tensor> {
        match self.select_by(k)? {
            Some(router) => self.op.apply_cached(&router, [q, k, v], &self.theta(q)?, cache),
            None => candle_core::bail!("windows of blocks have no cache"),
        }
    }

    /// Whether [`Self::forward_cached`] can run in the scheme `following`. `None` means the layer's scheme.
    pub(super) fn can_follow(&self, following: Option<Scheme>) -> bool {
        let scheme = following.unwrap_or(self.scheme);
        self.config.choice != Choice::Window && scheme == Scheme::Unquantized
    }

    /// Selects blocks, and returns statistics of the selection. On a GPU this waits for the device.
    pub(super) fn selected(&self, [q, k]: [&Tensor; 2], documents: Option<&Packing>) -> Result<Selected> {
        let selection = self.select(q, k, documents)?;
        let exact_weight = match self.config.tail {
            None => 1.0,
            // If exact attention's output is 1 and the tail's is 0, their blend is the weight of exact attention.
            Some(_) => {
                let (ones, zeros) = (q.ones_like()?, q.zeros_like()?);
                let weights = ops::blend(&ones, &zeros, &self.theta(q)?, &selection, self.config.alpha)?;
                // The weight of exact attention does not depend on the channel.
                let weights = weights.narrow(3, 0, 1)?.contiguous()?;
                f64::from(weights.to_dtype(DType::F32)?.mean_all()?.to_scalar::<f32>()?)
            }
        };
        Ok(Selected {
            sparsity: selection.sparsity()?,
            exact_weight,
            mass_caught: self.op(documents).mass_caught(&selection, q, k)?,
            users_ratio: users_ratio(&selection)?,
        })
    }

    /// Returns the output and its vector-Jacobian product.
    pub(super) fn vjp(
        &self,
        [q, k, v]: [&Tensor; 3],
        documents: Option<&Packing>,
    ) -> Result<(Tensor, Sla2Vjp)> {
        let selection = self.select(q, k, documents)?;
        self.op(documents).vjp(q, k, v, &selection, &self.theta(q)?)
    }

    /// Returns the gradients of query, key and value, and adds `theta`'s gradient to its accumulated gradient.
    pub(super) fn backward(&self, vjp: &Sla2Vjp, dout: &Tensor) -> Result<[Tensor; 3]> {
        let [dq, dk, dv, dtheta] = vjp.apply(dout)?;
        if let Some(theta) = &self.theta {
            Self::add(theta, self.queries(), &dtheta)?;
        }
        Ok([dq, dk, dv])
    }

    /// Adds to the accumulated gradients of the router and `theta`. The router learns how much probability dense
    /// attention gives to each key block. `theta` is trained so that SLA2's output is close to `out`, the output of
    /// dense attention.
    pub(super) fn train_router(
        &self,
        [q, k, v]: [&Tensor; 3],
        out: &Tensor,
        documents: Option<&Packing>,
    ) -> Result<()> {
        if let Some([query, key]) = &self.router {
            let var = |weight: &Weight| Var::from_tensor(&part(&weight.value()?, self.keys())?);
            let vars = [var(query)?, var(key)?];
            let [q_var, k_var] = &vars;
            let router = Router::from_tensors(q_var.as_tensor().clone(), k_var.as_tensor().clone())?;
            let [entropy, mass] = self.op(documents).router_loss_sums(&router, q, k)?;
            // Each rank that shares the sequence has some of the heads. It divides its `entropy` by the sum of these
            // ranks' `mass`, so that their losses add up to the loss over all heads.
            let mass = self.ulysses.as_ref().map_or(Ok(mass.clone()), |ulysses| ulysses.sum(&mass))?;
            let gradients = ((entropy / mass)? * (TEACHING * self.ranks()))?.backward()?;
            for (weight, var) in [query, key].into_iter().zip(&vars) {
                if let Some(gradient) = gradients.get(var) {
                    Self::add(weight, self.keys(), &gradient.contiguous()?)?;
                }
            }
        }
        let Some(theta) = &self.theta else { return Ok(()) };
        let (blended, vjp) = self.vjp([q, k, v], documents)?;
        // `theta`'s loss is the squared difference of `blended` and `out`, averaged over tokens and summed over heads
        // and channels.
        let factor = TEACHING * self.ranks() * 2.0 / (out.dim(0)? * out.dim(1)?) as f64;
        let dtheta = vjp.theta_gradient(&((blended - out)? * factor)?)?;
        Self::add(theta, self.queries(), &dtheta)
    }
}
