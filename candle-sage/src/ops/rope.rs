//! Rotary position embedding with a backward.

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CudaStorage, CustomOp3, Device, Layout, Result, Shape, Tensor};

use super::support::{
    argument_error, cuda_tensor, f32_tensor, f32_values, shape_error, shapes_of, supported, with_all_cuda,
    with_f32,
};
use crate::cpu::ops::rope::rotate;
use crate::cpu::view::to_storage;
use crate::launch::Launch;

const NAME: &str = "rope";

/// Which channels of a head are rotated as a pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum RopeStyle {
    /// Channels `i` and `i + head_dim / 2` form a pair, as in GPT-NeoX and in Hugging Face's checkpoints of Llama.
    #[default]
    Halves,
    /// Channels `2 i` and `2 i + 1` form a pair, as in the RoFormer paper and Meta's Llama.
    Interleaved,
}

/// Cosines and sines for the positions `0..len`: two f32 tensors (len, head_dim / 2), with
/// `angle[p][i] = p * base^(-2 i / head_dim)`, computed in f64. (RoFormer: arXiv 2104.09864.)
///
/// For packed documents, which each start at position 0, select rows with `index_select`.
///
/// ```
/// use candle_core::Device;
/// use candle_sage::ops::rope_tables;
///
/// let (cos, sin) = rope_tables(16, 8, 10000.0, &Device::Cpu)?;
/// assert_eq!((cos.dims(), sin.dims()), (&[16, 4][..], &[16, 4][..]));
/// // The first pair of channels turns by one radian a token, the second by 10000^(-1/4).
/// let at_3 = sin.get(3)?.to_vec1::<f32>()?;
/// assert!((at_3[0] - 3f32.sin()).abs() < 1e-6 && (at_3[1] - 0.3f32.sin()).abs() < 1e-6);
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # Errors
/// When `head_dim` is odd or zero, or `base` is not above zero.
pub fn rope_tables(len: usize, head_dim: usize, base: f64, device: &Device) -> Result<(Tensor, Tensor)> {
    tables(len, frequencies(head_dim, base)?, device)
}

/// How Llama 3.1 and later scale the frequencies of a model that was trained on shorter sequences:
/// `rope_scaling` of type `llama3` in a `config.json`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Llama3Scaling {
    /// Divisor of low frequencies.
    pub factor: f64,
    /// A frequency that makes fewer rotations than this number in `original_len` tokens is divided by `factor`.
    pub low_freq_factor: f64,
    /// A frequency that makes more rotations than this number in `original_len` tokens is not changed.
    pub high_freq_factor: f64,
    /// The sequence length in tokens with which the unscaled model was trained: `original_max_position_embeddings`.
    pub original_len: usize,
}

/// [`rope_tables`] with frequencies scaled as in Llama 3.1: a frequency that makes `t` rotations in `original_len`
/// tokens is multiplied by `s + (1 - s) / factor`. Here
/// `s = (t - low_freq_factor) / (high_freq_factor - low_freq_factor)`, clamped to the range from 0 to 1.
///
/// ```
/// use candle_core::Device;
/// use candle_sage::ops::{Llama3Scaling, rope_tables, rope_tables_llama3};
///
/// let scaling =
///     Llama3Scaling { factor: 8., low_freq_factor: 1., high_freq_factor: 4., original_len: 8192 };
/// let (_, scaled) = rope_tables_llama3(2, 128, 500000.0, scaling, &Device::Cpu)?;
/// let (_, plain) = rope_tables(2, 128, 500000.0, &Device::Cpu)?;
/// let (scaled, plain) = (scaled.get(1)?.to_vec1::<f32>()?, plain.get(1)?.to_vec1::<f32>()?);
/// // High frequencies stay, low ones are divided by the factor.
/// assert_eq!(scaled[0], plain[0]);
/// assert!((scaled[63] - plain[63] / 8.).abs() < 1e-9);
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # Errors
/// As [`rope_tables`], and when `scaling.factor` is not above zero, or `high_freq_factor` is not above
/// `low_freq_factor`.
pub fn rope_tables_llama3(
    len: usize,
    head_dim: usize,
    base: f64,
    scaling: Llama3Scaling,
    device: &Device,
) -> Result<(Tensor, Tensor)> {
    let Llama3Scaling { factor, low_freq_factor: low, high_freq_factor: high, original_len } = scaling;
    if !(factor > 0.0 && factor.is_finite() && low.is_finite() && high > low && high.is_finite()) {
        return Err(argument_error(
            "rope_tables_llama3: a factor is out of range",
            format!("factor {factor}, low_freq_factor {low}, high_freq_factor {high}"),
            "finite numbers: a factor above 0, and high_freq_factor above low_freq_factor",
            "Llama 3.1 has factor 8, low_freq_factor 1 and high_freq_factor 4",
        ));
    }
    let stretched = frequencies(head_dim, base)?.into_iter().map(|frequency| {
        let turns = original_len as f64 * frequency / std::f64::consts::TAU;
        let kept = ((turns - low) / (high - low)).clamp(0.0, 1.0);
        frequency * (kept + (1.0 - kept) / factor)
    });
    tables(len, stretched.collect(), device)
}

