//! The contents of reports: divergence, arms of a sweep, speeds, damaged files.

use crate::support::{Scratch, small};

const SHARED: &str = "[settings]\nlayers = 1\nwidth = 32\nheads = 2\nhead-dim = 16\nffn = 48\ncontext = 32\n\
                      vocab-size = 300\nmicro-batch = 4\ntokens-per-step = 256\ncorpus-mb = 1\neval-tokens = \"1k\"\n";

#[test]
fn a_run_with_a_finite_loss_above_chance_has_diverged() {
    let scratch = Scratch::new();
    let run = |lr: &str, name: &str| {
        small(&[
            "--attn",
            "fpa",
            "--steps",
            "40",
            "--warmup-steps",
            "0",
            "--clip",
            "0",
            "--schedule",
            "constant",
            "--lr",
            lr,
            "--name",
            name,
        ])
        .into_iter()
        .map(String::from)
        .collect::<Vec<_>>()
    };
    let args = |args: &[String]| scratch.run(&args.iter().map(String::as_str).collect::<Vec<_>>());
    assert!(args(&run("1e-3", "good")).status.success());
    let output = args(&run("10", "bad"));
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("the run has diverged") && said.contains("ln(vocabulary) = 5.704"), "{said}");
    // All files of a diverged run are written.
    let last = scratch.metrics("bad").pop().expect("steps");
    assert!(last.step == 40 && last.val_loss.is_some_and(f64::is_finite), "{last:?}");
    let ending = |text: Option<&str>| {
        let path = scratch.path().join("runs/bad/ending.json");
        text.inspect(|text| std::fs::write(&path, text).expect("a file"));
        std::fs::read_to_string(path).expect("an ending")
    };
    assert!(ending(None).contains("diverged"));
    // The report counts the run as diverged, even with the ending `finished`, which earlier versions recorded for a
    // diverged run.
    for recorded in [None, Some("{\"status\": \"finished\"}")] {
        ending(recorded);
        let text = scratch.ok(&["report", "runs/good", "runs/bad", "--csv", "runs.csv"]);
        assert!(text.contains("1 diverged"), "{text}");
        let row = text.lines().find(|line| line.contains("1 diverged")).expect("a row");
        assert!(row.contains(" - "), "no mean: {row}");
        let csv = std::fs::read_to_string(scratch.path().join("runs.csv")).expect("a file");
        assert!(csv.contains("bad,diverged"), "{csv}");
    }
}

#[test]
fn the_points_of_a_sweep_are_its_arms_and_its_report_stays_its_own() {
    let scratch = Scratch::new();
    let points = "steps = 6\neval-every = 3\n[grid]\nseed = [1, 2]\n[[points]]\nattn = \"sagebwd\"\nlr = 2e-3\n\
                  [[points]]\nattn = \"fpa\"\nlr = 1e-3\n[[points]]\nattn = \"none\"\nlr = 1e-3\n";
    let head = "about = \"Tuned rates\"\nbaseline = { attn = \"none\" }\n";
    scratch.file("s.toml", format!("{head}{SHARED}{points}"));
    let of_sweep = scratch.ok(&["sweep", "s.toml"]);
    let again = scratch.ok(&["report", "runs/s"]);
    let rows = |text: &str| text.lines().map(String::from).collect::<std::collections::BTreeSet<_>>();
    assert_eq!(rows(&of_sweep), rows(&again));
    // All arms are compared with the sweep's baseline, also an arm whose learning rate differs from the baseline's.
    for arm in ["fpa, lr 0.001", "sagebwd, lr 0.002"] {
        let row = again.lines().find(|line| line.starts_with(arm)).unwrap_or_else(|| panic!("{again}"));
        assert!(row.contains("2 pairs"), "{row}");
    }
    assert!(again.lines().any(|line| line.starts_with("none") && line.contains("baseline")), "{again}");
    let page = std::fs::read_to_string(scratch.path().join("runs/s/report.html")).expect("a page");
    assert!(page.contains("<title>Tuned rates</title>"));
    let other = scratch.ok(&["report", "runs/s", "--baseline", "attn=fpa"]);
    assert!(other.lines().any(|line| line.starts_with("fpa") && line.contains("baseline")), "{other}");
    // With `--by`, the sweep's baseline (`attn`) is not used. A value may contain commas.
    assert!(scratch.ok(&["report", "runs/s", "--by", "lr"]).contains("lr 0.002"));
    let error = scratch.fails(&["report", "runs/s", "--baseline", "products=forward,s"]);
    assert!(error.contains("no arm has") && error.contains("products = \"forward,s\""), "{error}");
}

