//! What `build.rs` made of `kernels/`: an image for each family, the architectures in it, and what ptxas said.

include!(concat!(env!("OUT_DIR"), "/kernels.rs"));
