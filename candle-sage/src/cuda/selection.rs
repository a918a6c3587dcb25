//! The lists of a selection on the GPU, and their inverse.

use candle_core::{Layout, Result, Storage, StorageRef};
use cudarc::driver::CudaSlice;

use super::address::{Address, address, address_at, first_index};
use super::call::Geometry;
use super::kernels::{Gpu, Grid};
use super::params::{self, launch};
use super::plan::SELECTION_BLOCK;
use crate::error::Error;
use crate::selection::{Blocks, Selection};

/// Warps of a thread block of the kernels that invert lists; each warp takes one block of keys.
const WARPS: usize = 4;

/// Checks that the kernels support a selection's blocks.
pub(super) fn check_blocks(blocks: &Blocks) -> Result<()> {
    // Segments and heads are the second and third dimensions of grids, which CUDA limits to 65535.
    const MOST: usize = 65_535;
    if blocks.segments() * blocks.key_heads > MOST {
        return Err(Error::new("a selection has too many segments for one launch")
            .got(format!("{} segments of {} key heads", blocks.segments(), blocks.key_heads))
            .allowed(format!("{MOST} in all"))
            .hint("split the batch")
            .into());
    }
    if (blocks.query, blocks.key) == (SELECTION_BLOCK, SELECTION_BLOCK) {
        return Ok(());
    }
    Err(Error::unsupported("selections on CUDA have blocks of one size")
        .got(format!("{} queries x {} keys", blocks.query, blocks.key))
        .allowed("128 x 128")
        .hint("other sizes run on the CPU")
        .into())
}

/// Lists that start at an address.
pub(super) fn lists_at<'a>(seen: Address<'a>, blocks: &Blocks, stride: usize) -> params::Lists<'a> {
    params::Lists {
        seen,
        stride: stride as i32,
        query_blocks: blocks.rows() as i32,
        key_blocks: blocks.all_key_blocks() as i32,
        ..params::Lists::default()
    }
}

/// The lists of a selection, whose memory it lends.
pub(super) struct Seen<'a> {
    storage: StorageRef<'a>,
    layout: &'a Layout,
    blocks: &'a Blocks,
}

impl<'a> Seen<'a> {
    pub(super) fn new(selection: &'a Selection) -> Result<Self> {
        check_blocks(selection.blocks())?;
        let (storage, layout) = selection.lists().storage_and_layout();
        Ok(Self { storage, layout, blocks: selection.blocks() })
    }

    /// The lists in the form that kernels take.
    pub(super) fn lists(&self, gpu: &Gpu) -> Result<params::Lists<'_>> {
        let (_, _, stride) = self.layout.shape().dims3()?;
        let Storage::Cuda(storage) = &*self.storage else {
            return Err(Error::new("the selection is on another device").into());
        };
        let seen = address_at(storage.as_cuda_slice::<u32>()?, first_index(self.layout), gpu)?;
        Ok(lists_at(seen, self.blocks, stride))
    }
}

/// The lists and their inverse: for each block of keys, the blocks of queries that see it.
pub(super) struct Users<'a> {
    seen: Seen<'a>,
    users: CudaSlice<u64>,
    first_users: CudaSlice<u32>,
}

impl<'a> Users<'a> {
    pub(super) fn new(selection: &'a Selection, gpu: &Gpu) -> Result<Self> {
        let seen = Seen::new(selection)?;
        let lists = seen.lists(gpu)?;
        let blocks = selection.blocks();
        let geometry = Geometry::new(gpu, selection.shape())?;
        let (heads, columns) = (blocks.key_heads, blocks.all_key_blocks());
        let room = heads * blocks.rows() * (lists.stride as usize - 1);
        if room > u32::MAX as usize {
            return Err(Error::new("the lists of a selection are too long")
                .got(format!("{room} blocks in all"))
                .allowed("below 2^32")
                .hint("select fewer blocks, or split the batch")
                .into());
        }
        let users = gpu.alloc::<u64>(room)?;
        let first_users = gpu.alloc::<u32>(heads * (columns + 1))?;
        let counts = gpu.alloc::<u32>(heads * columns)?;
        let params = params::sla2::Users {
            lists,
            users: address(&users, gpu),
            first_users: address(&first_users, gpu),
            counts: address(&counts, gpu),
            shape: geometry.shape(gpu),
        };
        let (_, longest) = geometry.blocks();
        let grid = Grid {
            blocks: (longest.div_ceil(WARPS) as u32, geometry.segment_count() as u32, heads as u32),
            ..Grid::line(1, WARPS as u32 * 32)
        };
        launch(gpu, "count_users", grid, &params)?;
        launch(gpu, "fill_users", grid, &params)?;
        Ok(Self { seen, users, first_users })
    }

    /// The lists and their inverse in the form that kernels take.
    pub(super) fn lists(&self, gpu: &Gpu) -> Result<params::Lists<'_>> {
        let (users, first_users) = (address(&self.users, gpu), address(&self.first_users, gpu));
        Ok(params::Lists { users, first_users, ..self.seen.lists(gpu)? })
    }
}
