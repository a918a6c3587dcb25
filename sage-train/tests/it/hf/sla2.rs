//! Exports of runs with SLA2.

use crate::support::{Scratch, small};

/// An export contains the router, `theta` (which sets the weight of the selected blocks) and all settings. Its
/// evaluation gives the run's loss, and a run that starts from it has the same SLA2.
#[test]
fn an_export_of_sla2_is_sla2_again() {
    let scratch = Scratch::new();
    let sla2 = [
        "--attn",
        "sla2",
        "--context",
        "128",
        "--sla2-block",
        "16",
        "--sla2-blocks",
        "2",
        "--sla2-nearest",
        "1",
    ];
    let others = ["--sla2-alpha", "constant", "--sla2-numerics", "attn-qat", "--value-groups", "head-dim"];
    let stages = ["--steps", "6", "--sla2-dense-steps", "3", "--sla2-router-steps", "2", "--lr", "3e-2"];
    let tokens = ["--tokens-per-step", "512"];
    scratch.ok(&small(&[&sla2[..], &others, &stages, &tokens, &["--name", "stages"]].concat()));
    let said = scratch.ok(&["export", "runs/stages", "--to", "hf"]);
    assert!(said.contains("does not support SLA2"), "{said}");
    let path = scratch.path().join("hf/attention.json");
    let told: serde_json::Value =
        serde_json::from_str(&std::fs::read_to_string(&path).expect("a file")).expect("JSON");
    let expected = [
        ("attn", "sla2"),
        ("sla2-numerics", "attn-qat"),
        ("sla2-alpha", "constant"),
        ("value-groups", "head-dim"),
    ];
    for (key, word) in expected {
        assert_eq!(told[key], word, "{key}");
    }
    assert_eq!(
        (&told["sla2-blocks"], &told["sla2-nearest"], &told["sla2-block"]),
        (&2.into(), &1.into(), &16.into())
    );

    let text = scratch.ok(&["corpus", "--megabytes", "1", "--seed", "9"]);
    scratch.file("other.txt", &text[..20_000]);
    let data = ["--data", "other.txt", "--context", "128", "--tokens", "2k", "--device", "cpu"];
    let eval = |from: &str, attn: &[&str]| scratch.loss(&[&["eval", from], &data[..], attn].concat());
    assert_eq!(eval("runs/stages", &[]), eval("hf", &[]), "of a run and of its export");
    let printed = scratch.ok(&[&["eval", "hf"], &data[..]].concat());
    assert!(printed.contains("sla2: 2 blocks of 16 (1 nearest) and the diagonal; Attn-QAT"), "{printed}");
    assert_ne!(eval("hf", &[]), eval("hf", &["--attn", "fpa"]), "SLA2 and dense attention");
    let further = [
        "--init-from",
        "hf",
        "--context",
        "128",
        "--name",
        "further",
        "--steps",
        "2",
        "--sla2-dense-steps",
        "0",
    ];
    scratch.ok(&small(&[&further[..], &tokens].concat()));
    let log = std::fs::read_to_string(scratch.path().join("runs/further/log.txt")).expect("a log");
    assert!(log.contains("SLA2: 2 blocks of 16 (1 nearest)") && log.contains("values by head-dim"), "{log}");

    // The number of nearest blocks has an effect: the loss with 0 differs from the loss with 1.
    let far = sla2.iter().map(|&word| if word == "1" { "0" } else { word }).collect::<Vec<_>>();
    scratch.ok(&small(&[&far[..], &others, &stages, &tokens, &["--name", "far"]].concat()));
    let last = |name: &str| scratch.metrics(name).pop().expect("steps").loss;
    assert_ne!(last("far"), last("stages"), "with and without a nearest block");

    refused_where_nobody_wrote_it(&scratch, &told);
}

/// A window without a tail is exported and read as a window without a tail.
#[test]
fn an_export_of_a_window_without_a_tail_has_none() {
    let scratch = Scratch::new();
    let run = |name: &str, more: &[&str]| {
        let window =
            ["--attn", "sla2-window", "--context", "128", "--sla2-block", "16", "--sla2-blocks", "2"];
        let length = ["--steps", "6", "--sla2-dense-steps", "2", "--tokens-per-step", "512", "--name", name];
        scratch.ok(&small(&[&window[..], &length, more].concat()));
        scratch.metrics(name).pop().expect("steps").loss
    };
    let alone = run("alone", &["--sla2-tail", "none"]);
    assert_ne!(alone, run("tail", &[]), "with and without a tail");
    scratch.ok(&["export", "runs/alone", "--to", "hf"]);
    scratch.file("other.txt", &scratch.ok(&["corpus", "--megabytes", "1", "--seed", "9"])[..20_000]);
    let eval = |from: &str| {
        scratch.ok(&[
            "eval",
            from,
            "--data",
            "other.txt",
            "--context",
            "128",
            "--tokens",
            "2k",
            "--device",
            "cpu",
        ])
    };
    let (run, export) = (eval("runs/alone"), eval("hf"));
    assert_eq!(run, export);
    assert!(run.contains("sla2-window: 2 blocks of 16 and the diagonal, no tail"), "{run}");
}

/// Asserts that these are refused: an `attention.json` with an unknown key, an unknown value or a missing key, and a
/// window with nearest blocks.
fn refused_where_nobody_wrote_it(scratch: &Scratch, told: &serde_json::Value) {
    let path = scratch.path().join("hf/attention.json");
    let data = ["--data", "other.txt", "--context", "128", "--tokens", "2k", "--device", "cpu"];
    let with = |key: &str, value: serde_json::Value| {
        let mut other = told.clone();
        other[key] = value;
        std::fs::write(&path, other.to_string()).expect("a file");
        scratch.fails(&[&["eval", "hf"], &data[..]].concat())
    };
    assert!(with("sla2-bloks", 3.into()).contains("sla2-bloks"));
    assert!(with("sla2-alpha", "long".into()).contains("long"));
    assert!(with("sla2-blocks", serde_json::Value::Null).contains("without sla2-blocks"));
    let error = scratch.fails(&small(&[
        "--attn",
        "sla2-window",
        "--context",
        "128",
        "--sla2-nearest",
        "1",
        "--tokens-per-step",
        "512",
    ]));
    assert!(error.contains("--sla2-nearest has no effect on this run"), "{error}");
}
