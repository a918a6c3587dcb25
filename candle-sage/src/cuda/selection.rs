//! A selection on the GPU: each query block's list of key blocks, and each key block's list of query blocks.

use candle_core::Result;

use super::address::{Address, address};
use super::buffer::Buffer;
use super::call::{Call, Selected};
use super::compiled::constants::selection::WARPS;
use super::compiled::kernel;
use super::kernels::{Gpu, Grid};
use super::params::{self, launch};
use super::plan::SELECTION_BLOCK;
use crate::error::Error;
use crate::selection::Blocks;

/// Checks that the kernels support a selection's blocks.
pub(super) fn check_blocks(blocks: &Blocks) -> Result<()> {
    // The product of segments and key heads is the second dimension of some grids, which CUDA limits to 65535.
    const MOST: usize = 65_535;
    if blocks.segments() * blocks.key_heads > MOST {
        return Err(Error::new("a selection has too many batch entries or documents for one launch")
            .got(format!("{} batch entries or documents x {} key heads", blocks.segments(), blocks.key_heads))
            .allowed(format!("a product up to {MOST}"))
            .hint("split the batch")
            .into());
    }
    if (blocks.query, blocks.key) == (SELECTION_BLOCK, SELECTION_BLOCK) {
        return Ok(());
    }
    Err(Error::unsupported("selections on CUDA support one block size")
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

/// The maximum number of query blocks of a part (see [`ListSplits`]) is never below this number, because each part
/// reads the keys again. In this crate's tests the number is 1, so that small cases split lists.
const LEAST_USERS: usize = if cfg!(test) { 1 } else { 8 };
/// [`ListSplits::shares`] divided by the number of multiprocessors.
const PARTS_OF_A_SHARE: usize = 8;

/// Each key block has a list of the query blocks that select it. The longest lists are split into parts for separate
/// thread blocks. These add to the key block's dK and dV in f32, in an undefined order. The device decides how to
/// split, because only it knows the lengths of the lists.
struct ListSplits {
    /// The divisor in the maximum number of query blocks of a part: max(LEAST_USERS, pairs / shares), where `pairs` is
    /// the number of selected (query block, key block) pairs.
    shares: usize,
    /// Maximum number of parts of all lists together, not counting the first part of each list.
    most_parts: usize,
    /// Maximum number of key blocks whose list of query blocks is split among thread blocks. `sums` has room for dK and
    /// dV of this many key blocks.
    most_slots: usize,
    parts: Buffer<u32>,
    lists: Buffer<u64>,
    sums: Buffer<f32>,
    arrivals: Buffer<u32>,
}

impl ListSplits {
    /// Allocates for `lists` lists of at most `longest` query blocks each. Keys have `d` channels. `None` if no list
    /// can be long enough to split.
    fn new(gpu: &Gpu, lists: usize, longest: usize, d: usize) -> Result<Option<Self>> {
        if longest <= 2 * LEAST_USERS {
            return Ok(None);
        }
        let shares = gpu.multiprocessors * PARTS_OF_A_SHARE;
        let most_slots = lists.min(gpu.multiprocessors);
        let most_parts = shares.min(most_slots * (longest.div_ceil(LEAST_USERS) - 1));
        Ok(Some(Self {
            shares,
            most_parts,
            most_slots,
            parts: gpu.alloc_zeros(most_parts * PART_WORDS)?,
            lists: gpu.alloc(lists)?,
            sums: gpu.alloc(most_slots * slot_floats(d))?,
            arrivals: gpu.alloc(most_slots * slot_pieces(d))?,
        }))
    }

    fn params(&self, gpu: &Gpu) -> params::ListSplits<'_> {
        params::ListSplits {
            parts: address(&self.parts, gpu),
            lists: address(&self.lists, gpu),
            sums: address(&self.sums, gpu),
            arrivals: address(&self.arrivals, gpu),
        }
    }
}

/// Size of a [`params::Part`] in 32-bit words.
const PART_WORDS: usize = size_of::<params::Part>() / 4;

/// Number of elements of [`ListSplits::sums`] for dK and dV of one key block.
fn slot_floats(d: usize) -> usize {
    slot_pieces(d) * 16 * d.min(128)
}

/// Number of pieces into which [`ListSplits::sums`] divides dK and dV of a key block. A piece is dK or dV of one warp's
/// 16 keys, and has at most 128 channels.
fn slot_pieces(d: usize) -> usize {
    2 * SELECTION_BLOCK / 16 * d.div_ceil(128)
}

/// A selection's lists of key blocks, and their inverse: for each block of keys, the blocks of queries that see it.
pub(super) struct InvertedLists<'a> {
    lists: params::Lists<'a>,
    users: Buffer<u64>,
    first_users: Buffer<u32>,
    cuts: Option<ListSplits>,
}

impl<'a> InvertedLists<'a> {
    /// `cut`: whether long lists of query blocks may be split ([`ListSplits`]); `Some` contains the padded head_dim.
    pub(super) fn new(call: &Call<'_>, selected: Selected<'a>, cut: Option<usize>) -> Result<Self> {
        let (gpu, geometry, Selected { lists, blocks }) = (call.gpu, &call.geometry, selected);
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
        let used = gpu.alloc_zeros::<u32>(3)?;
        let (longest_users, longest) = geometry.blocks();
        let cuts = match cut {
            Some(d) => ListSplits::new(gpu, heads * columns, longest_users, d)?,
            None => None,
        };
        let params = params::InvertedLists {
            lists,
            users: address(&users, gpu),
            first_users: address(&first_users, gpu),
            counts: address(&counts, gpu),
            used: address(&used, gpu),
            shape: geometry.shape(gpu),
            cuts: cuts.as_ref().map(|cuts| cuts.params(gpu)).unwrap_or_default(),
            least_users: LEAST_USERS as u32,
            shares: cuts.as_ref().map_or(0, |cuts| cuts.shares) as i32,
            most_slots: cuts.as_ref().map_or(0, |cuts| cuts.most_slots) as i32,
            most_parts: cuts.as_ref().map_or(0, |cuts| cuts.most_parts) as i32,
            slot_floats: cut.map_or(0, slot_floats) as i32,
            slot_pieces: cut.map_or(0, slot_pieces) as i32,
        };
        let grid = Grid {
            blocks: (longest.div_ceil(WARPS) as u32, geometry.segment_count() as u32, heads as u32),
            ..Grid::line(1, WARPS * 32)
        };
        launch(gpu, kernel!("count_users"), grid, &params)?;
        launch(gpu, kernel!("fill_users"), grid, &params)?;
        // Checks the canaries before this function frees `counts` and `used`.
        #[cfg(test)]
        super::guard::check(gpu)?;
        Ok(Self { lists, users, first_users, cuts })
    }

    pub(super) fn lists(&self, gpu: &Gpu) -> params::Lists<'_> {
        let (users, first_users) = (address(&self.users, gpu), address(&self.first_users, gpu));
        params::Lists { users, first_users, ..self.lists }
    }

    pub(super) fn cuts(&self, gpu: &Gpu) -> params::ListSplits<'_> {
        self.cuts.as_ref().map(|cuts| cuts.params(gpu)).unwrap_or_default()
    }
    /// An upper limit for the total number of parts of all lists ([`ListSplits`]), not counting the first part of each
    /// list. Each counted part needs additional thread blocks.
    pub(super) fn more_blocks(&self) -> usize {
        self.cuts.as_ref().map_or(0, |cuts| cuts.most_parts)
    }
}
