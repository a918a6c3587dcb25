//! Checkpoints: a run that is interrupted at any point continues bit-identically.

mod changes;
mod damage;
mod signals;
mod spikes;

use std::path::{Path, PathBuf};
use std::process::{Child, Command};

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use sage_train::checkpoint::FoundCheckpoint;
use sage_train::config::Config;
use sage_train::device::DeviceKind;
use sage_train::metrics::Point;
use sage_train::quantity::Quantity;
use sage_train::ranks::Rank;
use sage_train::settings::{Schedule, Settings, Switch};
use sage_train::train::{self, Origin};

use crate::support::{Scratch, ends_before, ends_before_changes, small, wait_until};

/// Data that is prepared once, so that runs start in milliseconds.
fn prepared() -> Scratch {
    let scratch = Scratch::new();
    let text = scratch.ok(&["corpus", "--megabytes", "1"]);
    scratch.file("corpus.txt", text);
    scratch.ok(&["data", "prepare", "corpus.txt", "--to", "shards", "--vocab-size", "300"]);
    scratch
}

fn flags<'a>(more: &[&'a str]) -> Vec<&'a str> {
    small(
        &[&["--data", "shards", "--attn", "sagebwd", "--threads", "1", "--eval-tokens", "256"], more]
            .concat(),
    )
}

fn run_of(scratch: &Scratch, name: &str) -> PathBuf {
    scratch.path().join("runs").join(name)
}

/// The computed values: everything except times.
fn numbers(points: &[Point]) -> Vec<Point> {
    let bare =
        |point: &Point| Point { seconds: 0.0, tokens_per_second: 0.0, update_share: None, ..point.clone() };
    points.iter().map(bare).collect()
}

fn state(run: &Path, step: u64) -> Vec<u8> {
    std::fs::read(run.join(format!("checkpoints/step-{step:08}/state.safetensors"))).expect("a checkpoint")
}

