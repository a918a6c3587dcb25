//! Attention on memory of other libraries, such as PyTorch: callers pass device addresses, strides and a stream, not
//! candle's tensors.
//!
//! A [`ForeignAttention`] describes calls on tensors of fixed shapes, and can be used any number of times. It does not
//! allocate: the caller provides a call's scratch memory, and memory for the state that a forward keeps for its
//! backward. The caller queries their sizes first. Kernels run on the caller's stream, and no call waits for them.
//!
//! ```no_run
//! use candle_core::DType;
//! use candle_sage::foreign::{ForeignAttention, ForeignLayout, Inputs, Lent, Results, Stream};
//! use candle_sage::{Attention, SageBwd};
//!
//! # fn allocate(_: usize) -> u64 { 0 }
//! # let (q, k, v, raw_stream) = (0, 0, 0, 0);
//! let layout = ForeignLayout::contiguous(DType::BF16, [1, 4096, 16, 128]);
//! let stream = unsafe { Stream::new(0, raw_stream) }?;
//! let call = ForeignAttention::new(Attention::new(SageBwd::default()).causal(true), [layout; 3], true)?;
//! let sizes = call.forward_sizes(&stream)?;
//! let state = Lent { address: allocate(sizes.state), bytes: sizes.state };
//! let scratch = Lent { address: allocate(sizes.scratch), bytes: sizes.scratch };
//! let out = allocate(2 * layout.dims.iter().product::<usize>());
//! let inputs = Inputs { tensors: [q, k, v], ..Inputs::default() };
//! unsafe { call.forward(&stream, inputs, Results { out, lse: 0 }, state, scratch) }?;
//! # Ok::<(), candle_core::Error>(())
//! ```
#![allow(unsafe_code)]

use std::rc::Rc;
use std::sync::{Arc, Mutex, PoisonError};

use candle_core::{DType, Result};
use cudarc::driver::{CudaContext, CudaStream};

use super::address::Address;
use super::call::{Call, Problem, Selected};
use super::driver::DriverResult;
use super::kernels::Gpu;
use super::memory::{Arena, Arenas, Memory};
use super::selection::{check_blocks, lists_at};
use super::tensor::{Element, Strided};
use super::{
    Completed, OnGpu, OutputGradient, minus_lse2_of, params, run_backward, run_forward, with_scheme,
    write_log_sum_exps,
};
use crate::error::Error;
use crate::ops::Attention;
use crate::scheme::Scheme;
use crate::selection::Blocks;
use crate::shape::AttentionShape;

/// The layout of a (batch, sequence, heads, head_dim) tensor in f16 or bf16. Strides are in elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ForeignLayout {
    /// f16 or bf16.
    pub dtype: DType,
    /// (batch, sequence, heads, head_dim).
    pub dims: [usize; 4],
    /// The stride of each dimension.
    pub strides: [usize; 4],
}

impl ForeignLayout {
    /// A contiguous layout.
    pub fn contiguous(dtype: DType, dims: [usize; 4]) -> Self {
        let [_, sequence, heads, channels] = dims;
        Self { dtype, dims, strides: [sequence * heads * channels, heads * channels, channels, 1] }
    }

    fn at(&self, address: u64) -> Result<Strided<'static>> {
        // SAFETY: the caller of `forward` or `backward` vouches for `address`. Other functions access no memory at it.
        let data = unsafe { Address::lent(address) };
        Ok(Strided::new(data, Element::of(self.dtype)?, self.dims, self.strides))
    }
}

/// The device addresses of a call's inputs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Inputs {
    /// Query, key and value.
    pub tensors: [u64; 3],
    /// The sinks, one f32 number per query head, if the call has sinks.
    pub sinks: u64,
    /// The slopes, one f32 number per query head, if the call has `ALiBi`.
    pub alibi_slopes: u64,
    /// The u32 lists of the selected key blocks ([`ForeignAttention::with_selection`]), if the call has a selection.
    pub lists: u64,
}

/// The device addresses of a forward's results.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Results {
    /// The output, in the layout of [`ForeignAttention::output`].
    pub out: u64,
    /// The log-sum-exps of the logits, (batch, query heads, query) in f32, contiguous, if the call returns them
    /// ([`ForeignAttention::with_lse`]).
    pub lse: u64,
}

/// The gradients of a forward's results.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ResultGradients {
    /// The address and the layout of the output's gradient, which may have any strides.
    pub out: (u64, ForeignLayout),
    /// The address of the log-sum-exps' gradient, (batch, query heads, query) in f32, contiguous. Address 0: the
    /// gradient is zero.
    pub lse: u64,
}

/// Memory that the caller provides for a call. The address must be a multiple of 256.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Lent {
    /// The device address.
    pub address: u64,
    /// The size in bytes.
    pub bytes: usize,
}

