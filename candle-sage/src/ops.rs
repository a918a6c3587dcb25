//! Differentiable operators for transformers, one file each. Candle's versions have no gradient, or a gradient that is
//! slow or needs much memory.
//!
//! Each operator is a candle custom op: it joins candle's autograd graph, and `backward()` computes the gradients of
//! its inputs. For training loops that do not use candle's graph, each backward is also a plain function
//! (`.._backward`, `.._into`, [`Attention::vjp`]). Such a loop can also use accumulation in place ([`add_into`],
//! [`product_into`]), copies of heads from one tensor to another ([`copy_heads`]) and parameter updates ([`AdamW`],
//! [`Muon`]).

pub(crate) mod accumulate;
pub(crate) mod adamw;
pub(crate) mod attention;
mod bias;
pub(crate) mod blend;
pub(crate) mod copy_heads;
pub(crate) mod cross_entropy;
pub(crate) mod embedding;
mod flash_attn;
pub(crate) mod fp8;
pub(crate) mod fp8_fused;
mod fp8_linear;
pub(crate) mod fp8_parts;
pub(crate) mod fp8_scales;
pub(crate) mod layer_norm;
pub(crate) mod linear_cross_entropy;
pub(crate) mod linear_cross_entropy_fp8;
pub(crate) mod mixture;
pub(crate) mod muon;
mod padding;
pub(crate) mod past_linear;
pub(crate) mod qk_norm_rope;
pub(crate) mod rms_norm;
pub(crate) mod rope;
pub(crate) mod route;
mod sinks;
mod soft_top_k;
mod support;
pub(crate) mod swiglu;
mod widths;

pub use accumulate::{add_into, product_into, sum_in_order};
pub use adamw::{AdamW, sum_of_squares};
pub use attention::{Attention, AttentionState, AttentionVjp, alibi_slopes};
pub use blend::{Alpha, blend, blend_backward};
pub use copy_heads::copy_heads;
pub use cross_entropy::{CrossEntropy, cross_entropy};
pub use embedding::{embedding, embedding_backward, embedding_forward};
pub use flash_attn::{
    flash_attn, flash_attn_alibi, flash_attn_alibi_windowed, flash_attn_alibi_windowed_softcap,
    flash_attn_varlen, flash_attn_varlen_alibi, flash_attn_varlen_alibi_windowed,
    flash_attn_varlen_alibi_windowed_softcap, flash_attn_varlen_windowed, flash_attn_windowed,
};
pub use fp8::{FP8_MULTIPLE, Fp8Copies, Fp8Matrix, Fp8Sums};
pub use fp8_fused::{
    qk_norm_rope_backward_fp8, residual_rms_norm_fp8, rms_norm_backward_fp8, swiglu_backward_fp8, swiglu_fp8,
};
pub use fp8_linear::{Fp8Linear, fp8_linear};
pub use fp8_parts::{FP8_PART, fp8_largest, fp8_quantize_parts, fp8_scales};
pub use fp8_scales::{Fp8Scale, Fp8Scales};
pub use layer_norm::layer_norm;
pub use linear_cross_entropy::{linear_cross_entropy, linear_cross_entropy_into};
pub use linear_cross_entropy_fp8::linear_cross_entropy_into_fp8;
pub use muon::{Muon, MuonMatrix, MuonPart, MuonScale, Orthogonalization};
pub use padding::{Padding, pack_padded, unpack_padded};
pub(crate) use past_linear::inverse_norm;
pub use past_linear::{Tail, past_linear, past_linear_backward, past_linear_backward_onto};
pub use qk_norm_rope::{QkNormRopeGrad, qk_norm_rope, qk_norm_rope_backward};
pub use rms_norm::{residual_rms_norm, rms_norm, rms_norm_backward};
pub use rope::{Llama3Scaling, RopeStyle, rope, rope_backward, rope_tables, rope_tables_llama3};
pub(crate) use route::{block_mass, choose, chosen, pool_keys, pool_queries};
pub use soft_top_k::soft_top_k;
pub(crate) use support::{dims4, shapes_of, swap_heads};
pub use swiglu::{swiglu, swiglu_backward};
