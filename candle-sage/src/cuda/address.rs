//! Addresses in kernel parameters. Each address borrows the memory that it points to.
#![allow(unsafe_code)]

use std::marker::PhantomData;

#[cfg(feature = "cuda")]
use candle_core::{Layout, Result};
use cudarc::driver::DevicePtr;

use super::kernels::Gpu;
#[cfg(feature = "cuda")]
use crate::error::{Error, REPORT};

/// An address on the device: null, or inside an allocation that is borrowed for `'a`. Only this module creates
/// addresses: from a borrowed allocation, or from memory of another library for which the caller vouches
/// ([`Address::lent`]). A launch cannot use the address of freed memory: the compiler rejects a `drop` of the
/// allocation before the launch.
///
/// The borrow is shared even if a kernel writes. This is sound, because the host has no reference to the elements, and
/// the kernels of one stream run one after the other. A `&mut` borrow is not possible: ops that add in place write to
/// tensors that candle passes as `&CudaStorage`, and one buffer is often an input and an output of the same launch.
#[repr(transparent)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Address<'a>(u64, PhantomData<&'a ()>);

impl Address<'_> {
    pub(super) const NULL: Self = Self(0, PhantomData);

    /// An address in memory of another library.
    ///
    /// # Safety
    /// The memory must be alive as long as the address.
    pub(super) unsafe fn lent(number: u64) -> Self {
        Self(number, PhantomData)
    }

    /// The address as a number, for functions that take a plain integer. The number does not borrow the memory.
    pub(super) fn number(self) -> u64 {
        self.0
    }

    /// Whether the address is a multiple of `bytes`; true for null.
    pub(super) fn is_multiple_of(self, bytes: u64) -> bool {
        self.0.is_multiple_of(bytes)
    }
}

impl Default for Address<'_> {
    fn default() -> Self {
        Self::NULL
    }
}

/// The address of an allocation, ours or candle's, for work on the device's stream.
pub(super) fn address<'a, T>(of: &'a impl DevicePtr<T>, gpu: &Gpu) -> Address<'a> {
    Address(of.device_ptr(&gpu.stream).0, PhantomData)
}

/// The address of an optional allocation, or null.
pub(super) fn address_if_any<'a, T: 'a>(of: Option<&'a impl DevicePtr<T>>, gpu: &Gpu) -> Address<'a> {
    of.map_or(Address::NULL, |of| address(of, gpu))
}

/// The address of an element, or of the allocation's end.
///
/// # Errors
/// When the allocation has fewer than `index` elements.
#[cfg(feature = "cuda")]
pub(super) fn address_at<'a, T>(of: &'a impl DevicePtr<T>, index: usize, gpu: &Gpu) -> Result<Address<'a>> {
    if index > of.len() {
        return Err(Error::new("an element is outside its buffer")
            .got(format!("element {index}"))
            .allowed(format!("elements 0 to {}", of.len()))
            .hint(REPORT)
            .into());
    }
    Ok(Address(address(of, gpu).0 + (index * size_of::<T>()) as u64, PhantomData))
}

/// The hint of [`check_vectors`] for vectors that a caller can pad.
#[cfg(feature = "cuda")]
pub(super) const PAD: &str =
    "pad the tensors with zeros; `force_contiguous()` makes an aligned copy of a view";

/// Checks that vectors of `len` elements start at multiples of 16 bytes and have a multiple of `unit` elements.
///
/// # Errors
/// When they do not; `hint` says what helps.
#[cfg(feature = "cuda")]
pub(super) fn check_vectors(
    op: &str,
    starts: &[Address<'_>],
    len: usize,
    unit: usize,
    hint: &str,
) -> Result<()> {
    let aligned = starts.iter().all(|start| start.is_multiple_of(16));
    if aligned && len.is_multiple_of(unit) {
        return Ok(());
    }
    Err(Error::unsupported(format!("{op} on CUDA does not support this alignment or number of elements"))
        .got(format!("{len} elements, {}", if aligned { "aligned" } else { "not aligned" }))
        .allowed(format!("tensors aligned to 16 bytes, a multiple of {unit} elements"))
        .hint(hint)
        .into())
}

/// The index of a tensor's first element in its memory. The offset of a tensor without elements may be after the end of
/// the memory; no kernel reads such a tensor, so the index is 0.
#[cfg(feature = "cuda")]
pub(super) fn first_index(layout: &Layout) -> usize {
    if layout.shape().elem_count() == 0 { 0 } else { layout.start_offset() }
}

#[cfg(all(test, feature = "cuda"))]
mod tests {
    use super::*;

    #[test]
    fn a_tensor_without_elements_starts_inside_its_memory() -> Result<()> {
        let all = Layout::contiguous((2, 3));
        assert_eq!(first_index(&all.narrow(0, 1, 1)?.narrow(1, 2, 1)?), 5);
        let none = all.narrow(0, 2, 0)?.narrow(1, 3, 0)?;
        assert_eq!((none.start_offset(), first_index(&none)), (9, 0));
        Ok(())
    }
}