/// The frequency of each pair of channels, in radians per token.
fn frequencies(head_dim: usize, base: f64) -> Result<Vec<f64>> {
    if head_dim == 0 || !head_dim.is_multiple_of(2) || base.is_nan() || base <= 0.0 {
        return Err(argument_error(
            "rope_tables: head_dim or base is out of range",
            format!("head_dim {head_dim}, base {base}"),
            "an even head_dim above 0, a base above 0",
            "10000 is the usual base",
        ));
    }
    Ok((0..head_dim / 2).map(|i| base.powf(-2.0 * i as f64 / head_dim as f64)).collect())
}

fn tables(len: usize, frequencies: Vec<f64>, device: &Device) -> Result<(Tensor, Tensor)> {
    let angles = (0..len).flat_map(|p| frequencies.iter().map(move |frequency| p as f64 * frequency));
    let (cos, sin): (Vec<f32>, Vec<f32>) = angles.map(|a| (a.cos() as f32, a.sin() as f32)).unzip();
    let dims = (len, frequencies.len());
    Ok((Tensor::from_vec(cos, dims, device)?, Tensor::from_vec(sin, dims, device)?))
}

/// Rotates each pair of channels by the angle for the token's position: `(a, b) -> (a cos - b sin, a sin + b cos)`.
///
/// `x` is (batch, sequence, heads, head_dim) in f32, f16 or bf16 with any strides; `cos` and `sin` are
/// (sequence, head_dim / 2), see [`rope_tables`]. The output has the shape and type of `x`. Only `x` receives
/// a gradient: the output's gradient, rotated by the opposite angle.
///
/// ```
/// use candle_core::{Device, Tensor, Var};
/// use candle_sage::ops::{RopeStyle, rope, rope_tables};
///
/// let x = Var::randn(0f32, 1., (1, 4, 2, 8), &Device::Cpu)?;
/// let (cos, sin) = rope_tables(4, 8, 10000.0, &Device::Cpu)?;
/// let y = rope(&x, &cos, &sin, RopeStyle::Halves)?;
/// // The first position has the angle 0.
/// let first = |t: &Tensor| t.narrow(1, 0, 1)?.flatten_all()?.to_vec1::<f32>();
/// assert_eq!(first(&y)?, first(&x)?);
/// assert!(y.sqr()?.sum_all()?.backward()?.get(&x).is_some());
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # Errors
/// When the tables do not match `x` or are tracked ([`Tensor::track_op`]), or the types are not floats.
pub fn rope(x: &Tensor, cos: &Tensor, sin: &Tensor, style: RopeStyle) -> Result<Tensor> {
    check("rope", x, cos, sin)?;
    supported(NAME, &[x, cos, sin])?;
    x.apply_op3(cos, sin, Rope { style, direction: 1.0 })
}

/// The gradients of one or more inputs of [`rope`], such as query and key: the outputs' gradients `douts`, rotated by
/// the opposite angles. For training loops that do not use candle's graph.
///
/// The gradients are concatenated along the heads, (batch, sequence, heads of all inputs, head_dim): if one matmul
/// computed query and key, the concatenation is the operand of one backward matmul. `narrow` in dimension 2 returns a
/// single gradient.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_sage::ops::{RopeStyle, rope, rope_backward, rope_tables};
///
/// let dq = Tensor::randn(0f32, 1., (1, 4, 2, 8), &Device::Cpu)?;
/// let dk = Tensor::randn(0f32, 1., (1, 4, 1, 8), &Device::Cpu)?;
/// let (cos, sin) = rope_tables(4, 8, 10000.0, &Device::Cpu)?;
/// let both = rope_backward(&[&dq, &dk], &cos, &sin, RopeStyle::Halves)?;
/// assert_eq!(both.dims(), [1, 4, 2 + 1, 8]);
/// // The backward is the inverse rotation.
/// let again = rope(&both.narrow(2, 0, 2)?, &cos, &sin, RopeStyle::Halves)?;
/// assert!((again - dq)?.abs()?.max_all()?.to_scalar::<f32>()? < 1e-5);
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # Errors
/// As [`rope`], and when `douts` is empty, or its tensors differ in more than the number of heads.
pub fn rope_backward(douts: &[&Tensor], cos: &Tensor, sin: &Tensor, style: RopeStyle) -> Result<Tensor> {
    for dout in douts {
        check("rope", dout, cos, sin)?;
        supported(NAME, &[dout, cos, sin])?;
    }
    let dims = concatenated_shape("rope", douts)?;
    let back = Rope { style, direction: -1.0 };
    if cos.device().is_cuda() {
        let dx = with_all_cuda(NAME, &[douts, &[cos, sin]].concat(), |all| {
            let (douts, tables) = all.split_at(douts.len());
            back.launch((douts, [tables[0], tables[1]]))
        })?;
        return Ok(cuda_tensor(dx, dims));
    }
    let dx = |dout: &&Tensor| {
        let dx = with_f32(NAME, [dout, cos, sin], |[dout_values, cos, sin]| {
            Ok(style.rotate(dout.dims(), dout_values, cos, sin, back.direction))
        })?;
        f32_tensor(dx, dout.shape(), dout.dtype())
    };
    Tensor::cat(&douts.iter().map(dx).collect::<Result<Vec<_>>>()?, 2)?.reshape(dims)
}

