//! Adds to tensors in place, for training loops that do not use candle's graph.

use std::ops::Range;

use candle_core::{CpuStorage, CudaStorage, DType, InplaceOp2, InplaceOp3, Layout, Result, Tensor};
use rayon::prelude::*;

use super::support::{SPAN, check_sum, f32_values, f32_values_mut, shape_error, shapes_of, supported};
use crate::cpu::product::{Mat, product_parallel};
use crate::launch::Launch;

const ADD: &str = "add-into";
const PRODUCT: &str = "product-into";
const IN_ORDER: &str = "sum-in-order";

/// `sum += x`.
///
/// `sum` is contiguous and f32; `x` has the shape of `sum`, in f32, f16 or bf16.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_sage::ops::add_into;
///
/// let sum = Tensor::zeros(2, DType::F32, &Device::Cpu)?;
/// add_into(&sum, &Tensor::new(&[1f32, 2.], &Device::Cpu)?)?;
/// add_into(&sum, &Tensor::new(&[10f32, 20.], &Device::Cpu)?)?;
/// assert_eq!(sum.to_vec1::<f32>()?, [11., 22.]);
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # Errors
/// When shapes or types do not match.
pub fn add_into(sum: &Tensor, x: &Tensor) -> Result<()> {
    check_sum("add_into", sum, x.dims())?;
    supported(ADD, &[sum, x])?;
    sum.inplace_op2(&x.detach(), &AddInto)
}

pub(crate) struct AddInto;

impl InplaceOp2 for AddInto {
    fn name(&self) -> &'static str {
        ADD
    }

    fn cpu_fwd(
        &self,
        sum: &mut CpuStorage,
        layout: &Layout,
        x: &CpuStorage,
        x_layout: &Layout,
    ) -> Result<()> {
        let x = f32_values(ADD, x, x_layout)?;
        let sum = f32_values_mut(ADD, sum, layout)?;
        sum.par_chunks_mut(SPAN).zip(x.par_chunks(SPAN)).for_each(|(sum, x)| {
            sum.iter_mut().zip(x).for_each(|(sum, x)| *sum += x);
        });
        Ok(())
    }

    fn cuda_fwd(
        &self,
        sum: &mut CudaStorage,
        layout: &Layout,
        x: &CudaStorage,
        x_layout: &Layout,
    ) -> Result<()> {
        self.launch([(&*sum, layout), (x, x_layout)])
    }
}

/// Adds the gradients of several GPUs in a fixed order: `sum = (parts[0] + parts[1]) + (parts[2] + parts[3]) + ..`,
/// where the old value of `sum` replaces `parts[place]`. Gradients are added in pairs, then the sums in pairs, and so
/// on. A term without a partner waits for the next round.
///
/// The result has the same bits on every GPU. If the number of GPUs and the number per node are powers of two, one sum
/// over all GPUs also has the same bits as the sum of the nodes' sums.
///
/// `parts` is (n, ..), one gradient per GPU; `parts[place]` is not read. `sum` has the shape of one of these gradients.
/// `parts` and `sum` are contiguous and f32. `place` is 0 to n - 1.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_sage::ops::sum_in_order;
///
/// // The second of three processes has its own gradient, and receives the gradients of the first and the third.
/// let gradient = Tensor::new(&[2f32, 20.], &Device::Cpu)?;
/// let received = Tensor::new(&[[1f32, 10.], [0., 0.], [4., 40.]], &Device::Cpu)?;
/// sum_in_order(&gradient, &received, 1)?;
/// assert_eq!(gradient.to_vec1::<f32>()?, [7., 70.]);
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # Errors
/// When shapes or types do not match, or `place` is out of range; on CUDA, when a tensor is not aligned to 16 bytes,
/// the number of elements of `sum` is not a multiple of 4, or there are more than 2040 parts.
pub fn sum_in_order(sum: &Tensor, parts: &Tensor, place: usize) -> Result<()> {
    let parted = parts.dims().split_first().is_some_and(|(&n, dims)| place < n && dims == sum.dims());
    if !parted || parts.dtype() != DType::F32 || !parts.is_contiguous() {
        return Err(shape_error(
            "sum_in_order: the parts do not fit the sum",
            format!("{}, place {place}", shapes_of(&[("parts", parts), ("sum", sum)])),
            "contiguous f32 parts (n, ..), a sum (..), and a place below n",
            "stack the parts along a new first dimension; `contiguous()` copies a view",
        ));
    }
    check_sum("sum_in_order", sum, sum.dims())?;
    supported(IN_ORDER, &[sum, parts])?;
    sum.inplace_op2(&parts.detach(), &InOrder { place })
}

/// Recursive pairwise sum: sums the first 2^n terms and the remaining terms separately, then adds both sums. 2^n is the
/// largest power of two below the number of terms.
fn in_pairs<'a>(terms: Range<usize>, term: &impl Fn(usize) -> &'a [f32]) -> Vec<f32> {
    if terms.len() == 1 {
        return term(terms.start).to_vec();
    }
    let middle = terms.start + terms.len().next_power_of_two() / 2;
    let mut sum = in_pairs(terms.start..middle, term);
    sum.iter_mut().zip(in_pairs(middle..terms.end, term)).for_each(|(sum, x)| *sum += x);
    sum
}

pub(crate) struct InOrder {
    pub(crate) place: usize,
}

