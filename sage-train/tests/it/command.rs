//! Help, dry runs, the precedence of settings, and the command `corpus`.

use crate::support::{Scratch, small};

#[test]
fn dry_run_prints_the_papers_run_and_writes_nothing() {
    let scratch = Scratch::new();
    insta::assert_snapshot!(scratch.ok(&[
        "--dry-run",
        "--preset",
        "325m",
        "--tokens-per-step",
        "256k",
        "--tokens",
        "78g"
    ]));
    insta::assert_snapshot!(scratch.ok(&["--dry-run"]));
    assert_eq!(std::fs::read_dir(scratch.path()).expect("a folder").count(), 0);
}

#[test]
fn help_shows_every_setting() {
    insta::assert_snapshot!(Scratch::new().ok(&["--help"]));
}

#[test]
fn the_reference_of_settings_is_what_is_declared() {
    let page = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/settings.md");
    let (now, written) =
        (sage_train::config::reference(), std::fs::read_to_string(&page).unwrap_or_default());
    if std::env::var("INSTA_UPDATE").is_ok_and(|update| update == "always") {
        std::fs::write(&page, &now).expect("docs/settings.md");
        return;
    }
    assert!(
        now == written,
        "docs/settings.md is old: INSTA_UPDATE=always cargo test --release -p sage-train reference_of_settings"
    );
}

/// The help lists every file ending that is read, because users would not try an ending that is not in the help.
#[test]
fn the_help_names_every_ending_that_is_read() {
    let scratch = Scratch::new();
    let help = scratch.ok(&["--help"]);
    scratch.file("a.doc", "text");
    let error = scratch.fails(&["--data", "a.doc"]);
    let allowed = error.lines().find(|line| line.contains("allowed:")).expect("what is allowed");
    let endings =
        allowed.split(|c: char| !c.is_alphanumeric() && c != '.').filter(|word| word.starts_with('.'));
    let endings: Vec<&str> = endings.collect();
    assert!(endings.len() > 8, "{error}");
    for ending in endings {
        let data = help.split("--data").nth(1).expect("a flag").split("--val-data").next().expect("its help");
        assert!(data.contains(ending), "{ending}: {data}");
    }
}

#[test]
fn flags_win_over_the_file_and_the_file_over_the_preset() {
    let scratch = Scratch::new();
    scratch.file(
        "run.toml",
        "preset = \"mini\"\nattn = \"fpa\"\ntokens-per-step = \"16k\"\ntokens = 1_000_000\nlr = 1e-3\n",
    );
    let text = scratch.ok(&[
        "--dry-run",
        "--config",
        "run.toml",
        "--attn",
        "sagebwd",
        "--granularity",
        "group-8",
        "--steps",
        "7",
    ]);
    assert!(text.contains("6 layers, width 384"), "{text}");
    assert!(text.contains("SageBwd, smoothing k, granularity group-8"), "{text}");
    assert!(text.contains("7 steps of 16,384 (16k)") && text.contains("lr 1.00e-3"), "{text}");
    let text = scratch.ok(&["--dry-run", "--config", "run.toml"]);
    assert!(text.contains("62 steps of 16,384"), "{text}");
}

#[test]
fn corpus_is_deterministic_and_may_be_cut_off() {
    let scratch = Scratch::new();
    let corpus = |seed: &str| scratch.ok(&["corpus", "--megabytes", "1", "--seed", seed]);
    let text = corpus("0");
    assert!(text.len() >= 1_000_000 && text.len() < 1_100_000);
    assert_eq!(text, corpus("0"));
    assert_ne!(text, corpus("1"));

    // The command succeeds if its reader closes the pipe early, as `head` does.
    let mut child = std::process::Command::new(env!("CARGO_BIN_EXE_sage-train"))
        .args(["corpus", "--megabytes", "50"])
        .stdout(std::process::Stdio::piped())
        .spawn()
        .expect("the command starts");
    drop(child.stdout.take());
    assert!(child.wait().expect("an end").success());
}

