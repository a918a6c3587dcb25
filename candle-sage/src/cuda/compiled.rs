//! The results of `build.rs`: a fatbin for each family of kernels, the architectures in it, and ptxas's
//! report; and the integers that host and kernels share.

include!(concat!(env!("OUT_DIR"), "/kernels.rs"));

/// The integers that the sources of the kernels state, such as the threads of a block, in a module for each source.
#[allow(dead_code)]
pub(super) mod constants {
    include!(concat!(env!("OUT_DIR"), "/constants.rs"));
}
