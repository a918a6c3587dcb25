//! The results of `build.rs`: a fatbin for each family of kernels, the architectures in it, and ptxas's
//! report; and the integers that host and kernels share.

include!(concat!(env!("OUT_DIR"), "/kernels.rs"));

/// The name of a kernel, without what it was compiled for. It does not compile where no kernel has this name.
macro_rules! kernel {
    ($name:literal) => {{
        // An item, which the compiler evaluates in a check too.
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

/// Whether an entry is the name, or the name and what follows an underscore.
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

/// The integers that the sources of the kernels state, such as the threads of a block, in a module for each source.
#[allow(dead_code)]
pub(super) mod constants {
    include!(concat!(env!("OUT_DIR"), "/constants.rs"));
}
