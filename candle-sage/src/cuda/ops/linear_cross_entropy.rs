//! On the GPU: cross-entropy from hidden states, one chunk of rows at a time. cuBLAS computes the matmuls, this crate's
//! kernels the rest.

use candle_core::backend::BackendStorage;
use candle_core::{CudaStorage, DType, Layout, Result};

use super::cross_entropy::{Rows, Scaling, mean, scale};
use super::fp8::Codes;
use super::ids::Ids;
use crate::cuda::address::{Address, address, address_at};
use crate::cuda::buffer::Buffer;
use crate::cuda::compiled::kernel;
use crate::cuda::floats::{Dense, Float, count, element, start, start_of};
use crate::cuda::gemm::{Out, gemm};
use crate::cuda::gemm_fp8::product as fp8_product;
use crate::cuda::kernels::Gpu;
use crate::cuda::params::{self, launch};
use crate::dtype::Checked;
use crate::error::Error;
use crate::fp8::Fp8Format;
use crate::launch::{self, Launch, Operand};
use crate::ops::CrossEntropy;
use crate::ops::fp8::{FP8_MULTIPLE, Fp8Copies, Fp8Product};
use crate::ops::linear_cross_entropy::{LinearInto, LinearOp};
use crate::ops::linear_cross_entropy_fp8::LinearIntoFp8;

const LINEAR: &str = "linear-cross-entropy";

/// `hidden` and `weight` are gradients of the sum of the rows' losses: gradients of the mean could underflow in 16 bit.
/// The backward multiplies them by `dloss / n`, where `n` is the number of targets that are not ignored.
#[derive(Debug)]
struct LinearSaved {
    targets: Ids,
    float: Float,
    hidden: Option<CudaStorage>,
    hidden_len: usize,
    weight: Option<Buffer<f32>>,
    weight_len: usize,
}

/// Settings of a pass over the chunks of logits.
#[derive(Debug, Clone, Copy)]
struct Linear {
    ignored: Option<i64>,
    /// Rows of logits that are computed at a time.
    chunk_rows: usize,
    z_loss: f32,
}

/// The most bytes of a chunk of logits, unless [`CrossEntropy::chunk_rows`] is set.
const BYTES: usize = 256 << 20;

impl Linear {
    fn new(settings: CrossEntropy, dtype: DType, weight: Operand<'_>) -> Result<Self> {
        let (classes, _) = weight.1.shape().dims2()?;
        let chunk_rows = settings.rows_at_once(classes, dtype.size_in_bytes(), BYTES);
        Ok(Self { ignored: settings.ignore_id, chunk_rows, z_loss: settings.z_loss })
    }

    /// Rows of logits per chunk, for `rows` rows in total.
    fn chunk(self, rows: usize) -> usize {
        self.chunk_rows.min(rows).max(1)
    }
}

/// Where [`pass`] writes the gradients.
#[derive(Default)]
struct GradientOutputs<'a> {
    hidden: Option<&'a CudaStorage>,
    /// The address of the weight's gradient in f32, and whether to add to its old values.
    weight: Option<(Address<'a>, bool)>,
}

impl<'a> GradientOutputs<'a> {
    /// The address of the hidden states' gradient from row `first` on.
    fn hidden(&self, first: usize, width: usize, gpu: &Gpu) -> Result<Option<Address<'a>>> {
        self.hidden.map(|hidden| element(hidden, first * width, gpu)).transpose()
    }

    /// The address of the weight's gradient, and the factor of its old values when the chunk at row `first` is added.
    fn weight(&self, first: usize) -> Option<(Address<'a>, f32)> {
        self.weight.map(|(at, add)| (at, if add || first > 0 { 1.0 } else { 0.0 }))
    }
}

/// The matmuls of a pass, in one precision.
trait Products {
    /// Writes `hidden weight^T` for `n` rows from `first` on.
    fn logits(&self, gpu: &Gpu, out: Out<'_>, first: usize, n: usize) -> Result<()>;

    /// Computes the losses of a chunk of logits, and the gradients that `into` requests.
    fn gradients(
        &self,
        rows: &Rows<'_>,
        params: params::CrossEntropy<'_>,
        into: &GradientOutputs<'_>,
    ) -> Result<()>;
}

/// Matmuls in the operands' type.
struct OwnType<'a> {
    hidden: Operand<'a>,
    weight: Operand<'a>,
    /// Factor of the gradients.
    factor: f32,
    /// The chunk of logits, which the logits' gradient overwrites.
    logits: &'a CudaStorage,
}

