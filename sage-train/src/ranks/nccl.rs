//! The transport for ranks on GPUs. It uses NCCL's sends and receives, and optionally NCCL collectives that run on the
//! GPUs' copy engines. The transport only moves data; it never sums over ranks.
//!
//! The library is loaded at run time and not linked, so that a program with GPU kernels starts on machines without
//! NCCL. Transfers run on a separate stream, of high priority. A transfer starts after the work that candle's stream
//! has been given so far; `wait` makes candle's stream wait for the transfer. The separate stream is created through
//! the driver and not through cudarc, which records events for every tensor as soon as a context has two streams.
#![allow(unsafe_code)]

mod engines;
mod library;

use std::ffi::{c_int, c_void};
use std::fmt::Debug;
use std::sync::atomic::{AtomicU64, Ordering};

use candle_core::cuda_backend::WrapErr;
use candle_core::{CudaDevice, CudaStorage, DType, Device, Result, Storage, Tensor};
use candle_sage::Error;
use cudarc::driver::result::{event, stream};
use cudarc::driver::sys::{self, CUevent, CUevent_flags, CUevent_wait_flags};
use cudarc::driver::{CudaSlice, DevicePtr};
use engines::Engines;
use half::{bf16, f16};
use library::{BYTES, Collectives, Communicator, Functions, Id, Stream};

use super::ControlChannel;
use super::mesh::{Mesh, Rank};
use super::transport::{CopyEngines, Swap, Transfer, Transport};
use crate::{during, hex};

/// Number of events that mark the ends of transfers. They are reused in turn: a wait for a transfer whose event was
/// reused waits for the later transfer.
const TURNS: usize = 256;

const WAIT: CUevent_wait_flags = CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;

/// An NCCL communicator of all ranks.
pub(super) struct Nccl {
    rank: Rank,
    device: CudaDevice,
    functions: Functions,
    stream: Stream,
    /// Event that marks the point in candle's stream at which a transfer was started.
    ready: CUevent,
    /// Events that mark the ends of transfers. Successive transfers use them in turn.
    came: [CUevent; TURNS],
    transfers: AtomicU64,
    /// The communicator is never destroyed: destruction is collective, so a rank that exits because of an error would
    /// wait for the other ranks.
    communicator: Communicator,
    /// Collectives on the copy engines, among the ranks of the node; `None` if transfers do not use copy engines.
    engines: Option<Engines>,
}

impl Debug for Nccl {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Nccl").field("rank", &self.rank).finish_non_exhaustive()
    }
}

impl Nccl {
    /// Creates the communicators. All ranks must call this.
    pub(super) fn connect(
        channel: &ControlChannel,
        mesh: Mesh,
        wanted: CopyEngines,
        device: &CudaDevice,
    ) -> candle_sage::Result<Self> {
        let rank = channel.rank();
        let (functions, collectives) = Functions::load()?;
        let mut version = 0;
        // SAFETY: the function writes one int to the given address.
        functions.check("report its version", unsafe { (functions.version)(&raw mut version) })?;
        channel.agree("NCCL", &format!("version {version}"))?;
        check_gpus(channel, device)?;
        device.cuda_stream().context().bind_to_thread().map_err(during("cannot use the GPU"))?;
        let id = share_id(channel, &functions, 0)?;
        let mut communicator = std::ptr::null_mut();
        // SAFETY: the id is rank 0's, the GPU is bound to this thread, and the function writes to a valid
        // address.
        let made = unsafe {
            (functions.init_rank)(&raw mut communicator, rank.of as c_int, id, rank.index as c_int)
        };
        functions.check("connect the GPUs", made)?;
        let engines = connect_engines(channel, &functions, (version, collectives), mesh, wanted)?;
        let failed = || "cannot make a stream for the ranks";
        let (_, high) = stream::get_priority_range().map_err(during(failed()))?;
        let event = || event::create(CUevent_flags::CU_EVENT_DISABLE_TIMING).map_err(during(failed()));
        let mut came = [std::ptr::null_mut(); TURNS];
        for one in &mut came {
            *one = event()?;
        }
        Ok(Self {
            rank,
            device: device.clone(),
            functions,
            stream: stream::create_with_priority(stream::StreamKind::NonBlocking, high)
                .map_err(during(failed()))?,
            ready: event()?,
            came,
            transfers: AtomicU64::new(0),
            communicator,
            engines,
        })
    }

    /// Enqueues a transfer that starts after all work on candle's stream so far.
    fn transfer(&self, launch: impl FnOnce(Stream) -> Result<()>) -> Result<Transfer> {
        let compute = self.device.cuda_stream().cu_stream();
        let number = self.transfers.fetch_add(1, Ordering::Relaxed);
        // SAFETY: streams and events live as long as `self`.
        unsafe {
            event::record(self.ready, compute).w()?;
            stream::wait_event(self.stream, self.ready, WAIT).w()?;
            launch(self.stream)?;
            event::record(self.came[number as usize % TURNS], self.stream).w()?;
        }
        Ok(Transfer(number))
    }

