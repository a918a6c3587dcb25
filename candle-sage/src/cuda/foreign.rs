//! Attention on memory of other libraries, such as PyTorch's: device addresses, strides and a stream, without candle's tensors.
//!
//! A call allocates nothing. The caller asks for the size of the state that a forward leaves for its backward, and of the memory that a
//! call uses while it runs, and lends both. The kernels run on the caller's stream, and no call waits for them.
//!
//! ```no_run
//! use candle_core::DType;
//! use candle_sage::foreign::{ForeignAttention, ForeignTensor, Lent, Stream};
//! use candle_sage::{Attention, SageBwd};
//!
//! # fn allocate(_: usize) -> u64 { 0 }
//! # let (q, k, v, raw_stream) = (0, 0, 0, 0);
//! let dims = [1, 4096, 16, 128];
//! let tensor = |address| ForeignTensor::contiguous(address, DType::BF16, dims);
//! let stream = unsafe { Stream::new(0, raw_stream) }?;
//! let attention = Attention::new(SageBwd::default()).causal(true);
//! let call = ForeignAttention::new(&attention, [tensor(q), tensor(k), tensor(v)], true)?;
//! let sizes = call.forward_sizes(&stream)?;
//! let state = Lent { address: allocate(sizes.state), bytes: sizes.state };
//! let scratch = Lent { address: allocate(sizes.scratch), bytes: sizes.scratch };
//! let out = allocate(2 * dims.iter().product::<usize>());
//! unsafe { call.forward(&stream, out, state, scratch) }?;
//! # Ok::<(), candle_core::Error>(())
//! ```
#![allow(unsafe_code)]

use std::rc::Rc;
use std::sync::{Arc, Mutex, PoisonError};

use candle_core::{DType, Result};
use cudarc::driver::{CudaContext, CudaStream};

use super::address::Address;
use super::buffer::{Arena, Memory};
use super::call::{Call, Problem};
use super::driver::DriverResult;
use super::kernels::Gpu;
use super::tensor::{Element, Strided};
use super::{
    Completed, CompletedForward, OnGpu, OutputGradient, minus_lse2_of, params, run_forward, with_scheme,
};
use crate::ops::Attention;
use crate::shape::{AttentionShape, Dims};

/// A (batch, sequence, heads, head_dim) tensor on a GPU, in f16 or bf16. Strides are in elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ForeignTensor {
    /// The device address of the first element.
    pub address: u64,
    /// f16 or bf16.
    pub dtype: DType,
    /// (batch, sequence, heads, head_dim).
    pub dims: [usize; 4],
    /// The distances of neighbours in each dimension.
    pub strides: [usize; 4],
}

impl ForeignTensor {
    /// A contiguous tensor.
    pub fn contiguous(address: u64, dtype: DType, dims: [usize; 4]) -> Self {
        let [_, sequence, heads, channels] = dims;
        Self { address, dtype, dims, strides: [sequence * heads * channels, heads * channels, channels, 1] }
    }

    fn dims(&self) -> Dims {
        let [batch, sequence, heads, channels] = self.dims;
        (batch, sequence, heads, channels)
    }

    fn strided(&self) -> Result<Strided<'static>> {
        // SAFETY: the caller of `forward` and `backward` vouches for the address, and nothing else reads it.
        let data = unsafe { Address::lent(self.address) };
        Ok(Strided::new(data, Element::of(self.dtype)?, self.dims, self.strides))
    }
}

/// Memory that is lent to a call. Its address is a multiple of 256.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Lent {
    /// The device address.
    pub address: u64,
    /// Its size.
    pub bytes: usize,
}

impl Lent {
    /// No memory.
    pub const NONE: Self = Self { address: 0, bytes: 0 };
}

/// Bytes that a forward needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ForwardSizes {
    /// What it leaves for its backward.
    pub state: usize,
    /// What it uses while it runs.
    pub scratch: usize,
}

/// A stream of a device's primary context.
#[derive(Debug, Clone)]
pub struct Stream(Arc<CudaStream>);

