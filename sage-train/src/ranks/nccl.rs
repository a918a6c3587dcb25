//! The transport for ranks on GPUs: sends and receives of NCCL, which copy and add nothing.
//!
//! The library is loaded at run time and not linked, so that a program with GPU kernels starts on machines
//! without NCCL. Transfers run on a stream of their own, of high priority. A transfer starts when candle's
//! stream has reached the call; `wait` makes candle's stream wait for it. The stream is created through the
//! driver and not through cudarc, which records events for every tensor as soon as a context has two streams.
#![allow(unsafe_code)]

use std::ffi::{CStr, c_char, c_int, c_void};
use std::fmt::Debug;
use std::sync::atomic::{AtomicU64, Ordering};

use candle_core::cuda_backend::WrapErr;
use candle_core::{CudaDevice, CudaStorage, DType, Result, Storage, Tensor};
use candle_sage::Error;
use cudarc::driver::result::{event, stream};
use cudarc::driver::sys::{CUevent, CUevent_flags, CUevent_wait_flags, CUstream};
use cudarc::driver::{CudaSlice, DevicePtr};
use half::{bf16, f16};
use libloading::Library;

use super::Words;
use super::mesh::Rank;
use super::transport::{Swap, Transfer, Transport};
use crate::{during, hex};

/// Environment variable with the path of the library, for systems that do not find it by name.
const PATH: &str = "SAGE_TRAIN_NCCL";

const NAMES: [&str; 2] = ["libnccl.so.2", "libnccl.so"];

/// `ncclUint8`: NCCL copies bytes, whatever the element type.
const BYTES: c_int = 1;

/// `ncclUniqueId`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Id([u8; 128]);

type Communicator = *mut c_void;
type Stream = CUstream;

/// Number of events that mark the ends of transfers. They take turns: a wait for a transfer whose event was
/// reused waits for the later transfer.
const TURNS: usize = 8;

const WAIT: CUevent_wait_flags = CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;

/// Declares the functions that are called, and looks up all of them. `nccl.h` has them since version 2.7.
macro_rules! functions {
    ($($name:ident = $symbol:literal: fn($($arg:ty),*) -> $out:ty;)*) => {
        struct Functions {
            $($name: unsafe extern "C" fn($($arg),*) -> $out,)*
        }

        impl Functions {
            /// # Safety
            /// `library` must be NCCL.
            unsafe fn of(library: Library) -> std::result::Result<Self, libloading::Error> {
                // SAFETY: the signatures are those of `nccl.h`.
                unsafe {
                    $(let $name = *library.get::<unsafe extern "C" fn($($arg),*) -> $out>($symbol)?;)*
                    // The library has threads of its own, so it stays loaded until the process ends.
                    std::mem::forget(library);
                    Ok(Self { $($name,)* })
                }
            }
        }
    };
}

functions! {
    version = b"ncclGetVersion": fn(*mut c_int) -> c_int;
    unique_id = b"ncclGetUniqueId": fn(*mut Id) -> c_int;
    init_rank = b"ncclCommInitRank": fn(*mut Communicator, c_int, Id, c_int) -> c_int;
    group_start = b"ncclGroupStart": fn() -> c_int;
    group_end = b"ncclGroupEnd": fn() -> c_int;
    send = b"ncclSend": fn(*const c_void, usize, c_int, c_int, Communicator, Stream) -> c_int;
    receive = b"ncclRecv": fn(*mut c_void, usize, c_int, c_int, Communicator, Stream) -> c_int;
    error_string = b"ncclGetErrorString": fn(c_int) -> *const c_char;
}

impl Functions {
    fn load() -> candle_sage::Result<Self> {
        let named = std::env::var(PATH).ok();
        let names = named.as_deref().map_or(NAMES.to_vec(), |path| vec![path]);
        let mut failed = String::new();
        for name in names {
            // SAFETY: loading NCCL has no side effects that break soundness; the signatures are those of its
            // header.
            let loaded = unsafe { Library::new(name).and_then(|library| Self::of(library)) };
            match loaded {
                Ok(functions) => return Ok(functions),
                Err(error) => {
                    failed = format!("{failed}{}{error}", if failed.is_empty() { "" } else { "; " })
                }
            }
        }
        Err(Error::new("several GPUs need NCCL, and it is not found")
            .got(failed)
            .allowed("libnccl.so.2, version 2.7 or later")
            .hint(format!("it comes with PyTorch (nvidia/nccl/lib) and as nvidia-nccl; {PATH} names a file")))
    }