/// Results replace only an earlier file of their kind, and links are followed. Devices are written to directly.
#[test]
fn results_replace_no_file_of_another_kind() {
    let scratch = Scratch::new();
    scratch.ok(&small(&["--steps", "2", "--name", "r"]));
    let kept = ["tokens.bin", "words.jsonl", "page.txt"].map(|name| scratch.file(name, "precious"));
    let flags = [["--csv", "tokens.bin"], ["--markdown", "words.jsonl"], ["--html", "page.txt"]];
    for [flag, file] in flags {
        let error = scratch.fails(&["report", "runs/r", flag, file]);
        assert!(error.contains("the extension of the output") && error.contains("hint:"), "{error}");
    }
    assert!(kept.iter().all(|file| std::fs::read(file).expect("a file") == b"precious"));
    for _ in 0..2 {
        scratch.ok(&["report", "runs/r", "--csv", "r.csv", "--html", "r.html", "--markdown", "r.md"]);
    }
    scratch.ok(&["--resume", "runs/r", "--steps", "3", "--lr", "1e-3"]);
    let table = scratch.run(&["report", "runs/r"]);
    let said = [table.stdout, table.stderr].concat();
    let said = String::from_utf8_lossy(&said);
    assert!(said.contains("settings changed when the run was resumed: lr, steps after step 2"), "{said}");
    // The report of several folders is written into the current folder, but does not replace a file that is not a
    // report.
    scratch.ok(&["report", "runs/r", "runs/r"]);
    scratch.ok(&["report", "runs/r", "runs/r"]);
    scratch.file("report.html", "<p>mine</p>");
    assert!(scratch.fails(&["report", "runs/r", "runs/r"]).contains("not a report"));
    #[cfg(unix)]
    {
        let metrics = scratch.path().join("runs/r/metrics.jsonl");
        std::os::unix::fs::symlink(&metrics, scratch.path().join("link.csv")).expect("a link");
        assert!(scratch.fails(&["report", "runs/r", "--csv", "link.csv"]).contains("a file of a run"));
        scratch.ok(&["report", "runs/r", "--html", "/dev/null", "--csv", "/dev/null"]);
        use std::os::unix::fs::FileTypeExt;
        let null = std::fs::metadata("/dev/null").expect("the device").file_type();
        assert!(null.is_char_device(), "the device was replaced");
    }
}

/// A file that is given twice is refused, because its text would count twice.
#[test]
fn text_that_is_given_twice_is_refused() {
    let scratch = Scratch::new();
    scratch.file("a.txt", "Some text. ".repeat(1000));
    let error = scratch.fails(&["data", "prepare", "a.txt", "./a.txt", "--to", "shards"]);
    assert!(error.contains("given twice") && error.contains("hint:"), "{error}");
    assert!(!scratch.path().join("shards").exists());
}

/// A file name with an escape sequence is valid, but neither messages nor the log contain the sequence.
#[cfg(unix)]
#[test]
fn escape_sequences_of_names_do_not_reach_terminals_and_logs() {
    let scratch = Scratch::new();
    let name = "a\u{1b}[2Jb.txt";
    let error = scratch.fails(&["--data", name]); // the error "cannot find the data" quotes the path
    assert!(error.contains(r"a\u{1b}[2Jb.txt") && !error.contains('\u{1b}'), "{error}");
    scratch.file(name, "What was said then is said again, and once more. ".repeat(400));
    let output = scratch.run(&small(&["--data", name, "--steps", "1", "--name", "r"]));
    assert!(output.status.success() && !output.stderr.contains(&0x1b));
    let log = std::fs::read_to_string(scratch.path().join("runs/r/log.txt")).expect("a log");
    assert!(log.contains(r"a\u{1b}[2Jb.txt") && !log.contains('\u{1b}'), "{log}");
}
