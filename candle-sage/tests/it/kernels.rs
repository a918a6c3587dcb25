//! What must hold for the source of every kernel.

use std::path::{Path, PathBuf};

fn sources(folder: &Path, all: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).expect("a folder").map(|entry| entry.expect("an entry")) {
        match entry.file_type().expect("a type").is_dir() {
            true => sources(&entry.path(), all),
            false => all.push(entry.path()),
        }
    }
}

/// The host launches kernels before those before them have ended, so that one which does not wait for them reads what is not
/// written yet. `SAGE_KERNEL` waits.
#[test]
fn every_kernel_waits_for_the_grids_before_it() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../kernels");
    let (mut paths, mut kernels) = (Vec::new(), 0);
    sources(&root, &mut paths);
    for path in paths {
        let name = path.strip_prefix(&root).expect("a path below the root");
        let source = std::fs::read_to_string(&path).expect("a source");
        let declares = source.contains("__global__");
        if name == Path::new("include/sage/kernel.cuh") {
            assert!(declares && source.contains("wait_for_earlier_grids();"), "{source}");
        } else if !name.starts_with("host") {
            assert!(!declares, "{}: a kernel that SAGE_KERNEL does not declare", name.display());
            kernels += source.matches("SAGE_KERNEL(").count();
        }
    }
    assert!(kernels > 30, "{kernels} declarations");
}
