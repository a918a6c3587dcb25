//! Commands refuse a damaged checkpoint, and a run whose folder is removed ends with an error.

use super::{checkpoints, flags, prepared, run_of};
use crate::support::{Scratch, small, wait_until};

/// Every command that reads a checkpoint checks it as `--resume` does.
#[test]
fn a_damaged_checkpoint_is_not_evaluated_sampled_probed_or_exported() {
    let scratch = Scratch::new();
    scratch.ok(&small(&["--steps", "4", "--name", "r"]));
    let path = "runs/r/checkpoints/step-00000004";
    let verbs = [
        &["eval", path, "--tokens", "256"][..],
        &["sample", path, "Once", "--tokens", "2"],
        &["probe", path, "--sequences", "1"],
        &["export", path, "--to", "hf"],
    ];
    verbs.iter().for_each(|verb| drop(scratch.ok(verb)));
    let file = |name: &str| scratch.path().join(path).join(name);
    for (name, what) in
        [("state.safetensors", "SHA-256"), ("checkpoint.json", "changed since"), ("COMPLETE", "written last")]
    {
        let whole = std::fs::read(file(name)).expect("a file");
        let mut flipped = whole.clone();
        let last = flipped.len() - 1;
        flipped[last] ^= 1;
        match name {
            "COMPLETE" => std::fs::remove_file(file(name)).expect("removed"),
            _ => std::fs::write(file(name), flipped).expect("a file"),
        }
        for verb in verbs {
            let error = scratch.fails(verb);
            assert!(
                error.contains("cannot be used") && error.contains(what) && error.contains("hint:"),
                "{error}"
            );
        }
        std::fs::write(file(name), whole).expect("a file");
    }
    scratch.ok(verbs[0]);
}

/// A run whose folder is moved or removed ends with an error at its next step. The run does not recreate the folder,
/// and can be resumed from the moved folder.
#[cfg(unix)]
#[test]
fn a_run_whose_folder_is_taken_away_ends_with_an_error() {
    let scratch = prepared();
    for name in ["renamed", "removed", "replaced"] {
        let run = ["--steps", "1000000", "--checkpoint-every", "20", "--eval-every", "0", "--name", name];
        let mut child = scratch.start(&flags(&run));
        let (folder, elsewhere) = (run_of(&scratch, name), run_of(&scratch, "elsewhere"));
        let whole = || checkpoints(&folder).iter().any(|name| !name.ends_with(".partial"));
        wait_until(whole);
        match name {
            // A checkpoint that is being written may put a file into a folder that is being removed.
            "removed" => wait_until(|| std::fs::remove_dir_all(&folder).is_ok() || !folder.exists()),
            _ => std::fs::rename(&folder, &elsewhere).expect("renamed"),
        }
        if name == "replaced" {
            std::fs::create_dir(&folder).expect("a folder");
        }
        let mut text = String::new();
        std::io::Read::read_to_string(&mut child.stderr.take().expect("piped"), &mut text).expect("text");
        assert_eq!(child.wait().expect("an end").code(), Some(1), "{name}: {text}");
        assert!(text.contains("removed or renamed") && text.contains("hint:"), "{name}: {text}");
        match name {
            "replaced" => assert_eq!(std::fs::read_dir(&folder).expect("a folder").count(), 0),
            _ => assert!(!folder.exists(), "{name} is there again"),
        }
        if name != "removed" {
            let newest = checkpoints(&elsewhere).into_iter().rfind(|name| !name.ends_with(".partial"));
            let step: u64 = newest.and_then(|name| name["step-".len()..].parse().ok()).expect("a checkpoint");
            scratch.ok(&["--resume", "runs/elsewhere", "--steps", &(step + 5).to_string()]);
            assert_eq!(scratch.metrics("elsewhere").len() as u64, step + 5);
            std::fs::remove_dir_all(&elsewhere).expect("removed");
        }
    }
}