impl Products for OwnType<'_> {
    fn logits(&self, gpu: &Gpu, out: Out<'_>, first: usize, n: usize) -> Result<()> {
        let inputs = (self.hidden.0, &self.hidden.1.narrow(0, first, n)?);
        gemm(gpu, out, inputs, (self.weight.0, &self.weight.1.transpose(0, 1)?), [1.0, 0.0])
    }

    fn gradients(
        &self,
        rows: &Rows<'_>,
        params: params::CrossEntropy<'_>,
        into: &GradientOutputs<'_>,
    ) -> Result<()> {
        let &Rows { gpu, float, first, rows: n, classes, .. } = rows;
        rows.launch(
            kernel!("cross_entropy_in_place"),
            params::CrossEntropy { gradient: params.logits, ..params },
        )?;
        let dlogits = Layout::contiguous((n, classes));
        if let Some(at) = into.hidden(first, self.weight.1.dims()[1], gpu)? {
            gemm(gpu, Out { at, float }, (self.logits, &dlogits), self.weight, [self.factor, 0.0])?;
        }
        if let Some((at, beta)) = into.weight(first) {
            let inputs = (self.hidden.0, &self.hidden.1.narrow(0, first, n)?);
            let dlogits = (self.logits, &dlogits.transpose(0, 1)?);
            gemm(gpu, Out { at, float: Float::F32 }, dlogits, inputs, [self.factor, beta])?;
        }
        Ok(())
    }
}

