//! One attention call on a GPU: its tensors and its shape as kernel parameters.

use candle_core::Result;

use super::address::{Address, address_if_any};
use super::buffer::Buffer;
use super::kernels::Gpu;
use super::memory::Purpose;
use super::params;
use super::plan::{self, Plan, SELECTION_BLOCK, TILE, Visits};
use super::tensor::{Element, Output, Strided, tensor_map};
use crate::error::Error;
use crate::scheme::Scheme;
use crate::selection::Blocks;
use crate::shape::{AttentionShape, Dims};

/// One attention call: the GPU's counterpart of [`crate::cpu::Problem`].
#[derive(Debug)]
pub(super) struct Problem<'a> {
    pub(super) gpu: &'a Gpu,
    pub(super) scheme: &'a Scheme,
    pub(super) shape: &'a AttentionShape,
    pub(super) softmax_scale: f32,
    /// Whether repeated runs give gradients with the same bits. Deterministic kernels are slower.
    pub(super) deterministic: bool,
    pub(super) q: Strided<'a>,
    pub(super) k: Strided<'a>,
    pub(super) v: Strided<'a>,
    /// The blocks of keys to attend to. `None`: all keys that the mask allows.
    pub(super) selected: Option<Selected<'a>>,
    /// The sinks' logits, one per query head; null: no sinks.
    pub(super) sinks: Address<'a>,
    /// A soft cap or `ALiBi`.
    pub(super) score_mod: Option<params::ScoreMod<'a>>,
}

/// The blocks of keys that blocks of queries attend to.
#[derive(Debug, Clone, Copy)]
pub(super) struct Selected<'a> {
    pub(super) lists: params::Lists<'a>,
    pub(super) blocks: &'a Blocks,
}

/// State that all launches of a call share.
pub(super) struct Call<'a> {
    pub(super) gpu: &'a Gpu,
    pub(super) element: Element,
    /// head_dim as padded inside the kernels.
    pub(super) d: usize,
    pub(super) geometry: Geometry,
    pub(super) problem: &'a Problem<'a>,
}

/// The shape of a call as kernel parameters.
pub(super) struct Geometry {
    /// The kernels' parameters. [`Geometry::shape`] adds `segments`, and [`Call::new`] sets the softmax scale.
    pub(super) sizes: params::Shape<'static>,
    /// The table of packed documents.
    segments: Option<Buffer<params::Segment>>,
}

impl Geometry {
    pub(super) fn new(gpu: &Gpu, shape: &AttentionShape) -> Result<Self> {
        let (lengths, table, tiles) = segments(shape)?;
        let packed = !table.is_empty();
        let segments = packed.then(|| gpu.upload(&table)).transpose()?;
        // If a window's `after` is at least the length of every batch entry or packed document, it hides no key.
        let after = shape.window().after.filter(|after| *after < lengths.0.max(lengths.1));
        let sizes = params::Shape {
            segment_count: if packed { table.len() } else { shape.batch() } as i32,
            query_len: lengths.0 as i32,
            key_len: lengths.1 as i32,
            query_heads: shape.query_heads() as i32,
            key_heads: shape.key_heads() as i32,
            head_dim: shape.head_dim() as i32,
            value_dim: shape.value_dim() as i32,
            limit_after: after.map_or(0, |after| after as i32 + 1),
            query_tiles: tiles.0 as i32,
            key_tiles: tiles.1 as i32,
            ..params::Shape::default()
        };
        Ok(Self { sizes, segments })
    }

    /// The kernels' parameters for the shape.
    pub(super) fn shape(&self, gpu: &Gpu) -> params::Shape<'_> {
        params::Shape { segments: address_if_any(self.segments.as_ref(), gpu), ..self.sizes }
    }

    pub(super) fn segment_count(&self) -> usize {
        self.sizes.segment_count as usize
    }
    /// The largest number of query blocks, and of key blocks, that a selection has in one batch entry or packed
    /// document.
    pub(super) fn blocks(&self) -> (usize, usize) {
        let blocks = |len: i32| (len as usize).div_ceil(SELECTION_BLOCK);
        (blocks(self.sizes.query_len), blocks(self.sizes.key_len))
    }
}

