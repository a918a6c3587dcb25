//! NCCL's shared library: its functions, which are looked up at run time, and its types.

use std::ffi::{CStr, c_char, c_int, c_void};

use candle_sage::Error;
use cudarc::driver::sys::CUstream;
use libloading::Library;

use super::super::transport::wait_for_report;

/// Environment variable with the path of the library, for systems that do not find it by name.
pub(super) const PATH: &str = "SAGE_TRAIN_NCCL";

const NAMES: [&str; 2] = ["libnccl.so.2", "libnccl.so"];

/// `ncclUint8`: all tensors are transferred as bytes, whatever their element type.
pub(super) const BYTES: c_int = 1;

/// `ncclUniqueId`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Id(pub(super) [u8; 128]);

pub(super) type Communicator = *mut c_void;
pub(super) type Stream = CUstream;

/// Declares a struct of NCCL's functions, and the code that looks them up in the library.
macro_rules! functions {
    ($(#[$doc:meta])* $group:ident: $($name:ident = $symbol:literal: fn($($arg:ty),*) -> $out:ty;)*) => {
        $(#[$doc])*
        pub(super) struct $group {
            $(pub(super) $name: unsafe extern "C" fn($($arg),*) -> $out,)*
        }

        impl $group {
            /// # Safety
            /// `library` must be NCCL, and stay loaded.
            unsafe fn of(library: &Library) -> std::result::Result<Self, libloading::Error> {
                // SAFETY: the signatures are those of `nccl.h`.
                unsafe {
                    $(let $name = *library.get::<unsafe extern "C" fn($($arg),*) -> $out>($symbol)?;)*
                    Ok(Self { $($name,)* })
                }
            }
        }
    };
}

functions! {
    /// Functions in `nccl.h` since version 2.7.
    Functions:
    version = b"ncclGetVersion": fn(*mut c_int) -> c_int;
    unique_id = b"ncclGetUniqueId": fn(*mut Id) -> c_int;
    init_rank = b"ncclCommInitRank": fn(*mut Communicator, c_int, Id, c_int) -> c_int;
    group_start = b"ncclGroupStart": fn() -> c_int;
    group_end = b"ncclGroupEnd": fn() -> c_int;
    send = b"ncclSend": fn(*const c_void, usize, c_int, c_int, Communicator, Stream) -> c_int;
    receive = b"ncclRecv": fn(*mut c_void, usize, c_int, c_int, Communicator, Stream) -> c_int;
    error_string = b"ncclGetErrorString": fn(c_int) -> *const c_char;
}

functions! {
    /// Functions for collectives on the copy engines. NCCL 2.28 and later have all of them.
    Collectives:
    init_rank = b"ncclCommInitRankConfig": fn(*mut Communicator, c_int, Id, c_int, *mut Config) -> c_int;
    allocate = b"ncclMemAlloc": fn(*mut *mut c_void, usize) -> c_int;
    register = b"ncclCommWindowRegister": fn(Communicator, *mut c_void, usize, *mut *mut c_void, c_int) -> c_int;
    all_to_all = b"ncclAlltoAll": fn(*const c_void, *mut c_void, usize, c_int, Communicator, Stream) -> c_int;
    all_gather = b"ncclAllGather": fn(*const c_void, *mut c_void, usize, c_int, Communicator, Stream) -> c_int;
}

/// `ncclConfig_t` as in NCCL 2.28. Later versions of NCCL also accept this form.
#[repr(C)]
pub(super) struct Config {
    size: usize,
    magic: u32,
    version: u32,
    blocking: c_int,
    cga_cluster_size: c_int,
    min_ctas: c_int,
    max_ctas: c_int,
    net_name: *const c_char,
    split_share: c_int,
    traffic_class: c_int,
    comm_name: *const c_char,
    collnet_enable: c_int,
    cta_policy: c_int,
    shrink_share: c_int,
    nvls_ctas: c_int,
    channels_per_net_peer: c_int,
    nvlink_centric_sched: c_int,
}

const _: () = assert!(size_of::<Config>() == 80);

impl Config {
    /// `NCCL_CTA_POLICY_ZERO`: collectives take no multiprocessor where that is possible.
    pub(super) fn zero_cta() -> Self {
        /// `NCCL_CONFIG_UNDEF_INT`: the library's default.
        const UNSET: c_int = c_int::MIN;
        Self {
            size: size_of::<Self>(),
            magic: 0xcafe_beef,
            version: 22_800,
            blocking: UNSET,
            cga_cluster_size: UNSET,
            min_ctas: UNSET,
            max_ctas: UNSET,
            net_name: std::ptr::null(),
            split_share: UNSET,
            traffic_class: UNSET,
            comm_name: std::ptr::null(),
            collnet_enable: UNSET,
            cta_policy: 2,
            shrink_share: UNSET,
            nvls_ctas: UNSET,
            channels_per_net_peer: UNSET,
            nvlink_centric_sched: UNSET,
        }
    }
}

impl Functions {
    /// Loads NCCL. `Collectives` needs version 2.28 or later, and is `None` with earlier versions.
    pub(super) fn load() -> candle_sage::Result<(Self, Option<Collectives>)> {
        let named = std::env::var(PATH).ok();
        let names = named.as_deref().map_or(NAMES.to_vec(), |path| vec![path]);
        let mut failed = String::new();
        for name in names {
            // SAFETY: loading NCCL has no side effects that break soundness; the signatures are those of its
            // header.
            let loaded = unsafe {
                Library::new(name).and_then(|library| {
                    let functions = (Self::of(&library)?, Collectives::of(&library).ok());
                    // The library has its own threads, so it stays loaded until the process ends.
                    std::mem::forget(library);
                    Ok(functions)
                })
            };
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
            .hint(format!(
                "PyTorch (nvidia/nccl/lib) and the package nvidia-nccl contain it; if it is elsewhere, set {PATH} to its path"
            )))
    }

    /// Turns an error code into an error. If another rank has exited, NCCL reports a remote error or a system
    /// error. In this case the threads of `ControlConnection` usually name the other rank in a message and end this
    /// process before this function returns.
    pub(super) fn check(&self, what: &str, code: c_int) -> candle_sage::Result<()> {
        if code == 0 {
            return Ok(());
        }
        // SAFETY: the library returns a static string for any number.
        let text = unsafe { CStr::from_ptr((self.error_string)(code)) };
        let error = Error::failed(format!("NCCL cannot {what}"))
            .got(text.to_string_lossy())
            .allowed("GPUs that reach each other")
            .hint("set NCCL_DEBUG=WARN and NCCL_DEBUG_FILE=nccl.%h.%p for details; try --copy-engines off, which does not require that GPUs access each other's memory");
        Err(wait_for_report(error))
    }
}
