//! Inputs of attention calls, and the cases that the tests run over.

use candle_core::{DType, Device, Layout, Result, Storage, StorageRef, Tensor};

use super::{device, gpu, numbers};
use crate::cuda::address::Address;
use crate::cuda::attention::SelectionLists;
use crate::cuda::candle::strided;
use crate::cuda::kernels::Gpu;
use crate::cuda::tensor::Strided;
use crate::cuda::{Call, Problem, params};
use crate::scheme::Scheme;
use crate::selection::Selection;
use crate::shape::{AttentionShape, Packing};

/// Inputs of an attention call: `tensors` on the GPU, and their `values` on the CPU.
pub(super) struct Inputs {
    pub(super) shape: AttentionShape,
    pub(super) tensors: Vec<Tensor>,
    pub(super) values: Vec<Vec<f32>>,
    pub(super) selection: Option<Selection>,
}

impl Inputs {
    pub(super) fn new(
        lens: (usize, usize),
        heads: (usize, usize),
        d: usize,
        packing: Option<Packing>,
        dtype: DType,
    ) -> Result<Self> {
        let dims = [(1, lens.0, heads.0, d), (1, lens.1, heads.1, d)];
        let shape = AttentionShape::new(dims[0], dims[1], dims[1], true, packing)?;
        let mut tensors = Vec::new();
        for (n, dims) in [dims[0], dims[1], dims[1], dims[0]].into_iter().enumerate() {
            let len = dims.0 * dims.1 * dims.2 * dims.3;
            // Neighbouring values have different magnitudes. The mean is not zero.
            let data: Vec<f32> = numbers(10 + n as u64, len)
                .into_iter()
                .enumerate()
                .map(|(i, x)| ((x % 2001) as f32 / 1000.0 - 1.0) * (1 + i % 7) as f32 + 0.3)
                .collect();
            tensors.push(Tensor::from_vec(data, dims, &Device::Cpu)?.to_dtype(dtype)?.to_device(&device())?);
        }
        let values = tensors
            .iter()
            .map(|t| t.to_dtype(DType::F32)?.flatten_all()?.to_vec1())
            .collect::<Result<_>>()?;
        Ok(Self { shape, tensors, values, selection: None })
    }

    /// Calls `f` with the problem and the output gradient.
    pub(super) fn with<T>(
        &self,
        deterministic: bool,
        f: impl FnOnce(&Problem<'_>, Strided<'_>) -> Result<T>,
    ) -> Result<T> {
        let gpu = gpu();
        let guards: Vec<_> = self.tensors.iter().map(Tensor::storage_and_layout).collect();
        let tensors = guards.iter().map(|guard| on_gpu(guard, &gpu)).collect::<Result<Vec<_>>>()?;
        let &[q, k, v, dout] = tensors.as_slice() else { unreachable!("four tensors") };
        let seen = self.selection.as_ref().map(SelectionLists::new).transpose()?;
        let problem = Problem {
            gpu: &gpu,
            // Also in tests of other schemes: `scheme` only affects the padding of head_dims above 128, which those
            // tests do not use.
            scheme: &Scheme::Unquantized,
            shape: &self.shape,
            softmax_scale: 0.125,
            deterministic,
            q,
            k,
            v,
            selected: seen.as_ref().map(|seen| seen.selected(&gpu)).transpose()?,
            sinks: Address::NULL,
            score_mod: None,
        };
        f(&problem, dout)
    }

    /// Rows of one head of `self.values[n]`, for the tokens of `range`.
    pub(super) fn rows(
        &self,
        n: usize,
        heads: usize,
        head: usize,
        range: std::ops::Range<usize>,
    ) -> Vec<f32> {
        let d = self.shape.head_dim();
        range.flat_map(|t| self.values[n][(t * heads + head) * d..][..d].to_vec()).collect()
    }
}

fn on_gpu<'a>((storage, layout): &'a (StorageRef<'_>, &'a Layout), gpu: &Gpu) -> Result<Strided<'a>> {
    match &**storage {
        Storage::Cuda(storage) => strided((storage, layout), gpu),
        _ => unreachable!("tensors are on the GPU"),
    }
}

/// Lengths and heads of query and key, head_dim, packed documents.
pub(super) type Case = ((usize, usize), (usize, usize), usize, Option<Packing>);

pub(super) fn cases() -> Vec<Case> {
    let packing = Packing::new(vec![0, 1, 70, 70, 200], vec![0, 65, 130, 131, 190]);
    vec![
        ((1, 1), (1, 1), 64, None),
        ((63, 65), (2, 1), 64, None),
        ((130, 128), (2, 2), 128, None),
        ((200, 300), (4, 2), 40, None),
        ((129, 64), (3, 1), 97, None),
        ((200, 190), (2, 1), 64, Some(packing)),
        // 66 tiles of keys: the kernel `mean_of_tiles` loads only 64 at once.
        ((70, 4200), (1, 1), 64, None),
    ]
}

/// The parameters of a forward before the scheme prepares its operands.
pub(super) fn inputs_of<'a>(call: &'a Call<'_>) -> Result<params::Forward<'a>> {
    let Problem { q, k, v, .. } = *call.problem;
    Ok(params::Forward { q: q.view, k: k.view, v: v.view, shape: call.shape(), ..params::Forward::default() })
}
