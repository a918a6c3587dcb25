//! Guards of allocations in this crate's own tests: memory is filled with 0xff, which is NaN in every float type, and
//! is followed by a canary that no kernel may change.
#![allow(unsafe_code)]

use std::cell::RefCell;

use candle_core::Result;
use cudarc::driver::result;

use super::buffer::CANARY_BYTES;
use super::driver::DriverResult;
use super::kernels::Gpu;

struct Canary {
    /// The address, without the borrow: see [`check`].
    at: u64,
    byte: u8,
    /// Size of the buffer before the canary.
    bytes: usize,
}

thread_local! {
    static CANARIES: RefCell<Vec<Canary>> = const { RefCell::new(Vec::new()) };
}

/// Registers the canary that starts at `at + bytes`, right behind the buffer. Fills the buffer and the canary with
/// 0xff, unless the caller filled them with zeros. Does nothing in a call that only counts memory.
pub(super) fn watch(gpu: &Gpu, at: u64, bytes: usize, zeros: bool) -> Result<()> {
    if gpu.dry {
        return Ok(());
    }
    if !zeros {
        // SAFETY: the allocation contains the buffer and, after it, CANARY_BYTES bytes.
        unsafe { result::memset_d8_async(at, 0xff, bytes + CANARY_BYTES, gpu.stream.cu_stream()) }.w()?;
    }
    let canary = Canary { at: at + bytes as u64, byte: if zeros { 0 } else { 0xff }, bytes };
    CANARIES.with_borrow_mut(|all| all.push(canary));
    Ok(())
}

/// Checks and removes this thread's canaries (the bytes after each buffer). The buffers must not have been freed.
pub(super) fn check(gpu: &Gpu) -> Result<()> {
    gpu.stream.synchronize().w()?;
    for canary in CANARIES.take() {
        let mut bytes = [0u8; CANARY_BYTES];
        // SAFETY: the caller keeps the allocation alive.
        unsafe { result::memcpy_dtoh_sync(&mut bytes, canary.at) }.w()?;
        let touched = bytes.iter().position(|&b| b != canary.byte);
        assert_eq!(touched, None, "a kernel wrote past a buffer of {} bytes", canary.bytes);
    }
    Ok(())
}
