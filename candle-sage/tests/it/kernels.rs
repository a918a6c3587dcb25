//! What must hold for the source of every kernel.

use std::path::{Path, PathBuf};

fn sources(folder: &Path, all: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).expect("a folder").map(|entry| entry.expect("an entry").path()) {
        if entry.is_dir() {
            sources(&entry, all);
        } else if ["cu", "cuh"].iter().any(|end| entry.extension() == Some(end.as_ref())) {
            all.push(entry);
        }
    }
}

/// The host launches kernels before those before them have ended, so that one which does not wait for them reads what is not
/// written yet. `SAGE_KERNEL` waits before it does anything else.
#[test]
fn every_kernel_waits_for_the_grids_before_it() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels");
    let read = |path: &Path| std::fs::read_to_string(path).expect("a source");
    let (declaration, wait) = (root.join("include/sage/kernel.cuh"), root.join("include/sage/ptx/grid.cuh"));
    let macro_ = read(&declaration);
    let place = |what: &str| macro_.find(what).expect(what);
    assert!(place("{") < place("wait_for_earlier_grids();"));
    assert!(place("wait_for_earlier_grids();") < place("launch_dependent_grids();"));
    assert!(place("launch_dependent_grids();") < place("__VA_ARGS__;"));
    assert!(read(&wait).contains(r#"asm volatile("griddepcontrol.wait;" ::: "memory");"#));

    let (mut paths, mut kernels) = (Vec::new(), 0);
    sources(&root, &mut paths);
    for path in paths.into_iter().filter(|path| *path != declaration) {
        let source = read(&path);
        assert!(
            !source.contains("__global__"),
            "{}: a kernel that SAGE_KERNEL does not declare",
            path.display()
        );
        kernels += source.matches("SAGE_KERNEL(").count();
    }
    assert!(kernels > 30, "{kernels} declarations");
}
