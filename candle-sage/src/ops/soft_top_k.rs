//! SoftTop-k: a differentiable selection of the k largest scores.

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CustomOp1, DType, Layout, Result, Shape, Tensor};
use rayon::prelude::*;

use super::support::{argument_error, f32_tensor, f32_values, shape_error, shapes_of, supported, with_f32};
use crate::cpu::ops::soft_top_k::{gradient, weights};
use crate::cpu::view::to_storage;
use crate::error::Error;

const NAME: &str = "soft-top-k";

/// SoftTop-k over the last dimension: score `s_j` has the weight `m_j = sigmoid(s_j / tau + shift)`. Each row has a
/// shift that makes its weights sum to `count` (SLA2, arXiv 2602.12675, equation 16). As `tau` goes to 0, the weights
/// of the `count` largest scores go to 1, and all other weights go to 0.
///
/// `scores` is (.., columns) in f32, and so is the output. Scores of minus infinity have weight 0 and are not
/// candidates. In a row with at most `count` candidates each candidate has weight 1. The gradient of the scores is
/// `u (dm - sum(u dm) / sum(u)) / tau` with `u = m (1 - m)`; it includes the gradient through the shift. The op runs on
/// the CPU, in f64.
///
/// ```
/// use candle_core::{Device, Var};
/// use candle_sage::ops::soft_top_k;
///
/// let scores = Var::new(&[[0.3f32, 0.1, 0.9, 0.7]], &Device::Cpu)?;
/// let soft = soft_top_k(&scores, 2, 0.1)?;
/// assert!((soft.sum_all()?.to_scalar::<f32>()? - 2.0).abs() < 1e-5);
/// // With a small tau, only the two largest scores have a weight of about 1.
/// let hard = soft_top_k(&scores, 2, 0.001)?.round()?;
/// assert_eq!(hard.to_vec2::<f32>()?, [[0., 0., 1., 1.]]);
/// assert!(soft.sqr()?.sum_all()?.backward()?.get(&scores).is_some());
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # Errors
/// When the scores are not f32, when they are on a GPU, or when `tau` is not above 0.
pub fn soft_top_k(scores: &Tensor, count: usize, tau: f64) -> Result<Tensor> {
    if scores.dtype() != DType::F32 || scores.rank() == 0 {
        return Err(shape_error(
            "soft_top_k: the scores have the wrong shape or type",
            shapes_of(&[("scores", scores)]),
            "(.., columns) in f32",
            "convert with `to_dtype`",
        ));
    }
    if !(tau > 0.0 && tau.is_finite()) {
        return Err(argument_error(
            "soft_top_k: tau is out of range",
            tau,
            "above 0, and finite",
            "the SLA2 paper uses 0.1",
        ));
    }
    if scores.device().is_cuda() {
        return Err(Error::unsupported("soft_top_k runs on the CPU")
            .got("scores on a GPU")
            .allowed("scores on the CPU")
            .hint("Sla2::router_loss trains a router on every device")
            .into());
    }
    supported(NAME, &[scores])?;
    scores.apply_op1(SoftTopK { count, tau })
}

struct SoftTopK {
    count: usize,
    tau: f64,
}

impl SoftTopK {
    /// Applies `f` to each row of `values`, `columns` wide.
    fn rows(values: &[f32], columns: usize, f: impl Fn(usize, &[f32]) -> Vec<f64> + Sync) -> Vec<f32> {
        let rows = values.par_chunks(columns.max(1)).enumerate();
        rows.flat_map_iter(|(n, row)| f(n, row).into_iter().map(|x| x as f32)).collect()
    }
}

impl CustomOp1 for SoftTopK {
    fn name(&self) -> &'static str {
        NAME
    }

    fn cpu_fwd(&self, scores: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let columns = *layout.dims().last().expect("a dimension");
        let values = f32_values(NAME, scores, layout)?;
        let out = Self::rows(&values, columns, |_, row| weights(row, self.count, self.tau));
        Ok((to_storage(out, scores.dtype())?, layout.shape().clone()))
    }

    /// Recomputes the output `m` in f64: if `m` is close to 1, `1 - m` has too few digits in f32.
    fn bwd(&self, scores: &Tensor, _out: &Tensor, dout: &Tensor) -> Result<Option<Tensor>> {
        let columns = scores.dim(candle_core::D::Minus1)?;
        let grad = with_f32(NAME, [scores, dout], |[scores, dout]| {
            Ok(Self::rows(scores, columns, |n, row| {
                let dm = &dout[n * columns..(n + 1) * columns];
                gradient(&weights(row, self.count, self.tau), dm, self.tau)
            }))
        })?;
        f32_tensor(grad, scores.shape(), scores.dtype()).map(Some)
    }
}