impl Lent {
    /// No memory.
    pub const NONE: Self = Self { address: 0, bytes: 0 };
}

/// The numbers of bytes that a forward needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ForwardSizes {
    /// The state for the backward.
    pub state: usize,
    /// Scratch memory of the forward.
    pub scratch: usize,
}

/// A stream of a device's primary context.
#[derive(Debug, Clone)]
pub struct Stream(Arc<CudaStream>);

impl Stream {
    /// A stream of another library by its handle (`CUstream`); 0 is the default stream.
    ///
    /// # Errors
    /// When the device does not exist.
    ///
    /// # Safety
    /// The handle belongs to a stream of this device's primary context, and the stream outlives this value.
    pub unsafe fn new(device: usize, handle: u64) -> Result<Self> {
        static CONTEXTS: Mutex<Vec<Arc<CudaContext>>> = Mutex::new(Vec::new());
        let mut contexts = CONTEXTS.lock().unwrap_or_else(PoisonError::into_inner);
        let context = match contexts.iter().find(|context| context.ordinal() == device) {
            Some(context) => context.clone(),
            None => {
                contexts.push(CudaContext::new(device).w()?);
                contexts[contexts.len() - 1].clone()
            }
        };
        // SAFETY: the caller vouches for the handle.
        Ok(Self(unsafe { context.wrap_borrowed_stream(handle as _) }))
    }
}

/// Attention for one fixed shape, on tensors of another library.
#[derive(Debug)]
pub struct ForeignAttention {
    attention: Attention,
    shape: AttentionShape,
    softmax_scale: f32,
    inputs: [ForeignLayout; 3],
    /// Whether a backward follows.
    keep: bool,
    sinks: bool,
    alibi: bool,
    /// Whether the log-sum-exps are a result.
    lse: bool,
    /// The blocks and the `width` of [`ForeignAttention::with_selection`].
    selection: Option<(Blocks, usize)>,
}

impl ForeignAttention {
    /// Describes calls on query, key and value. `keep`: whether a backward follows.
    ///
    /// # Errors
    /// As [`Attention::apply`]; when `attention` has sinks, `ALiBi` slopes or a selection, which are candle tensors;
    /// and, in a quantized scheme, when values have another head_dim than keys.
    pub fn new(attention: Attention, inputs: [ForeignLayout; 3], keep: bool) -> Result<Self> {
        let dims = inputs.map(|ForeignLayout { dims: [b, s, h, d], .. }| (b, s, h, d));
        let (shape, softmax_scale) = attention.checked(dims, inputs.map(|x| x.dtype), keep)?;
        attention.checked_softcap()?;
        Element::of(inputs[0].dtype)?;
        if attention.has_tensors() {
            return Err(Error::unsupported("`attention` has sinks, ALiBi slopes or a selection")
                .got("candle tensors, which `ForeignAttention` does not read")
                .allowed("`attention` without sinks, slopes and selection")
                .hint(
                    "pass addresses to `with_sinks`, `with_alibi` and `with_selection` of `ForeignAttention`",
                )
                .into());
        }
        if shape.value_dim() != shape.head_dim() && attention.scheme != Scheme::Unquantized {
            return Err(Error::unsupported("this scheme does not support values of another head_dim than keys")
                .got(format!(
                    "head_dim {} of values, {} of keys, {}",
                    shape.value_dim(),
                    shape.head_dim(),
                    attention.scheme
                ))
                .allowed("equal head_dims, or unquantized attention")
                .hint("pad the narrower of keys and values with zeros; if you pad queries and keys, keep the softmax scale of the original head_dim")
                .into());
        }
        Ok(Self {
            attention,
            shape,
            softmax_scale,
            inputs,
            keep,
            sinks: false,
            alibi: false,
            lse: false,
            selection: None,
        })
    }

    /// Adds sinks: see [`Attention::apply_with_sinks`].
    ///
    /// # Errors
    /// When the scheme smooths keys.
    pub fn with_sinks(self) -> Result<Self> {
        self.attention.check_sinks()?;
        Ok(Self { sinks: true, ..self })
    }

    /// Adds `ALiBi`: see [`Attention::alibi`].
    #[must_use]
    pub fn with_alibi(self) -> Self {
        Self { alibi: true, ..self }
    }

    /// Makes the log-sum-exps of the logits a result: see [`Attention::apply_with_lse`].
    ///
    /// # Errors
    /// When the scheme smooths keys. Also when [`new`](Self::new) got `keep = false`, because log-sum-exps are part of
    /// the state that a forward keeps.
    pub fn with_lse(self) -> Result<Self> {
        self.attention.check_lse()?;
        self.check_keep("log-sum-exps need a forward that keeps its state for a backward")?;
        Ok(Self { lse: true, ..self })
    }