impl<'a> Call<'a> {
    pub(super) fn new(problem: &'a Problem<'a>) -> Result<Self> {
        let shape = problem.shape;
        if problem.softmax_scale.is_nan() || problem.softmax_scale <= 0.0 {
            return Err(Error::unsupported("softmax scale is out of range on CUDA")
                .got(problem.softmax_scale)
                .allowed("above 0")
                .hint("for a negative scale, negate the query and the scale; the CPU supports any scale")
                .into());
        }
        let gpu = problem.gpu;
        let mut geometry = Geometry::new(gpu, shape)?;
        geometry.sizes.softmax_scale = problem.softmax_scale;
        Ok(Self {
            element: problem.q.element,
            d: plan::padded_head_dim(problem.scheme, shape, gpu.architecture),
            geometry,
            gpu,
            problem,
        })
    }

    /// The plan of a scheme's kernel.
    ///
    /// # Errors
    /// When the kernel has no plan for this head_dim and these `visits` on this GPU.
    pub(super) fn plan(&self, kernel: &str, visits: Visits) -> Result<&'static Plan> {
        let widths = (self.d, self.problem.shape.value_dim());
        Plan::of(kernel, widths, self.gpu.architecture, visits).map_err(|missing| match self.d {
            ..=128 if visits == Visits::ScoreMod => {
                Error::unsupported("this scheme supports neither a soft cap nor ALiBi on CUDA")
                    .got(format!("{}, whose kernel is `{kernel}`", self.problem.scheme))
                    .allowed("unquantized attention; SageBwd with the products `scores`; Attn-QAT with 16-bit matmuls")
                    .hint("use SageBwd::default().products(Int8Products::SCORES), with .smoothing(Smoothing::None) if there is a soft cap; the CPU supports ALiBi in every scheme")
                    .into()
            }
            ..=128 => missing,
            _ => Error::unsupported("head_dim is out of range on CUDA")
                .got(format!("{} for `{kernel}` on {}", self.problem.shape.widest(), self.gpu.architecture))
                .allowed("8 to 128; up to 256 for unquantized attention on compute capability 8.0, 9.0 and 10.x, and for SageBwd's products `scores` on 9.0")
                .hint("on these GPUs use Scheme::Unquantized, or on 9.0 SageBwd::default().products(Int8Products::SCORES); the CPU supports up to 256 in every scheme")
                .into(),
        })
    }

    pub(super) fn shape(&self) -> params::Shape<'_> {
        self.geometry.shape(self.gpu)
    }

    /// The parameter `shape` of a kernel in which the thread blocks of one head access the same `bytes` bytes of data.
    /// `heads`: number of heads of a batch entry or document.
    pub(super) fn shape_sharing(&self, bytes: usize, heads: usize) -> params::Shape<'_> {
        let heads = heads * self.segment_count();
        let at_once = plan::heads_at_once(self.gpu.cache_bytes, bytes, heads);
        params::Shape { heads_at_once: at_once as i32, ..self.shape() }
    }

    /// The tiles that the call's mainloops visit.
    pub(super) fn visits(&self) -> Visits {
        match self.problem.selected {
            Some(_) => Visits::Listed,
            None if self.problem.score_mod.is_some() => Visits::ScoreMod,
            // In the kernels of `Visits::Every`, a query sees all keys before it, and either all or none of the keys
            // after it.
            None if self.keys_before() + 1 < self.geometry.sizes.key_len => Visits::Window,
            None if self.geometry.sizes.limit_after > 1 => Visits::Window,
            None => Visits::Every,
        }
    }

    /// The kernel parameter `lists` of a call without a selection: only `keys_before` is set.
    pub(super) fn window(&self) -> params::Lists<'_> {
        params::Lists { keys_before: self.keys_before(), ..params::Lists::default() }
    }

    /// Number of keys that a query sees before its own position; the number of all keys if the window has no limit.
    fn keys_before(&self) -> i32 {
        let key_len = self.geometry.sizes.key_len;
        self.problem.shape.window().before.map_or(key_len, |before| before.min(key_len as usize) as i32)
    }

    pub(super) fn segment_count(&self) -> usize {
        self.geometry.segment_count()
    }
    /// Number of query tiles in all heads of all batch entries or documents.
    pub(super) fn query_tiles(&self) -> usize {
        self.geometry.sizes.query_tiles as usize * self.problem.shape.query_heads()
    }
    /// Number of key tiles in all heads of all batch entries or documents.
    pub(super) fn key_tiles(&self) -> usize {
        self.geometry.sizes.key_tiles as usize * self.problem.shape.key_heads()
    }

    /// A kernel's full name.
    pub(super) fn kernel(&self, what: &str) -> String {
        self.kernel_for(what, self.d)
    }

    /// The full name of a kernel that pads heads to `d` channels.
    pub(super) fn kernel_for(&self, what: &str, d: usize) -> String {
        format!("{what}_{}_{d}", self.element.name())
    }

    /// Whether the kernel of `plan` uses tensor maps in this call.
    fn maps(&self, plan: &Plan) -> bool {
        plan.mapped(self.problem.shape.is_packed()) && !self.gpu.dry
    }

    /// Sets the tensor maps of Q, K and V in `params`, if the forward's plan uses them. TMA, the hardware that copies
    /// tiles, needs a map of each tensor. If TMA cannot read one of the tensors, no map is set, and threads copy all
    /// three.
    pub(super) fn set_forward_maps(&self, plan: &Plan, params: &mut params::Forward<'_>) -> Result<()> {
        if !self.maps(plan) {
            return Ok(());
        }
        let map = |view, of: Strided<'_>| tensor_map(view, of.dims, self.element);
        let problem = self.problem;
        let maps = (map(params.q, problem.q)?, map(params.k, problem.k)?, map(params.v, problem.v)?);
        if let (Some(q), Some(k), Some(v)) = maps {
            params.q.mapped = 1;
            (params.q_map, params.k_map, params.v_map) = (q, k, v);
        }
        Ok(())
    }

    /// [`Call::set_forward_maps`] for the backward: sets the tensor map of dO and, if `as_rows`, the map of Q.
    /// `as_rows`: whether the kernel reads Q in 16 bit. Otherwise it reads Q's INT8 values.
    pub(super) fn set_backward_maps(
        &self,
        plan: &Plan,
        as_rows: bool,
        dout: Strided<'_>,
        params: &mut params::Backward<'_>,
    ) -> Result<()> {
        if !self.maps(plan) {
            return Ok(());
        }
        let q = match as_rows {
            true => tensor_map(params.q, self.problem.q.dims, self.element)?,
            false => Some(params::TensorMap::default()),
        };
        if let (Some(q), Some(dout)) = (q, tensor_map(params.dout, dout.dims, self.element)?) {
            params.dout.mapped = 1;
            (params.q_map, params.dout_map) = (q, dout);
        }
        Ok(())
    }

    /// A new contiguous tensor, uninitialized.
    pub(super) fn tensor(&self, purpose: Purpose, dims: Dims) -> Result<Output> {
        Output::new(self.gpu, purpose, self.element, dims)
    }
}

