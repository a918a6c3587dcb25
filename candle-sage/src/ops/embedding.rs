//! Rows of a table by id, with a deterministic, parallel backward.

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CustomOp2, Layout, Result, Shape, Tensor};
use rayon::prelude::*;

use super::support::{cpu_storage, f32_tensor, f32_values, ids, shape_error, with_f32};
use crate::cpu::view::to_storage;
use crate::error::Error;

const NAME: &str = "embedding";

/// `y[..] = table[ids[..]]`.
///
/// `table` is (rows, width) in f32, f16 or bf16, `ids` any shape in u8, u32 or i64; the output is
/// (ids' shape.., width) in the table's type. The table receives a gradient: each row the sum, in
/// f32 and in the order of the ids, of what came back for it.
///
/// # Errors
/// When an id is not below the number of rows, or the types are not supported.
pub fn embedding(table: &Tensor, ids: &Tensor) -> Result<Tensor> {
    let (_, width) = table.dims2().map_err(|_| {
        shape_error("embedding: the table is not a matrix", table.dims(), "(rows, width)", "ids come second")
    })?;
    let shape = [ids.dims(), &[width]].concat();
    table.apply_op2(ids, Embedding)?.reshape(shape)
}

struct Embedding;

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
        let (values, ids) = (f32_values(NAME, table, table_layout)?, ids(NAME, id, id_layout)?);
        let mut out = Vec::with_capacity(ids.len() * width);
        for &id in &ids {
            if id >= rows {
                return Err(Error::new("embedding: an id is not in the table")
                    .got(id)
                    .allowed(format!("0 to {}", rows - 1))
                    .hint("does the tokenizer belong to this model?")
                    .into());
            }
            out.extend_from_slice(&values[id * width..(id + 1) * width]);
        }
        let dtype = table.dtype();
        Ok((to_storage(out, dtype)?, Shape::from((ids.len(), width))))
    }

    fn bwd(
        &self,
        table: &Tensor,
        id: &Tensor,
        _out: &Tensor,
        dout: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let (rows, width) = table.dims2()?;
        let ids = {
            let (storage, layout) = id.storage_and_layout();
            ids(NAME, cpu_storage(&storage, NAME)?, layout)?
        };
        // Each task owns a span of rows and looks through the places of all of them in order.
        let mut places: Vec<(usize, usize)> = ids.into_iter().enumerate().map(|(n, id)| (id, n)).collect();
        places.sort_unstable();
        let grad = with_f32(NAME, [dout], |[dout]| {
            let mut grad = vec![0.0; rows * width];
            grad.par_chunks_mut(width).enumerate().with_min_len(64).for_each(|(row, grad)| {
                let first = places.partition_point(|&(id, _)| id < row);
                for &(_, n) in places[first..].iter().take_while(|&&(id, _)| id == row) {
                    grad.iter_mut().zip(&dout[n * width..(n + 1) * width]).for_each(|(g, x)| *g += x);
                }
            });
            Ok(grad)
        })?;
        Ok((Some(f32_tensor(grad, (rows, width), table.dtype())?), None))
    }
}