    fn check_keep(&self, what: &str) -> Result<()> {
        if self.keep {
            return Ok(());
        }
        Err(Error::new(what)
            .got("keep = false")
            .allowed("keep = true")
            .hint("`ForeignAttention::new(.., true)` keeps the state")
            .into())
    }

    /// Adds a [`Selection`](crate::Selection). `block`: the numbers of queries and of keys in a block. The lists
    /// ([`Inputs::lists`]) have shape (key heads, query blocks of all batch entries or packed documents, 1 + `width`).
    /// A list contains the number of key blocks that its query block sees, then their indices in ascending order. The
    /// remaining entries are ignored. With a causal mask each list ends with the blocks on the diagonal.
    ///
    /// # Errors
    /// When GPUs or the scheme do not support blocks of this size, and as
    /// [`Selection::from_lists`](crate::Selection::from_lists).
    pub fn with_selection(self, block: (usize, usize), width: usize) -> Result<Self> {
        let blocks = Blocks::new(&self.shape, block)?;
        check_blocks(&blocks)?;
        blocks.check_unit(self.attention.scheme.block_unit())?;
        Ok(Self { selection: Some((blocks, width)), ..self })
    }

    /// The layout of the output, contiguous.
    pub fn output(&self) -> ForeignLayout {
        let (batch, sequence, heads, channels) = self.shape.output_dims();
        ForeignLayout::contiguous(self.inputs[0].dtype, [batch, sequence, heads, channels])
    }

    /// Placeholder addresses for the computation of memory sizes, in which no kernel runs.
    fn counted(&self) -> Inputs {
        Inputs {
            tensors: [0; 3],
            sinks: self.sinks.into(),
            alibi_slopes: self.alibi.into(),
            lists: self.selection.is_some().into(),
        }
    }

    fn gpu(&self, stream: &Stream, memory: Arenas, dry: bool) -> Result<Gpu> {
        Gpu::foreign(stream.0.clone(), Memory::Lent(Rc::new(memory)), dry)
    }

    fn problem<'b>(&'b self, gpu: &'b Gpu, inputs: Inputs) -> Result<Problem<'b>> {
        let [q, k, v] = [0, 1, 2].map(|n| self.inputs[n].at(inputs.tensors[n]));
        let (softcap, heads) = (self.attention.checked_softcap()?, self.shape.query_heads() as i32);
        // SAFETY: as in `ForeignLayout::at`.
        let of_heads = |has: bool, at: u64| unsafe { Address::lent(if has { at } else { 0 }) };
        let alibi_slopes = of_heads(self.alibi, inputs.alibi_slopes);
        let modified = softcap != 0.0 || self.alibi;
        let selected = self.selection.as_ref().map(|(blocks, width)| Selected {
            lists: lists_at(of_heads(true, inputs.lists), blocks, 1 + width),
            blocks,
        });
        Ok(Problem {
            gpu,
            scheme: &self.attention.scheme,
            shape: &self.shape,
            softmax_scale: self.softmax_scale,
            deterministic: self.attention.is_deterministic(),
            q: q?,
            k: k?,
            v: v?,
            selected,
            sinks: of_heads(self.sinks, inputs.sinks),
            score_mod: modified.then_some(params::ScoreMod { alibi_slopes, softcap, heads }),
        })
    }

    /// The sizes of the forward's state and scratch memory. They depend on shapes, settings and the device.
    ///
    /// # Errors
    /// When this device has no kernel for this call.
    pub fn forward_sizes(&self, stream: &Stream) -> Result<ForwardSizes> {
        let gpu = self.gpu(stream, Arenas::counting(), true)?;
        self.forward_on(&gpu, self.counted(), Address::NULL)?;
        let Memory::Lent(counted) = &gpu.memory else { unreachable!("lent above") };
        Ok(ForwardSizes { state: counted.kept.used(), scratch: counted.scratch.used() })
    }

    /// Launches the forward, which writes the results and, if a backward follows, `state`.
    ///
    /// # Errors
    /// When the provided memory is too small, or a launch fails.
    ///
    /// # Safety
    /// All addresses point to memory of the stream's device. The memory stays alive until the kernels have run. Inputs
    /// and results have their documented layouts; the memory at each [`Lent::address`] has [`Lent::bytes`] bytes.
    pub unsafe fn forward(
        &self,
        stream: &Stream,
        inputs: Inputs,
        results: Results,
        state: Lent,
        scratch: Lent,
    ) -> Result<()> {
        if self.lse && results.lse == 0 {
            return Err(Error::new("a call with log-sum-exps needs an address for them")
                .got("lse: 0")
                .allowed("the address of memory for (batch, query heads, query) in f32")
                .hint("leave out `with_lse`, or set `Results::lse`")
                .into());
        }
        let memory = Arenas::new(vec![results.out], arena(state), arena(scratch));
        // SAFETY: the caller vouches for the address.
        let lse = unsafe { Address::lent(results.lse) };
        self.forward_on(&self.gpu(stream, memory, false)?, inputs, lse)
    }