    /// The address and the size in bytes of a contiguous tensor.
    fn place(&self, tensor: &Tensor) -> Result<(u64, usize)> {
        let (storage, layout) = tensor.storage_and_layout();
        let Storage::Cuda(storage) = &*storage else {
            candle_core::bail!("ranks exchange tensors of their GPU")
        };
        if !layout.is_contiguous() {
            candle_core::bail!("ranks exchange tensors without gaps");
        }
        let size = tensor.dtype().size_in_bytes();
        let base = match tensor.dtype() {
            DType::F64 => self.address::<f64>(storage)?,
            DType::F32 => self.address::<f32>(storage)?,
            DType::BF16 => self.address::<bf16>(storage)?,
            DType::F16 => self.address::<f16>(storage)?,
            DType::U8 => self.address::<u8>(storage)?,
            other => candle_core::bail!("ranks do not exchange {other:?}"),
        };
        Ok((base + (layout.start_offset() * size) as u64, tensor.elem_count() * size))
    }

    fn address<T: candle_core::cuda_backend::CudaDType>(&self, storage: &CudaStorage) -> Result<u64> {
        let slice: &CudaSlice<T> = storage.as_cuda_slice::<T>()?;
        Ok(slice.device_ptr(&self.device.cuda_stream()).0)
    }

    fn check(&self, what: &str, code: c_int) -> Result<()> {
        Ok(self.functions.check(what, code)?)
    }

    /// Launches a collective that the GPUs' copy engines perform. Returns `None` and launches nothing if `self.engines`
    /// is `None`, or if the memory of a tensor is not registered with NCCL. All ranks register the same tensors, so
    /// either all ranks launch the collective or no rank does.
    fn collective(
        &self,
        tensors: [&Tensor; 2],
        launch: impl FnOnce(&Engines, [(u64, usize); 2], Stream) -> c_int,
    ) -> Result<Option<Transfer>> {
        let Some(engines) = &self.engines else { return Ok(None) };
        let places = [self.place(tensors[0])?, self.place(tensors[1])?];
        if !places.iter().all(|place| engines.hold(*place)) {
            return Ok(None);
        }
        let launch = |stream| self.check("exchange", launch(engines, places, stream));
        self.transfer(launch).map(Some)
    }
}

impl Transport for Nccl {
    fn has_engines(&self) -> bool {
        self.engines.is_some()
    }

    fn zeros(&self, len: usize, dtype: DType, device: &Device) -> Result<Tensor> {
        match &self.engines {
            Some(engines) => engines.zeros(&self.functions, len, dtype, device),
            None => Tensor::zeros(len, dtype, device),
        }
    }

    fn all_to_all(&self, from: &Tensor, into: &Tensor, of: usize) -> Result<Option<Transfer>> {
        self.collective([from, into], |engines, [(from, bytes), (into, _)], stream| {
            // SAFETY: both tensors are registered with NCCL; the caller has checked their sizes and keeps them alive.
            unsafe { engines.all_to_all(from, into, bytes / of, stream) }
        })
    }

    fn all_gather(&self, part: &Tensor, into: &Tensor) -> Result<Option<Transfer>> {
        self.collective([part, into], |engines, [(part, bytes), (into, _)], stream| {
            // SAFETY: both tensors are registered with NCCL; the caller has checked their sizes and keeps them alive.
            unsafe { engines.all_gather(part, into, bytes, stream) }
        })
    }

    /// All-gathers with `--copy-engines off` also call this: on NVLink it is a fifth faster than NCCL's all-gather.
    fn swap(&self, swaps: &[Swap]) -> Result<Transfer> {
        let places = |tensors: &[Tensor]| tensors.iter().map(|x| self.place(x)).collect::<Result<Vec<_>>>();
        let swaps =
            swaps.iter().map(|swap| Ok((places(&swap.sent)?, places(&swap.comes)?, swap.peer as c_int)));
        let swaps = swaps.collect::<Result<Vec<_>>>()?;
        let Functions { group_start, group_end, send, receive, .. } = &self.functions;
        // SAFETY: the addresses are of tensors that the caller keeps until it has waited for the transfer.
        self.transfer(|stream| unsafe {
            self.check("begin a transfer", group_start())?;
            // The messages between two ranks arrive in the order in which they were sent.
            for (sent, comes, peer) in swaps {
                for (at, len) in sent {
                    let at = at as *const c_void;
                    self.check("send", send(at, len, BYTES, peer, self.communicator, stream))?;
                }
                for (at, len) in comes {
                    let at = at as *mut c_void;
                    self.check("receive", receive(at, len, BYTES, peer, self.communicator, stream))?;
                }
            }
            self.check("exchange", group_end())
        })
    }

    fn wait(&self, Transfer(number): Transfer) -> Result<()> {
        let compute = self.device.cuda_stream().cu_stream();
        // If a later transfer has already reused the event, the wait is for the later transfer. All transfers use one
        // stream, so the later transfer ends after this one.
        // SAFETY: streams and events live as long as `self`.
        unsafe { stream::wait_event(compute, self.came[number as usize % TURNS], WAIT).w() }
    }
}

