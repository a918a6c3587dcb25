//! `--attn-layers` (a scheme for each layer) in training and in `eval`, and runs that branch off from a checkpoint.

use crate::support::{Scratch, small};

fn course(scratch: &Scratch, run: &str) -> Vec<(f64, f64)> {
    scratch.metrics(run).iter().map(|point| (point.loss, point.grad_norm)).collect()
}

#[test]
fn layers_have_the_scheme_that_is_named() {
    let scratch = Scratch::new();
    let train = |name: &str, flags: &[&str]| {
        let run = ["--layers", "3", "--steps", "4", "--name", name];
        scratch.ok(&small(&[&run[..], flags].concat()));
        course(&scratch, name)
    };
    let exact = train("exact", &["--attn", "fpa"]);
    let low = train("low", &["--attn", "sagebwd"]);
    // If all layers are unquantized, the run is bit-identical to unquantized attention; if only some are, it differs
    // from both schemes.
    assert_eq!(train("all", &["--attn", "sagebwd", "--attn-layers", "0-2=fpa"]), exact);
    let ends = train("ends", &["--attn", "sagebwd", "--attn-layers", "0,-1=fpa"]);
    assert_eq!(train("middle", &["--attn", "fpa", "--attn-layers", "1=sagebwd"]), ends);
    assert!(ends != exact && ends != low);
    // The run's folder keeps the settings, and its plan reports them.
    let plan = scratch.ok(&["--dry-run", "--config", "runs/ends/config.toml"]);
    assert!(plan.contains("; in layers 0, 2: unquantized"), "{plan}");
    let eval = |run: &str, flags: &[&str]| scratch.loss(&[&["eval", run, "--tokens", "2k"], flags].concat());
    assert_eq!(eval("runs/ends", &["--attn-layers", "0-2=fpa"]), eval("runs/ends", &["--attn", "fpa"]));
    for (flags, part) in [
        (&["--attn-layers", "3=fpa"][..], "0 to 2, or -3 to -1"),
        (&["--attn", "none", "--attn-layers", "0=fpa"], "not a setting of this attention"),
        (&["--attn-layers", "0=sla2"], "not a scheme for this setting"),
    ] {
        let error = scratch.fails(&small(&[&["--layers", "3", "--dry-run"], flags].concat()));
        assert!(error.contains(part), "{error}");
    }
}

#[test]
fn evaluations_take_settings() {
    let scratch = Scratch::new();
    let other = "sagebwd:smoothing=none";
    scratch.ok(&small(&["--attn", "fpa", "--eval-attn", other, "--steps", "4", "--name", "r"]));
    let second = scratch.metrics("r")[3].eval_attn_loss.expect("a second validation");
    let eval = |flags: &[&str]| scratch.loss(&[&["eval", "runs/r"], flags].concat());
    // Four digits are printed.
    assert!((eval(&["--attn", "sagebwd", "--smoothing", "none"]) - second).abs() < 1e-4);
    let text = std::fs::read_to_string(scratch.path().join("runs/r/config.toml")).expect("a file");
    assert!(text.contains("eval-attn = \"sagebwd:smoothing=none\""), "{text}");
    assert!(scratch.ok(&["eval", "runs/r", "--attn", "sagebwd", "--products", "scores"]).contains("SageBwd"));
    let error = scratch.fails(&["eval", "runs/r", "--products", "scores"]);
    assert!(error.contains("--products with --attn fpa"), "{error}");
}

#[test]
fn a_branch_keeps_weights_and_moments_and_leaves_its_run() {
    let scratch = Scratch::new();
    let run = [
        "--attn",
        "fpa",
        "--steps",
        "8",
        "--checkpoint-every",
        "4",
        "--checkpoint-minutes",
        "0",
        "--name",
        "a",
    ];
    scratch.ok(&small(&run));
    let files = || std::fs::read(scratch.path().join("runs/a/metrics.jsonl")).expect("metrics");
    let before = files();
    let from = "runs/a/checkpoints/step-00000004";
    let branch = |name: &str, flags: &[&str]| {
        scratch.ok(&[&["--resume", from, "--new-name", name], flags].concat());
        course(&scratch, name)
    };
    // A branch whose only layer is unquantized is bit-identical to run `a`, because the branch starts with the
    // checkpoint's weights and moments.
    let same = branch("same", &["--attn", "sagebwd", "--attn-layers", "0=fpa"]);
    assert_eq!(same, course(&scratch, "a"));
    let other = branch("other", &["--attn", "sagebwd"]);
    assert_eq!(other[..4], same[..4]);
    assert!(other[4..] != same[4..]);
    assert_eq!(files(), before, "the run that it is branched off stays");
    let starts = std::fs::read_to_string(scratch.path().join("runs/other/starts.json")).expect("starts");
    assert!(starts.contains("\"branch\"") && starts.contains("\"attn\": \"fpa\""), "{starts}");
    // A report compares the branch with its origin.
    let table = scratch.ok(&["report", "runs/a", "runs/other"]);
    assert!(table.contains("attn fpa until step 4") && table.contains("baseline"), "{table}");
    scratch.ok(&["--resume", "runs/other", "--steps", "9", "--lr", "0.001"]);
    assert_eq!(scratch.metrics("other").len(), 9);
    // The learning rate was changed after step 8, so a branch from step 8 has the earlier learning rate.
    let eight = ["--resume", "runs/other/checkpoints/step-00000008", "--new-name"];
    scratch.ok(&[&eight[..], &["early", "--steps", "9"]].concat());
    let settings =
        |run: &str| std::fs::read_to_string(scratch.path().join("runs").join(run).join("config.toml"));
    assert!(settings("other").expect("settings").contains("lr = 0.001"));
    assert!(!settings("early").expect("settings").contains("lr = 0.001"));
    let output = scratch.run(&["--config", "runs/other/config.toml", "--dry-run"]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("started from the weights of runs/a after step 4"), "{said}");
    for (flags, part) in [
        (&["--resume", "runs/a", "--attn", "sagebwd"][..], "--new-name NAME"),
        (&["--resume", from, "--new-name", "other", "--attn", "sagebwd"], "exists already"),
        (&["--resume", from, "--new-name", "x", "--attn", "none"], "do not fit this attention"),
        (&["--resume", from, "--new-name", "x", "--width", "64"], "cannot change"),
        (&["--resume", from, "--new-name", "x", "--products", "scores"], "--products"),
        (&["--resume", "auto", "--new-name", "x"], "needs a run to continue from"),
        (&["--new-name", "x"], "--resume"),
    ] {
        let error = scratch.fails(flags);
        assert!(error.contains(part), "{error}");
    }
}