#[test]
fn a_run_that_a_setting_does_not_change_is_planned_once_and_compared_with_all() {
    let scratch = Scratch::new();
    let grid = "steps = 2\n[grid]\nattn = [\"fpa\", \"none\"]\nqk-norm = [\"on\", \"off\"]\n";
    scratch.file("s.toml", format!("{SHARED}{grid}"));
    let text = scratch.ok(&["sweep", "s.toml"]);
    assert!(scratch.path().join("runs/s").read_dir().expect("a sweep").count() >= 3);
    let (on, off) = text.split_once("qk-norm off").unwrap_or_else(|| panic!("{text}"));
    for panel in [on, off] {
        let rows = ["fpa", "none"].map(|arm| panel.lines().any(|line| line.starts_with(arm)));
        assert_eq!(rows, [true, true], "{text}");
    }
    scratch.ok(&["report", "runs/s", "--csv", "runs.csv"]);
    let csv = std::fs::read_to_string(scratch.path().join("runs.csv")).expect("a file");
    assert_eq!(csv.lines().count(), 1 + 3, "{csv}");
}

/// The speed that a run prints at its end is also in its report.
#[test]
fn a_run_and_its_report_agree_on_the_speed() {
    let scratch = Scratch::new();
    let text = scratch.ok(&small(&["--steps", "5", "--name", "run"]));
    let of_run =
        text.lines().nth(1).and_then(|line| line.split_whitespace().nth(3)).expect("a speed").to_owned();
    let report = scratch.ok(&["report", "runs/run"]);
    let row = report.lines().find(|line| line.starts_with("sagebwd") || line.starts_with("all runs"));
    let row = row.unwrap_or_else(|| panic!("{report}")).replace(',', "");
    let (a, found) = (
        of_run.parse::<f64>().expect("a number"),
        row.split_whitespace().filter_map(|w| w.parse::<f64>().ok()),
    );
    assert!(found.into_iter().any(|b| (a - b).abs() <= 1.0), "{of_run} {row}");
}

/// A report of a run with one flipped byte fails, instead of omitting steps. `--resume` restores the metrics.
#[test]
fn a_flipped_byte_in_the_measurements_is_seen() {
    let scratch = Scratch::new();
    for name in ["r", "s"] {
        scratch.ok(&small(&["--steps", "6", "--eval-every", "3", "--probe-every", "3", "--name", name]));
    }
    let before = scratch.ok(&["report", "runs/r"]);
    for (file, old, new) in [
        ("metrics.jsonl", "\"step\":4", "\"step\"?4"),
        ("metrics.jsonl", "\"val_loss\":5", "\"val_loss\":4"),
        ("probes.jsonl", "\"context\":32", "\"context\":33"),
    ] {
        let path = scratch.path().join("runs/r").join(file);
        let whole = std::fs::read_to_string(&path).expect("a file");
        assert!(whole.contains(old), "{old} in {whole}");
        std::fs::write(&path, whole.replacen(old, new, 1)).expect("a file");
        let error = scratch.fails(&["report", "runs/r"]);
        assert!(error.contains(&format!("{file} is damaged")) && error.contains("hint:"), "{error}");
        let both = scratch.ok(&["report", "runs/r", "runs/s"]);
        assert!(both.contains("warning: runs/r is left out") && both.contains("is damaged"), "{both}");
        match file {
            "metrics.jsonl" => drop(scratch.ok(&["--resume", "runs/r"])),
            _ => std::fs::write(&path, whole).expect("a file"),
        }
        assert_eq!(scratch.ok(&["report", "runs/r"]), before);
    }
    // A damaged last newline of a finished run is an error, unlike the incomplete last line of an interrupted run.
    let path = scratch.path().join("runs/r/metrics.jsonl");
    let whole = std::fs::read_to_string(&path).expect("a file");
    std::fs::write(&path, whole.trim_end().to_owned() + "*").expect("a file");
    assert!(scratch.fails(&["report", "runs/r"]).contains("5 of 6 steps"));
    // A damaged `starts.json` is an error: `sample` must not skip its check of the tokenizer, and `--resume` must not
    // lose the recorded starts.
    std::fs::write(&path, whole).expect("a file");
    std::fs::write(scratch.path().join("runs/r/starts.json"), "[{").expect("a file");
    assert!(scratch.fails(&["sample", "runs/r", "Once"]).contains("starts.json"));
    assert!(scratch.fails(&["--resume", "runs/r", "--steps", "8"]).contains("starts.json"));
}
