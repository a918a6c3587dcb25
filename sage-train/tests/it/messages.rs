//! The messages of runs that cannot start. Such a run leaves no files.

use crate::support::{Scratch, small};

fn write_files(scratch: &Scratch) {
    scratch.file("empty.txt", "");
    scratch.file("blank.jsonl", "\n\n");
    scratch.file("short.txt", "Too short.");
    scratch.file(
        "one-sequence.txt",
        "This text is longer than a sequence, but what is left for validation is not. ".repeat(10),
    );
    scratch.file("latin1.txt", b"caf\xe9 au lait");
    scratch.file("broken.jsonl", "{\"text\": \"good\"}\n{\"text\": 3}\n");
    scratch.file("nan.jsonl", "{\"text\": NaN}\n");
    scratch.file("broken.txt.zst", "this is not zstd");
    scratch.file("picture.png", "png");
    scratch.file("quoted.toml", "layers = \"4\"\n");
    scratch.file("huge.toml", "# ".repeat(1 << 20));
    scratch.file("none/readme.md", "nothing here");
    scratch.file("bad-key.toml", "learning-rate = 0.1\n");
    scratch.file("bad-value.toml", "tokens-per-step = \"256q\"\n");
    scratch.file("bad-type.toml", "attn = \"flash\"\n");
    scratch.file("negative.toml", "steps = -1\n");
    scratch.file("preset.toml", "preset = \"tiny\"\n");
    scratch.file("both.toml", "steps = 1\ntokens = \"4k\"\n");
    scratch.file("share.toml", "attn = \"sla2\"\nsla2-sparsity = 1.5\n");
    scratch.file("a-file", "in the way");
    scratch.file("shards/all_train_0.bin", "");
    scratch.file("shards/all_val_0.bin", "");
}

const CASES: &[(&str, &[&str])] = &[
    ("unknown flag", &["--tokens-per-stp", "256k"]),
    ("unknown attention", &["--attn", "flash"]),
    ("an attention that cannot validate", &["--attn", "fpa", "--eval-attn", "sla2"]),
    ("a tail of the form without one", &["--attn", "sla2-sparse", "--sla2-tail", "past"]),
    (
        "a context without room for SLA2",
        &["--attn", "sla2", "--context", "32", "--sla2-block", "16", "--tokens-per-step", "512"],
    ),
    ("a share of a file", &["--config", "share.toml"]),
    ("smoothing of another scheme", &["--attn", "attn-qat", "--smoothing", "qk"]),
    ("a decay that never comes", &["--decay-fraction", "0.5"]),
    ("a soft cap without logits", &["--attn", "none", "--softcap", "30"]),
    ("a rate that never falls", &["--schedule", "constant", "--min-lr", "0.5"]),
    ("a verb for training", &["train"]),
    ("data of the hub", &["--data", "hf:owner/name"]),
    ("a recipe", &["--data", "openwebtext"]),
    ("a sweep that continues from a model", &["sweep", "sla2-prose"]),
    ("not a count", &["--tokens-per-step", "256q"]),
    ("not a seed", &["--seed", "3-1"]),
    ("a step of part of a micro-batch", &["--tokens-per-step", "10000"]),
    ("a step smaller than a micro-batch", &["--tokens-per-step", "512"]),
    ("a huge micro-batch", &["--micro-batch", "1000000000000"]),
    ("a run without end", &["--steps", "1024g", "--tokens-per-step", "512g"]),
    ("no steps", &["--steps", "0"]),
    ("a warm-up without an end", &["--steps", "20", "--warmup-steps", "20"]),
    ("weights that f32 cannot hold", &["--init-std", "1e39"]),
    ("an odd head", &["--head-dim", "33"]),
    ("head_dim 0", &["--head-dim", "0"]),
    ("heads that do not divide", &["--heads", "4", "--key-heads", "3"]),
    ("a vocabulary below the bytes", &["--vocab-size", "100"]),
    ("a negative rate", &["--lr=-1"]),
    ("NaN as a rate", &["--lr", "nan"]),
    ("a granularity", &["--granularity", "rows"]),
    ("a name with a slash", &["--name", "../x"]),
    ("a number in quotes", &["--config", "quoted.toml"]),
    ("a name with a line end", &["--name", "a\nb"]),
    ("a file that is too long for settings", &["--config", "huge.toml"]),
    ("no data", &["--data", "missing.txt"]),
    ("a pattern without quotes", &["--data", "short.txt", "latin1.txt"]),
    ("a negative temperature", &["sample", "a-run", "--temperature", "-1"]),
    ("a negative margin", &["report", "a-run", "--margin", "-1"]),
    ("no corpus", &["corpus", "--megabytes", "0"]),
    ("an empty file", &["--data", "empty.txt"]),
    ("blank lines", &["--data", "blank.jsonl"]),
    ("less than a sequence", &["--data", "short.txt"]),
    (
        "a context longer than the data",
        &["--data", "one-sequence.txt", "--context", "2k", "--tokens-per-step", "32k"],
    ),
    ("not UTF-8", &["--data", "latin1.txt"]),
    ("a broken line", &["--data", "broken.jsonl"]),
    ("NaN in the data", &["--data", "nan.jsonl"]),
    ("not zstd", &["--data", "broken.txt.zst"]),
    ("an unknown kind", &["--data", "picture.png"]),
    ("a folder without text", &["--data", "none"]),
    ("the folder of runs", &["--data", "none", "--out", "none"]),
    ("a column of the built-in corpus", &["--text-field", "body"]),
    ("a column of shards", &["--data", "shards", "--text-field", "body"]),
    ("a part of shards that are divided", &["--data", "shards", "--val-fraction", "0.1"]),
    ("the folder of tokenizers", &["--name", "cache"]),
    ("no settings", &["--config", "missing.toml"]),
    ("an unknown key", &["--config", "bad-key.toml"]),
    ("a bad value", &["--config", "bad-value.toml"]),
    ("a bad choice", &["--config", "bad-type.toml"]),
    ("a negative count", &["--config", "negative.toml"]),
    ("a preset against the file's", &["--config", "preset.toml", "--preset", "mini"]),
    ("steps and tokens", &["--config", "both.toml"]),
    ("an attention twice", &["--compare", "fpa,fpa"]),
    ("a folder that cannot be", &["--out", "a-file/runs"]),
];

