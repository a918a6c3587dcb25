//! The ops except attention, on NVIDIA GPUs. Each op launches its kernels on candle's own stream.

mod adamw;
mod copy_heads;
mod cross_entropy;
mod embedding;
mod fp8;
mod fp8_parts;
mod ids;
mod layer_norm;
mod linear_cross_entropy;
mod muon;
mod rms_norm;
mod rope;
mod sum_in_order;
mod swiglu;