fn checkpoints(run: &Path) -> Vec<String> {
    let Ok(entries) = std::fs::read_dir(run.join("checkpoints")) else { return Vec::new() };
    let mut names: Vec<String> =
        entries.flatten().map(|e| e.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

fn assert_same_results(scratch: &Scratch, got: &str, wanted: &str, steps: u64) {
    let (a, b) = (numbers(&scratch.metrics(got)), numbers(&scratch.metrics(wanted)));
    assert_eq!(a.len(), b.len());
    a.iter().zip(&b).for_each(|(a, b)| assert_eq!(a, b));
    let (got, wanted) = (run_of(scratch, got), run_of(scratch, wanted));
    assert!(state(&got, steps) == state(&wanted, steps), "weights or moments differ");
    let weights = |run: &Path| std::fs::read(run.join("model.safetensors")).expect("weights");
    assert!(weights(&got) == weights(&wanted), "model.safetensors");
    let csv = std::fs::read_to_string(got.join("metrics.csv")).expect("csv");
    assert_eq!(csv.lines().count() as u64, 1 + steps);
}

/// Asserts the same results and the same settings.
fn assert_same(scratch: &Scratch, got: &str, wanted: &str, steps: u64) {
    assert_same_results(scratch, got, wanted, steps);
    let config = |run| std::fs::read(run_of(scratch, run).join("config.toml")).expect("settings");
    assert!(config(got) == config(wanted), "config.toml");
}

fn is_writing(run: &Path) -> bool {
    checkpoints(run).iter().any(|name| name.ends_with(".partial"))
}

/// A run is killed at random points of its progress, every second time while it writes a checkpoint, and resumed.
#[test]
fn a_hundred_kills_change_nothing() {
    const STEPS: u64 = 120;
    let scratch = prepared();
    let run = ["--steps", "120", "--checkpoint-every", "2", "--eval-every", "40"];
    scratch.ok(&flags(&[&run[..], &["--name", "whole"]].concat()));
    let mut rng = ChaCha8Rng::seed_from_u64(3);
    let (mut kills, mut in_a_write, mut resumed, mut finished) = (0, 0, 0, 0);
    loop {
        // After enough kills a run may finish.
        let enough = kills >= 100 && in_a_write >= 10;
        if enough && finished > 0 {
            break;
        }
        let name = format!("cut-{finished}");
        let folder = run_of(&scratch, &name);
        let whole = checkpoints(&folder).iter().any(|name| !name.ends_with(".partial"));
        let path = format!("runs/{name}");
        let mut child = if whole {
            resumed += 1;
            scratch.start(&["--resume", &path])
        } else {
            // The run was killed before its first checkpoint, so it starts again.
            let _ = std::fs::remove_dir_all(&folder);
            scratch.start(&flags(&[&run[..], &["--name", &name]].concat()))
        };
        let changes = if enough { u32::MAX } else { rng.random_range(0..40) };
        let mut ended = ends_before_changes(&mut child, &folder, changes);
        if kills % 2 == 1 && !ended {
            ended = ends_before(&mut child, || is_writing(&folder));
        }
        if !ended {
            child.kill().expect("it runs");
            child.wait().expect("an end");
            kills += 1;
            in_a_write += usize::from(is_writing(&folder));
            assert!(kills < 2000, "{in_a_write} kills in a write, {resumed} resumed, {finished} ended");
            continue;
        }
        let output = child.wait_with_output().expect("an end");
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "after {kills} kills: {text}");
        assert_same(&scratch, &name, "whole", STEPS);
        finished += 1;
    }
    assert!(resumed > 20, "{kills} kills, {in_a_write} in a write, {resumed} resumed, {finished} ended");
}

#[cfg(unix)]
fn signal(child: &Child, signal: &str) {
    let sent = Command::new("kill").args([signal, &child.id().to_string()]).status().expect("kill");
    assert!(sent.success());
}

/// A limit on file size imitates a full disk: neither state nor weights fit, only the metrics do.
#[cfg(unix)]
#[test]
fn a_full_disk_loses_no_earlier_checkpoint() {
    let scratch = prepared();
    // A schedule that does not depend on the number of steps.
    let run =
        ["--eval-every", "50", "--checkpoint-every", "10", "--schedule", "constant", "--warmup-steps", "2"];
    let with = |steps: &'static str, name: &'static str| {
        flags(&[&run[..], &["--steps", steps, "--name", name]].concat())
    };
    scratch.ok(&with("200", "whole"));
    scratch.ok(&with("50", "full"));
    let folder = run_of(&scratch, "full");
    let newest = checkpoints(&folder).pop().expect("one");
    let path = folder.join("checkpoints").join(&newest).join("state.safetensors");
    let before = std::fs::read(&path).expect("a state");
    // In units of 1024 bytes, as `ulimit -f` counts. The limit is below the size of the weights, and above the sizes of
    // the metrics and the plot.
    let weights = before.len() / 3 / 1024;
    let command =
        format!("trap '' XFSZ; ulimit -f {}; exec \"$0\" --resume runs/full --steps 200", weights - 5);
    let output = Command::new("bash")
        .args(["-c", &command, env!("CARGO_BIN_EXE_sage-train")])
        .current_dir(scratch.path())
        .output()
        .expect("bash");
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{text}");
    for part in
        ["warning: cannot write the checkpoint", "free disk space", "warning: cannot write runs/full/model"]
    {
        assert!(text.contains(part), "{part}: {text}");
    }
    assert!(std::fs::read(&path).is_ok_and(|after| after == before), "the earlier checkpoint is untouched");
    let left = |name: &str| name.ends_with(".partial");
    assert!(!checkpoints(&folder).iter().any(|name| left(name)));
    let files = std::fs::read_dir(&folder).expect("a folder").flatten();
    assert!(files.map(|entry| entry.file_name()).all(|name| !left(&name.to_string_lossy())));
    scratch.ok(&["--resume", "runs/full", "--steps", "200"]);
    assert_same_results(&scratch, "full", "whole", 200);
}

#[test]
fn a_run_that_was_interrupted_at_its_very_end_is_validated() {
    let scratch = prepared();
    let run =
        ["--steps", "8", "--checkpoint-every", "5", "--eval-every", "0", "--seed", "9223372036854775807"];
    scratch.ok(&flags(&[&run[..], &["--name", "r"]].concat()));
    std::fs::remove_dir_all(run_of(&scratch, "r").join("checkpoints/step-00000008")).expect("gone");
    let table = scratch.ok(&["--resume", "runs/r", "--steps", "5"]);
    assert!(table.contains("val loss"), "{table}");
}

#[test]
fn the_last_ones_are_kept_and_some_of_the_others() {
    let scratch = prepared();
    let flags = flags(&[
        "--steps",
        "20",
        "--checkpoint-every",
        "2",
        "--keep-last",
        "3",
        "--keep-every",
        "8",
        "--name",
        "k",
    ]);
    scratch.ok(&flags);
    let wanted = [8, 16, 18, 20].map(|step| format!("step-{step:08}"));
    assert_eq!(checkpoints(&run_of(&scratch, "k")), wanted);
    // A resume with `--steps 22` continues from the last checkpoint.
    scratch.ok(&["--resume", "runs/k", "--steps", "22"]);
    assert_eq!(scratch.metrics("k").len(), 22);
}

#[test]
fn what_is_not_a_whole_checkpoint_of_this_run_is_refused() {
    let scratch = prepared();
    scratch.ok(&flags(&["--steps", "4", "--checkpoint-every", "2", "--name", "r"]));
    scratch.ok(&flags(&["--steps", "4", "--width", "48", "--name", "other"]));
    let step = run_of(&scratch, "r").join("checkpoints/step-00000004");
    let mut text = String::new();
    let mut refused = |name: &str, args: &[&str]| {
        let error = scratch.fails(args);
        let error = &error[error.find("error:").expect("an error")..];
        // Hashes differ between builds.
        let plain: Vec<String> = error
            .split(' ')
            .map(|word| {
                let hash = word.trim();
                let is_hash = hash.len() >= 12 && hash.bytes().all(|b| b.is_ascii_hexdigit());
                if is_hash { word.replace(hash, "HASH") } else { word.into() }
            })
            .collect();
        text += &format!("-- {name}\n{}\n", plain.join(" ").trim_end());
    };
    let longer = ["--resume", "runs/r", "--steps", "8"];
    refused("shorter than it is", &["--resume", "runs/r", "--steps", "3"]);
    refused("no run", &["--resume", "runs/none"]);
    refused("another setting", &[&longer[..], &["--width", "48"]].concat());
    refused("an older one", &["--resume", "runs/r/checkpoints/step-00000002", "--steps", "8"]);
    let file = |name: &str| step.join(name);
    let (state, about, marker) = (file("state.safetensors"), file("checkpoint.json"), file("COMPLETE"));
    let whole = [&state, &about, &marker].map(|path| std::fs::read(path).expect("a file"));
    let restore = || {
        for (path, bytes) in [&state, &about, &marker].iter().zip(&whole) {
            std::fs::write(path, bytes).expect("a file");
        }
    };
    let mut flipped = whole[0].clone();
    flipped[1000] ^= 1;
    for (name, path, bytes) in [
        ("a flipped bit", &state, Some(flipped.as_slice())),
        ("cut off", &state, Some(&whole[0][..1000])),
        ("another step", &about, Some(&br#"{"version":1,"step":3}"#[..])),
        ("without its marker", &marker, None),
        ("without its state", &state, None),
    ] {
        match bytes {
            Some(bytes) => std::fs::write(path, bytes).expect("a file"),
            None => std::fs::remove_file(path).expect("a file"),
        }
        refused(name, &longer);
        restore();
    }
    let foreign = run_of(&scratch, "other").join("checkpoints/step-00000004");
    for name in ["state.safetensors", "checkpoint.json", "COMPLETE"] {
        std::fs::copy(foreign.join(name), file(name)).expect("a copy");
    }
    let checkpoint = "runs/r/checkpoints/step-00000004";
    refused("of another model", &["--resume", checkpoint, "--steps", "8"]);
    for args in [&["eval", checkpoint, "--device", "cpu"][..], &["export", checkpoint, "--to", "hf"]] {
        assert!(scratch.fails(args).contains("the run's settings were changed"), "{args:?}");
    }
    restore();
    for file in ["metrics.jsonl", "metrics.csv"] {
        std::fs::write(run_of(&scratch, "r").join(file), "").expect("a file");
    }
    refused("empty metrics", &longer);
    insta::assert_snapshot!(text);
}

#[test]
fn two_processes_do_not_work_on_one_run() {
    let scratch = prepared();
    let mut child =
        scratch.start(&flags(&["--steps", "100000", "--checkpoint-every", "1", "--name", "busy"]));
    let whole = || checkpoints(&run_of(&scratch, "busy")).iter().any(|name| !name.ends_with(".partial"));
    wait_until(whole);
    let error = scratch.fails(&["--resume", "runs/busy"]);
    child.kill().expect("it runs");
    child.wait().expect("an end");
    assert!(error.contains("is in use"), "{error}");
}

/// With `--deterministic` a run on a GPU continues bit-identically too: 40 steps equal 23 steps and 17 resumed steps.
#[test]
#[ignore = "needs a GPU"]
fn cuda_runs_go_on_to_the_bit() {
    let scratch = Scratch::new();
    let settings = |name: &str, steps: u64| {
        Settings::with(|s| {
            s.run.name = Some(name.into());
            s.run.out = Some(scratch.path().into());
            s.run.device = Some(DeviceKind::Cuda);
            s.run.deterministic = Some(Switch::On);
            s.run.sample_tokens = Some(0);
            s.data.document_mask = Some(Switch::On);
            s.data.corpus_mb = Some(1);
            s.batch.steps = Some(Quantity(steps));
            s.batch.tokens_per_step = Some(Quantity(8 << 10));
            s.optimizer.skip_spikes = Some(2.0);
            s.optimizer.schedule = Some(Schedule::Constant);
            s.optimizer.warmup_steps = Some(Quantity(0));
        })
    };
    let config = |name, steps| Config::resolve(settings(name, steps)).expect("settings");
    let whole = train::run(&config("whole", 40), &Origin::New).expect("a run");
    train::run(&config("parts", 23), &Origin::New).expect("a run");
    let found = FoundCheckpoint::at(&scratch.path().join("parts"), Rank::ALONE).expect("a checkpoint");
    let parts = train::run(&config("parts", 40), &Origin::Resume(Box::new(found))).expect("the rest");
    let plain = |points: &[Point]| -> Vec<Point> {
        let bare = |point: &Point| Point {
            gpu_watts: None,
            gpu_mhz: None,
            gpu_gib: None,
            val_loss: None,
            val_bits_per_byte: None,
            ..point.clone()
        };
        numbers(&points.iter().map(bare).collect::<Vec<_>>())
    };
    plain(&whole.points).iter().zip(plain(&parts.points)).for_each(|(a, b)| assert_eq!(*a, b));
    assert_eq!(whole.val_loss, parts.val_loss);
    let state = |name: &str| state(&scratch.path().join(name), 40);
    assert!(state("whole") == state("parts"), "weights or moments differ");
    assert!(
        whole.points.iter().all(|point| point.gpu_watts.is_some_and(|watts| watts > 10.0)),
        "NVML says nothing"
    );
}

/// A checkpoint contains the settings of its run, so a run whose `config.toml` was edited cannot be resumed. The data
/// may have moved if its contents are the same.
#[test]
fn an_edited_run_does_not_go_on_as_another() {
    let scratch = Scratch::new();
    scratch.file("text.txt", "Once upon a time there was a run. ".repeat(20_000));
    let run = ["--steps", "4", "--data", "text.txt", "--name", "r"];
    scratch.ok(&crate::support::small(&run));
    let config = scratch.path().join("runs/r/config.toml");
    let text = std::fs::read_to_string(&config).expect("settings");
    assert!(text.contains("smoothing = \"k\"") && text.contains("granularity = \"vector\""), "{text}");
    std::fs::write(&config, text.replace("attn = \"sagebwd\"", "attn = \"fpa\"")).expect("settings");
    let refused = scratch.fails(&["--resume", "runs/r", "--steps", "6"]);
    assert!(refused.contains("attn = fpa in") && refused.contains("allowed: attn = sagebwd"), "{refused}");
    // Settings that were added by hand are refused too.
    for (added, told) in [
        ("linear = \"fp8\"", "linear = fp8"),
        ("attn-layers = \"0=fpa\"", "attn-layers = 0=fpa"),
        ("order-seed = 3", "not set"),
    ] {
        std::fs::write(&config, format!("{added}\n{text}")).expect("settings");
        let refused = scratch.fails(&["--resume", "runs/r", "--steps", "6"]);
        assert!(refused.contains("settings were changed") && refused.contains(told), "{added}: {refused}");
    }
    std::fs::write(&config, text).expect("settings");
    std::fs::create_dir(scratch.path().join("moved")).expect("a folder");
    std::fs::rename(scratch.path().join("text.txt"), scratch.path().join("moved/text.txt")).expect("moved");
    assert!(scratch.fails(&["--resume", "runs/r", "--steps", "6"]).contains("text.txt"));
    scratch.file("other.txt", "Twice upon a time there was a run. ".repeat(20_000));
    let other = scratch.fails(&["--resume", "runs/r", "--steps", "6", "--data", "other.txt"]);
    assert!(other.contains("not what the run was trained on"), "{other}");
    let told = scratch.run(&["--resume", "runs/r", "--steps", "6", "--data", "moved/text.txt"]);
    let told = String::from_utf8_lossy(&told.stderr);
    assert!(told.contains("planned for 4 steps"), "{told}");
    assert_eq!(scratch.metrics("r").len(), 6);
}

/// A damaged line of the metrics is restored from the CSV file.
#[test]
fn damaged_metrics_are_made_again() {
    let scratch = Scratch::new();
    scratch.ok(&crate::support::small(&["--steps", "6", "--name", "r"]));
    let (before, file) = (scratch.metrics("r"), scratch.path().join("runs/r/metrics.jsonl"));
    let text = std::fs::read_to_string(&file).expect("metrics");
    std::fs::write(&file, text.replacen("\"step\":3", "\"step\"?3", 1)).expect("metrics");
    let told = scratch.run(&["--resume", "runs/r", "--steps", "8"]);
    assert!(String::from_utf8_lossy(&told.stderr).contains("was restored from metrics.csv"));
    let after = scratch.metrics("r");
    assert_eq!((after.len(), &after[..6]), (8, &before[..]));
}

/// Without validations, checkpoints are still written every `--checkpoint-minutes`. Files have the permissions of
/// the umask.
#[cfg(unix)]
#[test]
fn a_checkpoint_comes_by_the_clock() {
    use std::os::unix::fs::PermissionsExt;
    let scratch = Scratch::new();
    let run = ["--steps", "40", "--eval-every", "0", "--checkpoint-minutes", "1e-9", "--name", "r"];
    scratch.ok(&crate::support::small(&run));
    let steps = checkpoints(&run_of(&scratch, "r"));
    assert_eq!(steps, ["step-00000039", "step-00000040"]);
    let mode = |file: &str| {
        let about = std::fs::metadata(run_of(&scratch, "r").join(file)).expect("a file");
        about.permissions().mode() & 0o777
    };
    assert_eq!(mode("model.safetensors"), mode("config.toml"));
    assert_eq!(mode("checkpoints/step-00000040/state.safetensors"), mode("config.toml"));
}