#[test]
fn messages() {
    let scratch = Scratch::new();
    write_files(&scratch);
    let before = listing(&scratch);
    let mut text = String::new();
    for (name, args) in CASES {
        let error = scratch.fails(args);
        let error = error[error.find("error:").unwrap_or(0)..]
            .replace(&scratch.path().display().to_string(), "SCRATCH");
        text += &format!("-- {name}\n{}\n", error.trim_end());
    }
    assert_eq!(before, listing(&scratch), "a run that cannot start leaves nothing");
    text += &messages_without_runs(&scratch);
    insta::assert_snapshot!(text);
}

/// The messages of commands whose run or folder is unsuitable or missing.
fn messages_without_runs(scratch: &Scratch) -> String {
    scratch.ok(&small(&["--steps", "1", "--name", "taken"]));
    let taken = scratch.fails(&small(&["--steps", "1", "--name", "taken"]));
    scratch.ok(&small(&["--steps", "1", "--attn", "none", "--name", "plain"]));
    std::fs::copy(
        scratch.path().join("runs/plain/model.safetensors"),
        scratch.path().join("runs/taken/model.safetensors"),
    )
    .expect("a copy");
    // Data that changes after its run has ended.
    scratch.file("moving.txt", "What was said then. ".repeat(900));
    scratch.ok(&small(&["--steps", "1", "--data", "moving.txt", "--name", "moved"]));
    scratch.file("moving.txt", "Something else stands here now. ".repeat(900));
    let probes = [
        ("other data than the run's", "runs/moved"),
        ("no run to probe", "runs/gone"),
        ("nothing to probe", "runs/plain"),
        ("foreign weights", "runs/taken"),
    ]
    .map(|(name, run)| (name, scratch.fails(&["probe", run])));
    let nowhere = [
        ("no runs to report", &["report", "nope"][..]),
        ("no folder for results", &["report", "runs/plain", "--markdown", "nope/r.md"]),
    ]
    .map(|(name, args)| (name, scratch.fails(args)));
    let told = |(name, error): &(&str, String)| {
        format!("-- {name}\n{}\n", error[error.find("error:").expect("an error")..].trim_end())
    };
    [("a name that is taken", taken)].iter().chain(&probes).chain(&nowhere).map(told).collect()
}

/// The path of every file and folder, relative to the scratch folder.
fn listing(scratch: &Scratch) -> Vec<String> {
    let mut found = Vec::new();
    let mut folders = vec![scratch.path().to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).expect("a folder").flatten() {
            if entry.path().is_dir() {
                folders.push(entry.path());
            }
            let path = entry.path();
            found.push(path.strip_prefix(scratch.path()).expect("inside").display().to_string());
        }
    }
    found.sort();
    found
}