    fn forward_on(&self, gpu: &Gpu, inputs: Inputs, lse: Address<'_>) -> Result<()> {
        fn run<S: OnGpu>(
            scheme: S,
            of: &ForeignAttention,
            problem: &Problem<'_>,
            lse: Address<'_>,
        ) -> Result<()> {
            match run_forward(scheme, problem, of.keep)?.1 {
                Some(completed) if of.lse => write_log_sum_exps(&completed, problem.gpu, problem.shape, lse),
                _ => Ok(()),
            }
        }
        let problem = self.problem(gpu, inputs)?;
        with_scheme!(&self.attention.scheme, |scheme| run(scheme, self, &problem, lse))
    }

    /// The size in bytes of the backward's scratch memory.
    ///
    /// # Errors
    /// As [`ForeignAttention::forward_sizes`].
    pub fn backward_scratch(&self, stream: &Stream) -> Result<usize> {
        let gpu = self.gpu(stream, Arenas::counting(), true)?;
        let (out, state) = (self.output().at(0)?, Lent { address: 0, bytes: usize::MAX });
        let output = OutputGradient { out, dout: out, dlse: Address::NULL };
        self.backward_on(stream, &gpu, self.counted(), state, &output)?;
        let Memory::Lent(counted) = &gpu.memory else { unreachable!("lent above") };
        Ok(counted.scratch.used())
    }

    fn backward_on(
        &self,
        stream: &Stream,
        gpu: &Gpu,
        inputs: Inputs,
        state: Lent,
        output: &OutputGradient<'_>,
    ) -> Result<()> {
        // Repeats the forward's allocations in `state`, in the same order, to find what the forward wrote there.
        fn found<S: OnGpu>(scheme: S, call: &Call<'_>) -> Result<Completed<S>> {
            let minus_lse2 = minus_lse2_of(call)?;
            let kept = scheme.keep(scheme.operands(call, true)?);
            Ok(Completed { scheme, minus_lse2, kept })
        }
        let memory = Arenas::new(Vec::new(), arena(state), Arena::counting());
        let counting = self.gpu(stream, memory, true)?;
        let before = self.problem(&counting, inputs)?;
        let (call, problem) = (Call::new(&before)?, self.problem(gpu, inputs)?);
        with_scheme!(&self.attention.scheme, |scheme| {
            run_backward(&found(scheme, &call)?, &problem, output).map(drop)
        })
    }

    /// Launches the backward of a forward that kept `state` and wrote the output `out`. The backward writes the
    /// contiguous gradients of query, key and value. With sinks, it also writes their gradient: an f32 per query head.
    ///
    /// # Errors
    /// When the output's gradient does not have the output's shape and type, memory is too small, or a launch fails.
    ///
    /// # Safety
    /// As [`ForeignAttention::forward`]; inputs, `out` and `state` have not changed since the forward.
    pub unsafe fn backward(
        &self,
        stream: &Stream,
        inputs: Inputs,
        (out, given): (u64, ResultGradients),
        state: Lent,
        ([dq, dk, dv], dsinks): ([u64; 3], u64),
        scratch: Lent,
    ) -> Result<()> {
        self.check_keep("the forward of this call keeps no state for a backward")?;
        let (of_output, (dout, layout)) = (self.output(), given.out);
        if (layout.dims, layout.dtype) != (of_output.dims, of_output.dtype) {
            return Err(Error::shape("the output's gradient does not fit the output")
                .got(format!("{:?} {:?}", layout.dims, layout.dtype))
                .allowed(format!("{:?} {:?}", of_output.dims, of_output.dtype))
                .hint("pass a gradient with the output's shape and element type")
                .into());
        }
        // SAFETY: the caller vouches for the address.
        let dlse = unsafe { Address::lent(given.lse) };
        let output = OutputGradient { out: of_output.at(out)?, dout: layout.at(dout)?, dlse };
        // The outputs are in the order in which `cuda::run_backward` allocates them.
        let outputs = if self.sinks { vec![dk, dv, dsinks, dq] } else { vec![dk, dv, dq] };
        let memory = Arenas::new(outputs, Arena::new(0, 0), arena(scratch));
        let gpu = self.gpu(stream, memory, false)?;
        self.backward_on(stream, &gpu, inputs, state, &output)
    }
}

fn arena(lent: Lent) -> Arena {
    Arena::new(lent.address, lent.bytes)
}
