//! Embedding: looks up the rows of a table, with a deterministic, parallel backward.

use std::sync::OnceLock;

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CudaStorage, CustomOp2, Layout, Result, Shape, Tensor};

use super::support::{
    cpu_storage, cuda_tensor, f32_tensor, ids, run_twice, shape_error, shapes_of, supported, with_cuda,
    with_f32,
};
use crate::cpu::ops::embedding::add_rows;
use crate::dtype::{Checked, unsupported_dtype};
use crate::error::{Error, REPORT};
use crate::launch::{Backward, Launch};

const NAME: &str = "embedding";

/// `y[..] = table[ids[..]]`.
///
/// `table` is (rows, width) in f32, f16 or bf16, `ids` has any shape, in u8, u32 or i64; the output is (ids' shape..,
/// width) in the table's type. The table receives a gradient: row `id` is the f32 sum of the output's gradients at all
/// occurrences of `id`, in an order that depends only on `ids`. On a GPU the call waits until the ids are checked.
///
/// ```
/// use candle_core::{Device, Tensor, Var};
/// use candle_sage::ops::embedding;
///
/// let table = Var::new(&[[0f32, 1.], [2., 3.], [4., 5.]], &Device::Cpu)?;
/// let ids = Tensor::new(&[2u32, 0, 2], &Device::Cpu)?;
/// let rows = embedding(&table, &ids)?;
/// assert_eq!(rows.to_vec2::<f32>()?, [[4., 5.], [0., 1.], [4., 5.]]);
/// let gradients = rows.sum_all()?.backward()?;
/// assert_eq!(gradients.get(&table).unwrap().to_vec2::<f32>()?, [[1., 1.], [0., 0.], [2., 2.]]);
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # Errors
/// When an id is not below the number of rows, or the types are not supported.
pub fn embedding(table: &Tensor, ids: &Tensor) -> Result<Tensor> {
    let shape = check(table, ids)?;
    table.apply_op2(ids, Embedding::default())?.reshape(shape)
}

/// [`embedding`] without a gradient, for training loops that do not use candle's graph. On a GPU this function does not
/// wait for the device: if an id is not in the table, the id's row of the output is NaN.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_sage::ops::embedding_forward;
///
/// let table = Tensor::new(&[[0f32, 1.], [2., 3.], [4., 5.]], &Device::Cpu)?;
/// // A batch of two sequences of one token.
/// let ids = Tensor::new(&[[2u32], [1]], &Device::Cpu)?;
/// let rows = embedding_forward(&table, &ids)?;
/// assert_eq!(rows.to_vec3::<f32>()?, [[[4., 5.]], [[2., 3.]]]);
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # Errors
/// As [`embedding`]; on a GPU an id that is not in the table is not an error.
pub fn embedding_forward(table: &Tensor, ids: &Tensor) -> Result<Tensor> {
    let shape = check(table, ids)?;
    if table.device().is_cuda() {
        let out = with_cuda(NAME, [table, ids], |operands| Rows.launch(operands))?;
        return Ok(cuda_tensor(out, shape));
    }
    table.apply_op2_no_bwd(ids, &Embedding::default())?.reshape(shape)
}

/// Returns the output's shape.
fn check(table: &Tensor, ids: &Tensor) -> Result<Vec<usize>> {
    let &[rows, width] = table.dims() else {
        return Err(shape_error(
            "embedding: the table is not a matrix",
            shapes_of(&[("table", table)]),
            "(rows, width)",
            "the arguments are (table, ids)",
        ));
    };
    if rows == 0 || width == 0 {
        return Err(shape_error(
            "embedding: the table is empty",
            shapes_of(&[("table", table)]),
            "at least one row and one column",
            "the arguments are (table, ids)",
        ));
    }
    supported(NAME, &[table, ids])?;
    Ok([ids.dims(), &[width]].concat())
}

/// The op of one call of [`embedding`]. On a GPU, the op keeps the ids for the backward.
#[derive(Default)]
pub(crate) struct Embedding {
    saved: OnceLock<Backward<1, CudaStorage>>,
}

/// The op that computes [`embedding_forward`] on a GPU. It does not check ids.
pub(crate) struct Rows;

fn not_in_the_table(id: i64, rows: usize) -> Error {
    Error::new("embedding: an id is not in the table")
        .got(id)
        .allowed(format!("0 to {}", rows - 1))
        .hint("check that the tokenizer belongs to this model")
}

