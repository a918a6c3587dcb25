//! The results of `build.rs`. Each `.cu` file (a family of kernels) is compiled to a fatbin: machine code for each
//! architecture. Other results are the list of architectures, the registers and memory of each kernel as reported by
//! ptxas (CUDA's assembler), and the constants that host and kernels share.

include!(concat!(env!("OUT_DIR"), "/kernels.rs"));

/// A kernel's name, without suffixes such as `_f16`. If no kernel has this name, the crate does not compile.
macro_rules! kernel {
    ($name:literal) => {{
        // A constant item, so that `cargo check` evaluates it too.
        const NAME: &str = $crate::cuda::compiled::named($name);
        NAME
    }};
}
pub(super) use kernel;

/// See [`kernel`].
pub(super) const fn named(name: &'static str) -> &'static str {
    let mut n = 0;
    while n < ENTRIES.len() {
        if begins(ENTRIES[n].as_bytes(), name.as_bytes()) {
            return name;
        }
        n += 1;
    }
    panic!("no kernel of this name was compiled")
}

/// Whether `entry` is `name`, or begins with `name` and an underscore.
const fn begins(entry: &[u8], name: &[u8]) -> bool {
    let mut n = 0;
    while n < name.len() {
        if n >= entry.len() || entry[n] != name[n] {
            return false;
        }
        n += 1;
    }
    entry.len() == name.len() || entry[name.len()] == b'_'
}

/// The integer constants of the kernels' sources, such as numbers of threads, in one module per source.
#[allow(dead_code)]
pub(super) mod constants {
    include!(concat!(env!("OUT_DIR"), "/constants.rs"));
}
