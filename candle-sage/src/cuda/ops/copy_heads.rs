//! Copies of heads on the GPU.

use candle_core::Result;
use candle_core::backend::BackendStorage;

use crate::cuda::compiled::constants::copy_heads::{AT_ONCE, THREADS};
use crate::cuda::compiled::kernel;
use crate::cuda::floats::{Float, Packs, count, elementwise, start};
use crate::cuda::kernels::Gpu;
use crate::cuda::params::{self, launch};
use crate::launch::{Launch, Operand};
use crate::ops::copy_heads::CopyHeads;

fn place<'a>(operand: Operand<'a>, gpu: &Gpu) -> Result<params::Heads<'a>> {
    let strides = operand.1.stride();
    let stride = |dim: usize| strides[dim] as i64;
    Ok(params::Heads { data: start(operand, gpu)?, batch: stride(0), token: stride(1), head: stride(2) })
}

/// Copies `x` to `out`. Both are (batch, token, head, channel) tensors with contiguous channels.
impl Launch<[Operand<'_>; 2], ()> for CopyHeads {
    fn launch(&self, [out, x]: [Operand<'_>; 2]) -> Result<()> {
        let gpu = Gpu::new(out.0.device())?;
        let float = Float::of("copy-heads", out.0)?;
        let (batch, sequence, heads, channels) = out.1.shape().dims4()?;
        // If heads are adjacent in both tensors, they are copied as one wider head.
        let are_adjacent = [x, out].iter().all(|(_, layout)| heads == 1 || layout.stride()[2] == channels);
        let (heads, channels) = if are_adjacent { (1, heads * channels) } else { (heads, channels) };
        let (from, into) = (place(x, &gpu)?, place(out, &gpu)?);
        // The strides of dimensions of extent 1 have no effect.
        let extents = [batch, sequence, heads];
        let strides = [x, out].into_iter().flat_map(|(_, layout)| layout.stride().iter().zip(extents));
        let mut strides: Vec<usize> =
            strides.filter(|(_, extent)| *extent > 1).map(|(stride, _)| *stride).collect();
        strides.push(channels);
        let packs = Packs::of(float, &[from.data, into.data], &strides);
        let params = params::CopyHeads {
            x: from,
            out: into,
            tokens: count("tokens", batch * sequence)?,
            sequence: count("tokens", sequence)?,
            heads: count("heads", heads)?,
            packs: count("channels", channels / packs.elements())?,
        };
        let items = batch * sequence * heads * channels;
        count("elements", items / packs.elements())?;
        let grid = elementwise(items.div_ceil(AT_ONCE), packs, THREADS);
        launch(&gpu, &packs.kernel(kernel!("copy_heads")), grid, &params)
    }
}