type Lengths = (usize, usize);

/// The largest numbers of queries and of keys in a segment, the table of packed documents (empty without packing), and
/// the total numbers of query tiles and of key tiles.
fn segments(shape: &AttentionShape) -> Result<(Lengths, Vec<params::Segment>, Lengths)> {
    let segments = shape.segments();
    let tiles = |len: usize| len.div_ceil(TILE);
    let longest = segments.iter().fold((0, 0), |(q, k), s| (q.max(s.query.len()), k.max(s.key.len())));
    let mut table = Vec::with_capacity(segments.len());
    let blocks = |len: usize| len.div_ceil(SELECTION_BLOCK);
    let (mut total, mut all_blocks) = ((0, 0), (0, 0));
    for s in &segments {
        table.push(params::Segment {
            query_start: s.query.start as i32,
            query_len: s.query.len() as i32,
            key_start: s.key.start as i32,
            key_len: s.key.len() as i32,
            query_tile: total.0 as i32,
            key_tile: total.1 as i32,
            query_block: all_blocks.0 as i32,
            key_block: all_blocks.1 as i32,
        });
        all_blocks = (all_blocks.0 + blocks(s.query.len()), all_blocks.1 + blocks(s.key.len()));
        total = (total.0 + tiles(s.query.len()), total.1 + tiles(s.key.len()));
    }
    // Kernels count tokens, tiles and thread blocks in 32 bits, elements and bytes in 64.
    let blocks = segments.len() * tiles(longest.0.max(longest.1)) * shape.query_heads();
    let most = [
        shape.query_len(),
        shape.key_len(),
        blocks,
        total.0 * shape.query_heads(),
        total.1 * shape.query_heads(),
    ]
    .into_iter()
    .max()
    .unwrap_or(0);
    if most > i32::MAX as usize / 4 {
        return Err(Error::new("attention is too large for one launch")
            .got(format!(
                "{} batch entries or documents, up to {} queries and {} keys, {} heads",
                segments.len(),
                longest.0,
                longest.1,
                shape.query_heads()
            ))
            .allowed("each below 2^29: queries; keys; documents (batch entries) x heads x longest length/64")
            .hint("split the batch")
            .into());
    }
    if !shape.is_packed() {
        table.clear();
    }
    Ok((longest, table, total))
}