impl Stream {
    /// A stream of another library by its handle (`CUstream`); 0 is the default stream.
    ///
    /// # Errors
    /// When there is no such device.
    ///
    /// # Safety
    /// The handle is that of a stream of the primary context of this device, which outlives this value.
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

/// One attention call on tensors of another library.
#[derive(Debug)]
pub struct ForeignAttention<'a> {
    attention: &'a Attention,
    shape: AttentionShape,
    softmax_scale: f32,
    inputs: [ForeignTensor; 3],
    /// Whether a backward follows.
    keep: bool,
    sinks: u64,
    alibi_slopes: Option<u64>,
}

impl<'a> ForeignAttention<'a> {
    /// A call on query, key and value. `keep`: a backward will follow. Of `attention`, sinks, `ALiBi` slopes and a selection are tensors of
    /// candle's, and are not used.
    ///
    /// # Errors
    /// As [`Attention::apply`].
    pub fn new(attention: &'a Attention, inputs: [ForeignTensor; 3], keep: bool) -> Result<Self> {
        let dims = inputs.map(|x| x.dims());
        let (shape, softmax_scale) = attention.checked(dims, inputs.map(|x| x.dtype), keep)?;
        attention.checked_softcap()?;
        Element::of(inputs[0].dtype)?;
        Ok(Self { attention, shape, softmax_scale, inputs, keep, sinks: 0, alibi_slopes: None })
    }

    /// With sinks: the address of (query heads) in f32. See [`Attention::apply_with_sinks`].
    ///
    /// # Errors
    /// When the scheme smooths keys.
    pub fn sinks(self, address: u64) -> Result<Self> {
        self.attention.check_sinks()?;
        Ok(Self { sinks: address, ..self })
    }

    /// With `ALiBi`: the address of the slopes, (query heads) in f32. See [`Attention::alibi`].
    #[must_use]
    pub fn alibi(self, address: u64) -> Self {
        Self { alibi_slopes: Some(address), ..self }
    }

    /// Dimensions of the output and of its gradient.
    pub fn output_dims(&self) -> [usize; 4] {
        let (batch, sequence, heads, channels) = self.shape.output_dims();
        [batch, sequence, heads, channels]
    }

    fn gpu(&self, stream: &Stream, memory: super::buffer::Lent, dry: bool) -> Result<Gpu> {
        Gpu::foreign(stream.0.clone(), Memory::Lent(Rc::new(memory)), dry)
    }

    fn problem<'b>(&'b self, gpu: &'b Gpu) -> Result<Problem<'b>> {
        let [q, k, v] = self.inputs.map(|x| x.strided());
        let (softcap, heads) = (self.attention.checked_softcap()?, self.shape.query_heads() as i32);
        // SAFETY: as in `ForeignTensor::strided`.
        let [sinks, alibi_slopes] =
            [self.sinks, self.alibi_slopes.unwrap_or(0)].map(|at| unsafe { Address::lent(at) });
        let modified = softcap != 0.0 || self.alibi_slopes.is_some();
        Ok(Problem {
            gpu,
            scheme: &self.attention.scheme,
            shape: &self.shape,
            softmax_scale: self.softmax_scale,
            deterministic: self.attention.is_deterministic(),
            q: q?,
            k: k?,
            v: v?,
            selected: None,
            sinks,
            score_mod: modified.then_some(params::ScoreMod { alibi_slopes, softcap, heads }),
        })
    }

    /// The bytes of the forward, which depend on shapes, settings and the device.
    ///
    /// # Errors
    /// When there is no kernel for this call on this device.
    pub fn forward_sizes(&self, stream: &Stream) -> Result<ForwardSizes> {
        let gpu = self.gpu(stream, super::buffer::Lent::counting(), true)?;
        let problem = self.problem(&gpu)?;
        with_scheme!(&self.attention.scheme, |scheme| run_forward(scheme, &problem, self.keep).map(drop))?;
        let Memory::Lent(lent) = &gpu.memory else { unreachable!("lent above") };
        Ok(ForwardSizes { state: lent.kept.used(), scratch: lent.scratch.used() })
    }