/// The shape of `all` after concatenation along the heads. Each tensor is (batch, sequence, heads, head_dim).
pub(super) fn concatenated_shape(op: &str, all: &[&Tensor]) -> Result<(usize, usize, usize, usize)> {
    let but_heads = |x: &Tensor| match *x.dims() {
        [batch, sequence, heads, d] => Some((batch, sequence, d, x.dtype(), heads)),
        _ => None,
    };
    let all_dims: Option<Vec<_>> = all.iter().map(|x| but_heads(x)).collect();
    match all_dims.as_deref() {
        Some([(batch, sequence, d, dtype, heads), rest @ ..])
            if rest.iter().all(|x| (x.0, x.1, x.2, x.3) == (*batch, *sequence, *d, *dtype)) =>
        {
            Ok((*batch, *sequence, heads + rest.iter().map(|x| x.4).sum::<usize>(), *d))
        }
        _ => Err(shape_error(
            &format!("{op}: the tensors cannot be concatenated along the heads"),
            shapes_of(&all.iter().map(|&x| ("x", x)).collect::<Vec<_>>()),
            "one or more (batch, sequence, heads, head_dim) that differ only in heads",
            "call the function once per tensor",
        )),
    }
}

/// Checks that `cos` and `sin` match `x` and are not tracked ([`Tensor::track_op`]).
pub(super) fn check(op: &str, x: &Tensor, cos: &Tensor, sin: &Tensor) -> Result<()> {
    let fit = |sequence: usize, d: usize| {
        d.is_multiple_of(2) && d > 0 && cos.dims() == [sequence, d / 2] && sin.dims() == cos.dims()
    };
    let (fits, heads_first) = match *x.dims() {
        [_, sequence, heads, d] => (fit(sequence, d), fit(heads, d)),
        _ => (false, false),
    };
    if !fits {
        return Err(shape_error(
            &format!("{op}: the tables do not match the input"),
            shapes_of(&[("x", x), ("cos", cos), ("sin", sin)]),
            "x (batch, sequence, heads, head_dim), tables (sequence, head_dim / 2)",
            // If the tables fit the third dimension of `x`, `x` is probably (batch, heads, sequence, head_dim).
            match heads_first {
                true => {
                    "`transpose(1, 2)` an x that is (batch, heads, sequence, head_dim), or call `Rotary::forward_heads_first`"
                }
                false => "narrow the tables to the sequence with `narrow(0, start, len)`",
            },
        ));
    }
    if cos.track_op() || sin.track_op() {
        return Err(argument_error(
            &format!("{op}: gradients of the tables are not supported"),
            "tables that are variables, or made from them",
            "constant tables",
            "detach them from the graph with `detach()`",
        ));
    }
    Ok(())
}

/// Rotates pairs of channels: by the angles of the cos and sin tables if `direction` is 1, and back if it is -1.
pub(crate) struct Rope {
    pub(crate) style: RopeStyle,
    pub(crate) direction: f32,
}

impl RopeStyle {
    pub(super) fn rotate(
        self,
        dims: &[usize],
        x: &[f32],
        cos: &[f32],
        sin: &[f32],
        direction: f32,
    ) -> Vec<f32> {
        rotate(self == RopeStyle::Interleaved, dims, x, cos, sin, direction)
    }
}

impl CustomOp3 for Rope {
    fn name(&self) -> &'static str {
        NAME
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        x_layout: &Layout,
        cos: &CpuStorage,
        cos_layout: &Layout,
        sin: &CpuStorage,
        sin_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let values = f32_values(NAME, x, x_layout)?;
        let (cos, sin) = (f32_values(NAME, cos, cos_layout)?, f32_values(NAME, sin, sin_layout)?);
        let out = self.style.rotate(x_layout.dims(), &values, &cos, &sin, self.direction);
        let dtype = x.dtype();
        Ok((to_storage(out, dtype)?, x_layout.shape().clone()))
    }

    fn cuda_fwd(
        &self,
        x: &CudaStorage,
        x_layout: &Layout,
        cos: &CudaStorage,
        cos_layout: &Layout,
        sin: &CudaStorage,
        sin_layout: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        let tables = [(cos, cos_layout), (sin, sin_layout)];
        let out = self.launch((&[(x, x_layout)][..], tables))?;
        Ok((out, x_layout.shape().clone()))
    }

    fn bwd(
        &self,
        _x: &Tensor,
        cos: &Tensor,
        sin: &Tensor,
        _out: &Tensor,
        dout: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        Ok((Some(rope_backward(&[dout], cos, sin, self.style)?), None, None))
    }
}