impl CustomOp2 for Embedding {
    fn name(&self) -> &'static str {
        NAME
    }

    fn cpu_fwd(
        &self,
        table: &CpuStorage,
        table_layout: &Layout,
        id: &CpuStorage,
        id_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let (rows, width) = table_layout.shape().dims2()?;
        let ids = ids(NAME, id, id_layout)?;
        if let Some(id) = ids.iter().find(|id| !(0..rows as i64).contains(*id)) {
            return Err(not_in_the_table(*id, rows).into());
        }
        // Reads only the table's rows that `ids` names. The table may have any strides, and is never copied.
        let picked: Vec<usize> = ids
            .iter()
            .map(|&id| table_layout.start_offset() + id as usize * table_layout.stride()[0])
            .collect();
        let step = table_layout.stride()[1];
        let places = picked.iter().flat_map(|start| (0..width).map(move |c| start + c * step));
        let out = match table {
            CpuStorage::F32(values) => CpuStorage::F32(places.map(|at| values[at]).collect()),
            CpuStorage::F16(values) => CpuStorage::F16(places.map(|at| values[at]).collect()),
            CpuStorage::BF16(values) => CpuStorage::BF16(places.map(|at| values[at]).collect()),
            other => return Err(unsupported_dtype(NAME, other.dtype()).into()),
        };
        Ok((out, Shape::from((ids.len(), width))))
    }

    fn cuda_fwd(
        &self,
        table: &CudaStorage,
        table_layout: &Layout,
        id: &CudaStorage,
        id_layout: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        let (rows, width) = table_layout.shape().dims2()?;
        let (out, saved, Checked { bad, .. }) = self.launch([(table, table_layout), (id, id_layout)])?;
        if let Some(id) = bad {
            return Err(not_in_the_table(id, rows).into());
        }
        self.saved.set(saved).map_err(run_twice)?;
        Ok((out, Shape::from((id_layout.shape().elem_count(), width))))
    }

    fn bwd(
        &self,
        table: &Tensor,
        id: &Tensor,
        _out: &Tensor,
        dout: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let (rows, width) = table.dims2()?;
        if dout.device().is_cuda() {
            let saved = self.saved.get().ok_or_else(|| {
                Error::new("the backward of embedding needs a forward that kept its state").hint(REPORT)
            })?;
            let grad = with_cuda(NAME, [dout], |operands| saved.launch(operands))?;
            return Ok((Some(cuda_tensor(grad, (rows, width))), None));
        }
        let grad = Gradient { rows }.on_cpu(id, dout, width)?;
        Ok((Some(f32_tensor(grad, (rows, width), table.dtype())?), None))
    }
}

/// The gradient of [`embedding`]'s table, computed from the gradient `dout` of its output. The result is (rows, width),
/// in the type of `dout`. Ids that are not in the table are ignored. For training loops that do not use candle's graph.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_sage::ops::embedding_backward;
///
/// let ids = Tensor::new(&[2u32, 0, 2], &Device::Cpu)?;
/// let dout = Tensor::new(&[[1f32, 2.], [10., 20.], [100., 200.]], &Device::Cpu)?;
/// let dtable = embedding_backward(&ids, &dout, 3)?;
/// assert_eq!(dtable.to_vec2::<f32>()?, [[10., 20.], [0., 0.], [101., 202.]]);
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # Errors
/// When `dout` does not have the shape of the output.
pub fn embedding_backward(ids: &Tensor, dout: &Tensor, rows: usize) -> Result<Tensor> {
    let width = dout.dims().last().copied().unwrap_or(0);
    if width == 0 || dout.dims()[..dout.rank() - 1] != *ids.dims() {
        return Err(shape_error(
            "embedding: the output's gradient does not match the ids",
            shapes_of(&[("dout", dout), ("ids", ids)]),
            "the shape of `ids`, followed by a width of at least 1",
            "`dout` has the shape of the output",
        ));
    }
    supported(NAME, &[dout, ids])?;
    let gradient = Gradient { rows };
    if dout.device().is_cuda() {
        let grad = with_cuda(NAME, [ids, dout], |operands| gradient.launch(operands))?;
        return Ok(cuda_tensor(grad, (rows, width)));
    }
    f32_tensor(gradient.on_cpu(ids, dout, width)?, (rows, width), dout.dtype())
}

pub(crate) struct Gradient {
    pub(crate) rows: usize,
}

impl Gradient {
    fn on_cpu(&self, id: &Tensor, dout: &Tensor, width: usize) -> Result<Vec<f32>> {
        let ids = {
            let (storage, layout) = id.storage_and_layout();
            ids(NAME, cpu_storage(&storage, NAME)?, layout)?
        };
        with_f32(NAME, [dout], |[dout]| Ok(add_rows(ids, dout, self.rows, width)))
    }
}
