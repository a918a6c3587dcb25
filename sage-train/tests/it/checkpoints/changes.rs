//! Settings that change when a run is resumed.

use super::{flags, numbers, prepared, run_of};
use crate::support::{Scratch, small};

#[test]
fn the_settings_that_a_run_began_with_stay_and_make_it_again() {
    let scratch = prepared();
    scratch.ok(&flags(&["--steps", "8", "--checkpoint-every", "4", "--name", "r"]));
    let saved = || std::fs::read_to_string(run_of(&scratch, "r").join("config.toml")).expect("settings");
    let begun = saved();
    let eighth = "\n[[changes]]\nlr = 0.001\nstep = 8\nsteps = 12\n";
    scratch.ok(&["--resume", "runs/r", "--steps", "12", "--lr", "1e-3"]);
    assert_eq!(saved(), format!("{begun}{eighth}"));
    // A resume without flags, or of a finished run, changes no settings. Each resume keeps the recorded changes.
    scratch.ok(&["--resume", "runs/r"]);
    scratch.ok(&["--resume", "runs/r", "--lr", "2e-3"]);
    assert_eq!(saved(), format!("{begun}{eighth}"));
    scratch.ok(&["--resume", "runs/r", "--steps", "16"]);
    assert_eq!(saved(), format!("{begun}{eighth}\n[[changes]]\nstep = 12\nsteps = 16\n"));
    let run = sage_train::runs::Run::read(&run_of(&scratch, "r")).expect("a run");
    assert_eq!((run.config.steps, run.config.settings.optimizer.lr), (16, Some(1e-3)));
    let told = scratch.run(&["report", "runs/r"]);
    let told = String::from_utf8_lossy(&told.stdout).into_owned();
    assert!(told.contains("lr, steps after step 8; steps after step 12"), "{told}");
    // Without the checkpoint of step 16, the run is resumed at step 12 again: the new `steps` replaces the earlier one.
    std::fs::remove_dir_all(run_of(&scratch, "r").join("checkpoints/step-00000016")).expect("gone");
    scratch.ok(&["--resume", "runs/r", "--steps", "14"]);
    assert_eq!(saved(), format!("{begun}{eighth}\n[[changes]]\nstep = 12\nsteps = 14\n"));
    // A new run with this `config.toml` does not apply the changes, but a message lists them. Its 8 steps equal the
    // first 8 steps of `r`.
    let again = scratch.run(&["--config", "runs/r/config.toml", "--name", "again"]);
    let told = String::from_utf8_lossy(&again.stderr);
    assert!(again.status.success() && told.contains("lr 0.001, steps 12 after step 8"), "{told}");
    assert_eq!(numbers(&scratch.metrics("again")), numbers(&scratch.metrics("r")[..8]));
    assert_eq!(
        std::fs::read_to_string(run_of(&scratch, "again").join("config.toml")).expect("settings"),
        begun
    );
    scratch.ok(&["--resume", "runs/again", "--steps", "12", "--lr", "1e-3"]);
    assert_eq!(numbers(&scratch.metrics("again")), numbers(&scratch.metrics("r")[..12]));
    scratch.ok(&["eval", "runs/r", "--tokens", "256"]);
}

/// A report, a probe, and a resume with no steps left do not change what a run has written.
#[test]
fn what_a_run_has_written_stays() {
    let scratch = Scratch::new();
    scratch.ok(&small(&["--steps", "2", "--name", "r"]));
    let read = |name| std::fs::read(scratch.path().join("runs/r").join(name)).expect("a file of the run");
    let files = || ["config.toml", "model.safetensors", "metrics.csv", "metrics.jsonl"].map(read);
    let before = files();
    for flags in [["--html", "config.toml"], ["--markdown", "model.safetensors"], ["--csv", "metrics.csv"]] {
        let error = scratch.fails(&["report", "runs/r", flags[0], &format!("runs/r/{}", flags[1])]);
        assert!(error.contains("a file of a run") && error.contains("hint:"), "{error}");
    }
    scratch.fails(&["probe", "runs/r", "--json", "runs/r/starts.json"]);
    scratch.ok(&["--resume", "runs/r", "--lr", "1e-3"]);
    assert!(before == files());
    scratch.ok(&small(&["--steps", "4", "--name", "s", "--checkpoint-every", "2"]));
    let last = scratch.path().join("runs/s/checkpoints/step-00000004");
    std::fs::remove_dir_all(last).expect("the last checkpoint");
    scratch.ok(&["--resume", "runs/s", "--steps", "2"]);
    let settings = std::fs::read_to_string(scratch.path().join("runs/s/config.toml"));
    assert!(settings.expect("settings").contains("\nsteps = 2"));
}
