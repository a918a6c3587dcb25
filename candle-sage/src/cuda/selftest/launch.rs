//! Launches of a primitive of `kernels/selftest.cu`.
#![allow(unsafe_code)]

use candle_core::Result;
use cudarc::driver::DeviceRepr;

use super::gpu;
use crate::cuda::address::{Address, address};
use crate::cuda::guard;
use crate::cuda::kernels::Grid;

#[repr(C)]
#[derive(Clone, Copy)]
struct Params<'a> {
    a: Address<'a>,
    b: Address<'a>,
    out: Address<'a>,
}
// SAFETY: plain data, with the same layout in kernels/selftest.cu.
unsafe impl DeviceRepr for Params<'_> {}

/// Runs one warp of a kernel on two buffers.
pub(super) fn run<A: DeviceRepr + Copy + 'static, X: DeviceRepr + Copy>(
    kernel: &str,
    a: &[A],
    b: &[A],
    len: usize,
) -> Result<Vec<X>> {
    run_threads(32, kernel, a, b, len)
}

/// Runs `threads` threads of a kernel on two buffers.
pub(super) fn run_threads<A: DeviceRepr + Copy + 'static, X: DeviceRepr + Copy>(
    threads: usize,
    kernel: &str,
    a: &[A],
    b: &[A],
    len: usize,
) -> Result<Vec<X>> {
    let gpu = gpu();
    let (a, b) = (gpu.device().clone_htod(a)?, gpu.device().clone_htod(b)?);
    let out = gpu.alloc::<X>(len)?;
    let params = Params { a: address(&a, &gpu), b: address(&b, &gpu), out: address(&out, &gpu) };
    // SAFETY: the tests pass as many elements in `a` and `b` as the kernel reads. It writes `len` elements.
    unsafe { gpu.launch("selftest", kernel, Grid::line(1, threads), &params)? };
    guard::check(&gpu)?;
    Ok(gpu.device().clone_dtoh(&out)?[..len].to_vec())
}