/// Matmuls in FP8. `codes` are the hidden states, their transpose, the weight and its transpose; `scales` are the
/// scales of the hidden states and of the weight.
struct InFp8<'a> {
    op: &'a LinearIntoFp8,
    codes: [Operand<'a>; 4],
    scales: [Operand<'a>; 2],
}

impl InFp8<'_> {
    fn product(
        &self,
        gpu: &Gpu,
        out: (Address<'_>, Float, f32),
        operands: [Operand<'_>; 4],
        which: usize,
    ) -> Result<()> {
        let gradient = if which == 0 { Fp8Format::E4M3 } else { self.op.linear.gradient };
        let product = Fp8Product {
            formats: [gradient, Fp8Format::E4M3],
            sums: self.op.linear.sums[which],
            dtype: self.op.dtype,
        };
        fp8_product(gpu, &product, out, operands)
    }
}

impl Products for InFp8<'_> {
    fn logits(&self, gpu: &Gpu, out: Out<'_>, first: usize, n: usize) -> Result<()> {
        let [(hidden, layout), _, weight, _] = self.codes;
        let operands = [(hidden, &layout.narrow(0, first, n)?), weight, self.scales[0], self.scales[1]];
        self.product(gpu, (out.at, out.float, 0.0), operands, 0)
    }

    fn gradients(
        &self,
        rows: &Rows<'_>,
        params: params::CrossEntropy<'_>,
        into: &GradientOutputs<'_>,
    ) -> Result<()> {
        let &Rows { gpu, float, targets, first, rows: n, classes } = rows;
        let [_, (hidden_t, layout), _, weight_t] = self.codes;
        let lse = gpu.alloc::<f32>(n)?;
        let params = params::CrossEntropy { lse: address(&lse, gpu), ..params };
        rows.launch(kernel!("cross_entropy_fwd"), params)?;
        let codes = Codes::new(gpu, (n, classes), Fp8Copies::Both)?;
        // The kernel reports the largest value and the number of saturated values. They are not used.
        let seen = gpu.alloc_zeros::<u32>(2)?;
        let e5m2 = self.op.linear.gradient == Fp8Format::E5M2;
        let quantize = params::Fp8CrossEntropy {
            of: params::CrossEntropy {
                targets: targets.places(first, gpu)?,
                classes: count("classes", classes)?,
                ..params
            },
            codes: params::Fp8Codes {
                largest: address(&seen, gpu),
                saturated: address_at(&seen, 1, gpu)?,
                ..codes.params_of_scale(gpu, e5m2)?
            },
            factor: self.op.factor,
            scale: self.op.scale(),
        };
        let kernel = format!("{}_{}", kernel!("cross_entropy_fp8"), float.name());
        launch(gpu, &kernel, Codes::grid((n, classes)), &quantize)?;
        let codes = codes.into_storages(gpu);
        let (Some(own), Some(turned)) = (&codes.rows, &codes.columns) else { unreachable!("both copies") };
        let of_gradient = (&codes.scale, &Layout::contiguous(1));
        if let Some(at) = into.hidden(first, weight_t.1.dims()[0], gpu)? {
            let own = (own, &Layout::contiguous((n, classes)));
            self.product(gpu, (at, float, 0.0), [own, weight_t, of_gradient, self.scales[1]], 1)?;
        }
        if let Some((at, beta)) = into.weight(first) {
            let turned = (turned, &Layout::contiguous((classes, n)));
            let inputs = (hidden_t, &layout.narrow(1, first, n)?);
            self.product(gpu, (at, Float::F32, beta), [turned, inputs, of_gradient, self.scales[0]], 2)?;
        }
        Ok(())
    }
}

/// Computes the loss of `rows` rows with `classes` logits each, and the gradients that `into` requests. The rows are
/// processed in chunks: `logits` has room for the logits of one chunk. Returns the loss and the targets.
fn pass(
    gpu: &Gpu,
    products: &impl Products,
    logits: Out<'_>,
    (rows, classes): (usize, usize),
    ids: &Dense<'_>,
    settings: Linear,
    into: &GradientOutputs<'_>,
) -> Result<(CudaStorage, Ids)> {
    let targets = Ids::new(gpu, LINEAR, ids, classes, settings.ignored)?;
    let losses = gpu.alloc::<f32>(rows)?;
    let chunk = settings.chunk(rows);
    for first in (0..rows).step_by(chunk) {
        let n = chunk.min(rows - first);
        products.logits(gpu, logits, first, n)?;
        let params = params::CrossEntropy {
            logits: logits.at,
            losses: address_at(&losses, first, gpu)?,
            z_loss: settings.z_loss,
            ..Default::default()
        };
        let rows = Rows { gpu, float: logits.float, targets: &targets, first, rows: n, classes };
        if into.hidden.is_some() || into.weight.is_some() {
            products.gradients(&rows, params, into)?;
        } else {
            let lse = gpu.alloc::<f32>(n)?;
            let params = params::CrossEntropy { lse: address(&lse, gpu), ..params };
            rows.launch(kernel!("cross_entropy_fwd"), params)?;
        }
    }
    Ok((mean(gpu, &losses, rows, &targets)?, targets))
}

/// [`pass`] with matmuls in the operands' type.
fn own_pass(
    gpu: &Gpu,
    [hidden, weight]: [&Dense<'_>; 2],
    ids: &Dense<'_>,
    settings: Linear,
    into: &GradientOutputs<'_>,
    factor: f32,
) -> Result<(CudaStorage, Ids)> {
    let (hidden, weight) = (hidden.operand(), weight.operand());
    let float = Float::of(LINEAR, hidden.0)?;
    if Float::of(LINEAR, weight.0)? != float {
        return Err(Error::new("linear_cross_entropy: hidden and weight differ in element type")
            .got(format!("{}, {}", float.name(), weight.0.dtype().as_str()))
            .allowed("one type for both on CUDA")
            .hint("convert with `to_dtype`; the CPU supports different types")
            .into());
    }
    let dims = (hidden.1.shape().dims2()?.0, weight.1.shape().dims2()?.0);
    let logits = float.alloc(gpu, settings.chunk(dims.0) * dims.1)?;
    let out = Out { at: start_of(&logits, gpu)?, float };
    pass(gpu, &OwnType { hidden, weight, factor, logits: &logits }, out, dims, ids, settings, into)
}

/// The loss of the logits `hidden weight^T`; the backward, whose launch returns the wanted gradients of hidden states
/// and weight; and the result of the check that the targets are in range.
type LinearForward = (CudaStorage, launch::Backward<1, [Option<CudaStorage>; 2]>, Checked);

impl Launch<[Operand<'_>; 3], LinearForward> for LinearOp {
    fn launch(&self, [hidden, weight, targets]: [Operand<'_>; 3]) -> Result<LinearForward> {
        let ([hidden_wanted, weight_wanted], settings) =
            (self.wanted, Linear::new(self.settings, hidden.0.dtype(), weight)?);
        let gpu = &Gpu::new(hidden.0.device())?;
        let float = Float::of(LINEAR, hidden.0)?;
        let (hidden_len, weight_len) = (hidden.1.shape().elem_count(), weight.1.shape().elem_count());
        let (hidden, weight, ids) =
            (Dense::new(hidden, gpu)?, Dense::new(weight, gpu)?, Dense::new(targets, gpu)?);
        let dhidden = hidden_wanted.then(|| float.alloc(gpu, hidden_len)).transpose()?;
        let dweight = weight_wanted.then(|| gpu.alloc::<f32>(weight_len)).transpose()?;
        let into = GradientOutputs {
            hidden: dhidden.as_ref(),
            weight: dweight.as_ref().map(|dweight| (address(dweight, gpu), false)),
        };
        let (loss, targets) = own_pass(gpu, [&hidden, &weight], &ids, settings, &into, 1.0)?;
        let checked = targets.checked(gpu, &ids)?;
        let saved = LinearSaved { targets, float, hidden: dhidden, hidden_len, weight: dweight, weight_len };
        Ok((loss, Box::new(saved), checked))
    }
}

/// Returns the loss L of the logits `hidden weight^T`, and the gradient of `self.factor * L` with respect to `hidden`.
/// Adds the gradient with respect to `weight` to `dweight`. No target is ignored: the op checked that `ignore_id` is
/// `None`. The launch does not wait for the check of the targets: an invalid target makes the loss NaN.
impl Launch<[Operand<'_>; 4], [CudaStorage; 2]> for LinearInto {
    fn launch(&self, [dweight, hidden, weight, targets]: [Operand<'_>; 4]) -> Result<[CudaStorage; 2]> {
        let settings = Linear::new(self.settings, hidden.0.dtype(), weight)?;
        let gpu = &Gpu::new(hidden.0.device())?;
        let rows = targets.1.shape().elem_count();
        let dhidden = Float::of(LINEAR, hidden.0)?.alloc(gpu, hidden.1.shape().elem_count())?;
        let (hidden, weight, ids) =
            (Dense::new(hidden, gpu)?, Dense::new(weight, gpu)?, Dense::new(targets, gpu)?);
        let into = GradientOutputs { hidden: Some(&dhidden), weight: Some((start(dweight, gpu)?, true)) };
        let factor = self.factor / rows as f32;
        let (loss, _) = own_pass(gpu, [&hidden, &weight], &ids, settings, &into, factor)?;
        Ok([loss, dhidden])
    }
}

/// First the weight's gradient, to which the launch adds in place. Then the FP8 values of the hidden states, of their
/// transpose, of the weight and of its transpose. Then the scales of the hidden states and of the weight, and the
/// targets.
type Fp8Inputs<'a> = (Operand<'a>, [Operand<'a>; 7]);

/// As [`LinearInto`]: returns the loss and the gradient of the hidden states, and adds the weight's gradient to
/// `dweight`.
impl Launch<Fp8Inputs<'_>, [CudaStorage; 2]> for LinearIntoFp8 {
    fn launch(&self, (dweight, inputs): Fp8Inputs<'_>) -> Result<[CudaStorage; 2]> {
        let [hidden, hidden_t, weight, weight_t, of_hidden, of_weight, targets] = inputs;
        let gpu = &Gpu::new(hidden.0.device())?;
        let float = Float::of_dtype(LINEAR, self.dtype)?;
        let (dims, width) = ((hidden.1.dims()[0], weight.1.dims()[0]), hidden.1.dims()[1]);
        let mut settings = Linear::new(self.settings, self.dtype, weight)?;
        settings.chunk_rows = (settings.chunk_rows / FP8_MULTIPLE * FP8_MULTIPLE).max(FP8_MULTIPLE);
        let logits = float.alloc(gpu, settings.chunk(dims.0) * dims.1)?;
        let out = Out { at: start_of(&logits, gpu)?, float };
        let dhidden = float.alloc(gpu, dims.0 * width)?;
        let into = GradientOutputs { hidden: Some(&dhidden), weight: Some((start(dweight, gpu)?, true)) };
        let products =
            InFp8 { op: self, codes: [hidden, hidden_t, weight, weight_t], scales: [of_hidden, of_weight] };
        let (loss, _) = pass(gpu, &products, out, dims, &Dense::new(targets, gpu)?, settings, &into)?;
        Ok([loss, dhidden])
    }
}

/// The gradients of the hidden states and of the weight, if they were wanted.
impl Launch<[Operand<'_>; 1], [Option<CudaStorage>; 2]> for LinearSaved {
    fn launch(&self, [dloss]: [Operand<'_>; 1]) -> Result<[Option<CudaStorage>; 2]> {
        let gpu = &Gpu::new(dloss.0.device())?;
        let dloss = Dense::new(dloss, gpu)?;
        let scaled = |from: Option<(Float, Address<'_>)>, len| -> Result<Option<CudaStorage>> {
            let Some(from) = from else { return Ok(None) };
            let out = self.float.alloc(gpu, len)?;
            let to = (self.float, start_of(&out, gpu)?);
            let (dloss, status) = (dloss.start(gpu)?, self.targets.status(gpu));
            scale(gpu, &Scaling { from, to, len, dloss, status, accumulate: false })?;
            Ok(Some(out))
        };
        let hidden = self.hidden.as_ref().map(|sum| start_of(sum, gpu)).transpose()?;
        let weight = self.weight.as_ref().map(|sum| (Float::F32, address(sum, gpu)));
        Ok([scaled(hidden.map(|at| (self.float, at)), self.hidden_len)?, scaled(weight, self.weight_len)?])
    }
}