/// Makes an id on every rank whose index is a multiple of `every`, or only on rank 0 if `every` is 0. Returns the id
/// that this rank made, or else the id of the nearest lower rank that made one.
fn share_id(channel: &ControlChannel, functions: &Functions, every: usize) -> candle_sage::Result<Id> {
    let (mut id, mut answer) = (Id([0; 128]), String::new());
    let rank = channel.rank().index;
    let maker = rank.checked_rem(every).map_or(0, |after| rank - after);
    if rank == maker {
        // SAFETY: the function writes 128 bytes to `id`, which has this size.
        functions.check("make an id", unsafe { (functions.unique_id)(&raw mut id) })?;
        answer = hex(&id.0);
    }
    let answer = channel.share("NCCL's id", &answer).swap_remove(maker);
    for (byte, digits) in id.0.iter_mut().zip(answer.as_bytes().chunks(2)) {
        let digits = std::str::from_utf8(digits).unwrap_or_default();
        *byte =
            u8::from_str_radix(digits, 16).map_err(during(format!("rank {maker}'s NCCL id is invalid")))?;
    }
    Ok(id)
}

/// Creates a communicator that uses copy engines, for the ranks of this node.
fn connect_engines(
    channel: &ControlChannel,
    functions: &Functions,
    (version, collectives): (c_int, Option<Collectives>),
    mesh: Mesh,
    wanted: CopyEngines,
) -> candle_sage::Result<Option<Engines>> {
    if wanted == CopyEngines::Off || mesh.shard.of == 1 {
        return Ok(None);
    }
    let without = |got: String, hint: &str| match wanted {
        CopyEngines::On => Err(Error::new("NCCL cannot use the copy engines of these GPUs")
            .got(got)
            .allowed("NCCL 2.28 or later, a driver for CUDA 12.5 or later, GPUs with peer access")
            .hint(hint)),
        _ => Ok(None),
    };
    // Ranks may differ in driver and environment: if one rank lacks support, no rank uses copy engines.
    let lacks = match (driver_version(), std::env::var("NCCL_CTA_POLICY")) {
        _ if collectives.is_none() => {
            format!("NCCL {}.{}.{}", version / 10_000, version / 100 % 100, version % 100)
        }
        (driver, _) if driver < OLDEST_DRIVER => {
            format!("a driver for CUDA {}.{}", driver / 1000, driver % 1000 / 10)
        }
        (_, Ok(policy)) => format!("NCCL_CTA_POLICY={policy}, which overrides --copy-engines"),
        _ => String::new(),
    };
    let lacking = channel.share("copy engines", &lacks).into_iter().find(|lacks| !lacks.is_empty());
    let collectives = match (lacking, collectives) {
        (None, Some(collectives)) => collectives,
        (lacking, _) => {
            return without(
                lacking.unwrap_or_default(),
                &format!(
                    "install a newer driver, unset NCCL_CTA_POLICY, set {} to a newer libnccl.so.2, or leave \
                     --copy-engines out",
                    library::PATH
                ),
            );
        }
    };
    let id = share_id(channel, functions, mesh.shard.of)?;
    let engines = Engines::connect(collectives, functions, id, mesh.shard)?;
    let reach = engines.allocate(functions, 1)?.is_some();
    let all = channel.share("shared memory", if reach { "yes" } else { "no" });
    match all.iter().position(|answer| answer != "yes") {
        None => Ok(Some(engines)),
        Some(rank) => without(
            format!("the GPU of rank {rank}, which shares no memory with other GPUs"),
            "unset NCCL_WIN_ENABLE=0 and NCCL_CUMEM_ENABLE=0, or leave --copy-engines out",
        ),
    }
}

/// The oldest CUDA version with which NCCL has collectives on the copy engines.
const OLDEST_DRIVER: c_int = 12_050;

/// The CUDA version of the driver, or 0 if it cannot be read.
fn driver_version() -> c_int {
    let mut version = 0;
    // SAFETY: the function writes one int.
    let known = unsafe { sys::cuDriverGetVersion(&raw mut version) };
    if known == sys::CUresult::CUDA_SUCCESS { version } else { 0 }
}

/// Checks that no two ranks use the same GPU.
fn check_gpus(channel: &ControlChannel, device: &CudaDevice) -> candle_sage::Result<()> {
    let uuid = device.cuda_stream().context().uuid().map_err(during("cannot read the GPU's UUID"))?;
    let own = hex(&uuid.bytes.map(|byte| byte as u8));
    let host = gethostname::gethostname().to_string_lossy().into_owned();
    let all = channel.share("GPU", &own);
    let twice =
        all.iter().enumerate().find_map(|(n, gpu)| Some((all[..n].iter().position(|g| g == gpu)?, n)));
    match twice {
        None => Ok(()),
        Some((a, b)) => Err(Error::new("two ranks have the same GPU")
            .got(format!("ranks {a} and {b}: GPU {:.8}, seen from {host}", all[a]))
            .allowed("a different GPU for each rank")
            .hint("lower --gpus to this machine's number of GPUs (nvidia-smi -L); under srun use --gpus-per-task 1")),
    }
}
