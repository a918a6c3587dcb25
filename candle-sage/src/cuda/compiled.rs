//! The results of `build.rs`: a fatbin for each family of kernels, the architectures in it, and ptxas's
//! report.

include!(concat!(env!("OUT_DIR"), "/kernels.rs"));
