//! Tests of the public interface, in one test binary.

mod attention;
mod attn_qat;
mod bias;
mod book;
mod by_hand;
mod copies;
#[cfg(feature = "cuda")]
mod cuda;
#[cfg(feature = "cuda")]
mod cuda_bits;
#[cfg(feature = "cuda")]
mod cuda_fp8;
#[cfg(feature = "cuda")]
mod cuda_muon;
#[cfg(feature = "cuda")]
mod cuda_ops;
#[cfg(feature = "cuda")]
mod cuda_sla2;
mod emulated;
mod fingerprint;
mod fp8;
mod imports;
mod later_tokens;
mod lengths;
mod log_sum_exp;
mod messages;
mod modules;
mod moving;
mod muon;
mod ops;
mod optimizers;
mod padding;
mod params;
mod plans;
mod reference;
mod sagebwd;
mod score_mod;
mod sinks;
mod sla2;
mod sla2_cached;
mod sla2_soft;
mod sparse;
mod support;
mod untrained;
mod widths;
mod windows;