impl InplaceOp2 for InOrder {
    fn name(&self) -> &'static str {
        IN_ORDER
    }

    fn cpu_fwd(
        &self,
        sum: &mut CpuStorage,
        layout: &Layout,
        parts: &CpuStorage,
        parts_layout: &Layout,
    ) -> Result<()> {
        let parts = f32_values(IN_ORDER, parts, parts_layout)?;
        let sum = f32_values_mut(IN_ORDER, sum, layout)?;
        let len = sum.len();
        sum.par_chunks_mut(SPAN).enumerate().for_each(|(span, sum)| {
            let own = sum.to_vec();
            let of_part = |part: usize| &parts[part * len + span * SPAN..][..own.len()];
            let term = |part| if part == self.place { own.as_slice() } else { of_part(part) };
            sum.copy_from_slice(&in_pairs(0..parts.len() / len, &term));
        });
        Ok(())
    }

    fn cuda_fwd(
        &self,
        sum: &mut CudaStorage,
        layout: &Layout,
        parts: &CudaStorage,
        parts_layout: &Layout,
    ) -> Result<()> {
        self.launch([(&*sum, layout), (parts, parts_layout)])
    }
}

/// `out += factor * a b` if `add`, otherwise `out = factor * a b`; sums run in f32.
///
/// `a` is (rows, inner) and `b` (inner, columns), of one type. The elements of a row, or those of a column, are
/// adjacent in memory, so `a` and `b` may be transposed views. `out` is contiguous (rows, columns), in f32 or, on a
/// GPU, in the type of `a`. For a linear map `y = x W^T` the gradients are
/// `product_into(dw, dy.t(), x, 1.0, true)` and `product_into(dx, dy, w, 1.0, true)`.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_sage::ops::product_into;
///
/// // The gradient of W in y = x W^T, added to the ones in dw.
/// let x = Tensor::new(&[[1f32, 2.], [3., 4.]], &Device::Cpu)?;
/// let dy = Tensor::new(&[[1f32, 0., 1.], [0., 1., 1.]], &Device::Cpu)?;
/// let dw = Tensor::ones((3, 2), DType::F32, &Device::Cpu)?;
/// product_into(&dw, &dy.t()?, &x, 1.0, true)?;
/// assert_eq!(dw.to_vec2::<f32>()?, [[2., 3.], [4., 5.], [5., 7.]]);
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # Errors
/// When shapes, types or strides do not fit.
pub fn product_into(out: &Tensor, a: &Tensor, b: &Tensor, factor: f64, add: bool) -> Result<()> {
    let fits = match (a.dims(), b.dims()) {
        (&[rows, inner], &[b_inner, cols]) => inner == b_inner && out.dims() == [rows, cols],
        _ => false,
    };
    if !fits || a.dtype() != b.dtype() {
        return Err(shape_error(
            "product_into: matrices do not fit together",
            shapes_of(&[("a", a), ("b", b), ("out", out)]),
            "a (rows, inner) and b (inner, columns) of one type, out (rows, columns)",
            "transpose a matrix with `t()`, or convert it with `to_dtype`",
        ));
    }
    if out.dtype() == DType::F32 || out.device().is_cpu() || out.dtype() != a.dtype() {
        check_sum("product_into", out, out.dims())?;
    }
    if !out.is_contiguous() {
        return Err(shape_error(
            "product_into: the output is not contiguous",
            format!("{:?} with strides {:?}", out.dims(), out.stride()),
            "contiguous (rows, columns)",
            "multiply into a separate tensor, and copy",
        ));
    }
    supported(PRODUCT, &[out, a, b])?;
    out.inplace_op3(&a.detach(), &b.detach(), &ProductInto { factor: factor as f32, add })
}

pub(crate) struct ProductInto {
    pub(crate) factor: f32,
    pub(crate) add: bool,
}

impl InplaceOp3 for ProductInto {
    fn name(&self) -> &'static str {
        PRODUCT
    }

    fn cpu_fwd(
        &self,
        out: &mut CpuStorage,
        layout: &Layout,
        a: &CpuStorage,
        a_layout: &Layout,
        b: &CpuStorage,
        b_layout: &Layout,
    ) -> Result<()> {
        let (at, bt) = (transposed(a_layout)?, transposed(b_layout)?);
        let a = (f32_values(PRODUCT, a, at.as_ref().unwrap_or(a_layout))?, a_layout.shape().dims2()?);
        let b = (f32_values(PRODUCT, b, bt.as_ref().unwrap_or(b_layout))?, b_layout.shape().dims2()?);
        let matrix = |(values, (rows, cols)), transposed: bool| match transposed {
            true => Mat::new(values, cols, rows).t(),
            false => Mat::new(values, rows, cols),
        };
        let (a, b) = (matrix((&*a.0, a.1), at.is_some()), matrix((&*b.0, b.1), bt.is_some()));
        product_parallel(f32_values_mut(PRODUCT, out, layout)?, a, b, self.factor, self.add);
        Ok(())
    }

    fn cuda_fwd(
        &self,
        out: &mut CudaStorage,
        layout: &Layout,
        a: &CudaStorage,
        a_layout: &Layout,
        b: &CudaStorage,
        b_layout: &Layout,
    ) -> Result<()> {
        self.launch([(&*out, layout), (a, a_layout), (b, b_layout)])
    }
}

/// The layout of the transpose, if the transpose is contiguous and the matrix is not.
fn transposed(layout: &Layout) -> Result<Option<Layout>> {
    let turned = layout.transpose(0, 1)?;
    Ok((!layout.is_contiguous() && turned.is_contiguous()).then_some(turned))
}