    fn check(&self, what: &str, code: c_int) -> candle_sage::Result<()> {
        if code == 0 {
            return Ok(());
        }
        // SAFETY: the library returns a static string for any number.
        let text = unsafe { CStr::from_ptr((self.error_string)(code)) };
        Err(Error::new(format!("NCCL cannot {what}"))
            .got(text.to_string_lossy())
            .allowed("GPUs that reach each other")
            .hint("NCCL_DEBUG=WARN with NCCL_DEBUG_FILE=nccl.%h.%p says more"))
    }
}

/// An NCCL communicator of all ranks.
pub(super) struct Nccl {
    rank: Rank,
    device: CudaDevice,
    functions: Functions,
    stream: Stream,
    /// Recorded on candle's stream at the call of a transfer.
    ready: CUevent,
    /// Recorded at the ends of transfers, in turn.
    came: [CUevent; TURNS],
    transfers: AtomicU64,
    /// Never destroyed: destruction is collective, and a rank that leaves because of an error would wait for
    /// the others. The process ends soon after.
    communicator: Communicator,
}

impl Debug for Nccl {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Nccl").field("rank", &self.rank).finish_non_exhaustive()
    }
}

impl Nccl {
    /// Creates the communicator. All ranks must call it.
    pub(super) fn connect(words: &Words, device: &CudaDevice) -> candle_sage::Result<Self> {
        let rank = words.rank();
        let functions = Functions::load()?;
        let mut version = 0;
        // SAFETY: the function writes one int to the given address.
        functions.check("tell its version", unsafe { (functions.version)(&raw mut version) })?;
        words.agree("NCCL", &format!("version {version}"))?;
        check_gpus(words, device)?;
        let mut id = Id([0; 128]);
        let mut said = String::new();
        if rank.is_first() {
            // SAFETY: the function writes 128 bytes to the given address.
            functions.check("make an id", unsafe { (functions.unique_id)(&raw mut id) })?;
            said = hex(&id.0);
        }
        let said = words.from_first("NCCL's id", &said);
        for (byte, digits) in id.0.iter_mut().zip(said.as_bytes().chunks(2)) {
            let digits = std::str::from_utf8(digits).unwrap_or_default();
            *byte = u8::from_str_radix(digits, 16).map_err(during("rank 0 sent an id that is none"))?;
        }
        device.cuda_stream().context().bind_to_thread().map_err(during("cannot use the GPU"))?;
        let mut communicator = std::ptr::null_mut();
        // SAFETY: the id is rank 0's, the GPU is bound to this thread, and the function writes to a valid
        // address.
        let made = unsafe {
            (functions.init_rank)(&raw mut communicator, rank.of as c_int, id, rank.index as c_int)
        };
        functions.check("connect the GPUs", made)?;
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
}

impl Transport for Nccl {
    /// Pairs of sends and receives, also for all-gathers: on NVLink they are a fifth faster than NCCL's own
    /// all-gather.
    fn swap(&self, swaps: &[Swap]) -> Result<Transfer> {
        let places = |tensors: &[Tensor]| tensors.iter().map(|x| self.place(x)).collect::<Result<Vec<_>>>();
        let swaps =
            swaps.iter().map(|swap| Ok((places(&swap.sent)?, places(&swap.comes)?, swap.peer as c_int)));
        let swaps = swaps.collect::<Result<Vec<_>>>()?;
        let Functions { group_start, group_end, send, receive, .. } = &self.functions;
        // SAFETY: the addresses are of tensors that the caller keeps until it has waited for the transfer.
        self.transfer(|stream| unsafe {
            self.check("begin a transfer", group_start())?;
            // Between two ranks messages keep their order.
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
        // If the event was recorded again, it marks a later transfer on the same stream, which ends after
        // this one.
        // SAFETY: streams and events live as long as `self`.
        unsafe { stream::wait_event(compute, self.came[number as usize % TURNS], WAIT).w() }
    }
}

/// Checks that no two ranks use the same GPU.
fn check_gpus(words: &Words, device: &CudaDevice) -> candle_sage::Result<()> {
    let uuid = device.cuda_stream().context().uuid().map_err(during("cannot tell the GPU"))?;
    let own = hex(&uuid.bytes.map(|byte| byte as u8));
    let host = gethostname::gethostname().to_string_lossy().into_owned();
    let all = words.share("GPU", &own);
    let twice =
        all.iter().enumerate().find_map(|(n, gpu)| Some((all[..n].iter().position(|g| g == gpu)?, n)));
    match twice {
        None => Ok(()),
        Some((a, b)) => Err(Error::new("two ranks have the same GPU")
            .got(format!("ranks {a} and {b}: GPU {:.8}, seen from {host}", all[a]))
            .allowed("a GPU for each rank")
            .hint("--gpus no higher than this machine's GPUs (nvidia-smi -L); under srun --gpus-per-task 1")),
    }
}