    /// Launches the forward, which writes the output, contiguous [`ForeignAttention::output_dims`], and, where a backward follows, `state`.
    ///
    /// # Errors
    /// When the lent memory is too small, or a launch fails.
    ///
    /// # Safety
    /// Inputs, sinks, slopes, output, state and scratch are memory of the stream's device, of the sizes that shapes and
    /// [`ForeignAttention::forward_sizes`] say, which stays alive until the kernels have run.
    pub unsafe fn forward(&self, stream: &Stream, out: u64, state: Lent, scratch: Lent) -> Result<()> {
        let memory = super::buffer::Lent::new(vec![out], arena(state), arena(scratch));
        let gpu = self.gpu(stream, memory, false)?;
        let problem = self.problem(&gpu)?;
        with_scheme!(&self.attention.scheme, |scheme| run_forward(scheme, &problem, self.keep).map(drop))
    }

    /// The bytes that the backward uses while it runs.
    ///
    /// # Errors
    /// As [`ForeignAttention::forward_sizes`].
    pub fn backward_scratch(&self, stream: &Stream) -> Result<usize> {
        let gpu = self.gpu(stream, super::buffer::Lent::counting(), true)?;
        let (out, kept) = (self.of_output(0), Lent { address: 0, bytes: usize::MAX });
        let output = OutputGradient { out: out.strided()?, dout: out.strided()?, dlse: Address::NULL };
        with_scheme!(&self.attention.scheme, |scheme| self
            .run_backward(scheme, stream, &gpu, kept, &output))?;
        let Memory::Lent(lent) = &gpu.memory else { unreachable!("lent above") };
        Ok(lent.scratch.used())
    }

    fn of_output(&self, address: u64) -> ForeignTensor {
        ForeignTensor::contiguous(address, self.inputs[0].dtype, self.output_dims())
    }

    fn run_backward<S: OnGpu>(
        &self,
        scheme: S,
        stream: &Stream,
        gpu: &Gpu,
        state: Lent,
        output: &OutputGradient<'_>,
    ) -> Result<()> {
        // The state has the addresses that the forward's allocations got, in the same order.
        let memory = super::buffer::Lent::new(Vec::new(), arena(state), Arena::counting());
        let found = self.gpu(stream, memory, true)?;
        let problem = self.problem(&found)?;
        let call = Call::new(&problem)?;
        let minus_lse2 = minus_lse2_of(&call)?;
        let kept = scheme.keep(scheme.operands(&call, true)?);
        let completed = Completed { scheme, minus_lse2, kept };
        completed.backward(&self.problem(gpu)?, output).map(drop)
    }

    /// Launches the backward of a forward that kept `state`. `dout` may have any strides. It writes the gradients of query, key and value,
    /// contiguous, and with sinks theirs, (query heads) in f32.
    ///
    /// # Errors
    /// When the lent memory is too small, or a launch fails.
    ///
    /// # Safety
    /// As [`ForeignAttention::forward`]; inputs, `out` and `state` have not changed since the forward.
    pub unsafe fn backward(
        &self,
        stream: &Stream,
        (out, dout): (u64, ForeignTensor),
        state: Lent,
        ([dq, dk, dv], dsinks): ([u64; 3], u64),
        scratch: Lent,
    ) -> Result<()> {
        let output = OutputGradient {
            out: self.of_output(out).strided()?,
            dout: dout.strided()?,
            dlse: Address::NULL,
        };
        // In the order in which `cuda::run_backward` allocates them.
        let outputs = if self.sinks == 0 { vec![dk, dv, dq] } else { vec![dk, dv, dsinks, dq] };
        let memory = super::buffer::Lent::new(outputs, Arena::new(0, 0), arena(scratch));
        let gpu = self.gpu(stream, memory, false)?;
        with_scheme!(&self.attention.scheme, |scheme| self.run_backward(scheme, stream, &gpu, state, &output))
    }
}

fn arena(lent: Lent) -> Arena {
    Arena::new(lent.address, lent.bytes)
}
