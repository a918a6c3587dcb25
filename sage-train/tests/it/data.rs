//! Preparing text as shards, and training on shards.

mod interrupted;

use std::path::Path;

use sage_train::data::prepare::Prepared;

use crate::support::{Scratch, json_lines, small};

/// The tokens of all shards whose name begins with `part`.
fn tokens(folder: &Path, part: &str) -> Vec<u32> {
    let mut files: Vec<_> = std::fs::read_dir(folder)
        .expect("a folder")
        .map(|entry| entry.expect("an entry").path())
        .filter(|path| path.extension().is_some_and(|e| e == "bin"))
        .filter(|path| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(part)))
        .collect();
    files.sort();
    let mut tokens = Vec::new();
    for file in files {
        let shard = sage_train::data::shard::Shard::open(&file).expect("a shard");
        shard.read(0, shard.len() as usize, &mut tokens).expect("tokens");
    }
    tokens
}

fn losses(scratch: &Scratch, run: &str) -> Vec<f64> {
    scratch.metrics(run).iter().map(|point| point.loss).collect()
}

#[test]
fn formats_and_sizes_of_shards_hold_the_same_tokens() {
    let scratch = Scratch::new();
    scratch.file("a.jsonl", json_lines(400_000));
    let prepare = |to: &str, more: &[&str]| {
        let common =
            ["data", "prepare", "a.jsonl", "--to", to, "--val-fraction", "0.1", "--vocab-size", "500"];
        scratch.ok(&[&common[..], more].concat());
        scratch.ok(&["data", "check", to]);
        Prepared::read(&scratch.path().join(to)).expect("a description")
    };
    let whole = prepare("whole", &[]);
    assert_eq!((whole.train.shards.len(), whole.validation.shards.len()), (1, 1));
    let small_shards = prepare("small", &["--shard-tokens", "10_000"]);
    assert!(small_shards.train.shards.len() > 8);
    prepare("wide", &["--format", "llmc-u32"]);
    let nano = prepare("nano", &["--format", "nanogpt", "--shard-tokens", "10_000"]);
    assert_eq!(nano.train.shards, ["train.bin"]);
    assert_eq!(
        nano.train.tokens * 2,
        scratch.path().join("nano/train.bin").metadata().expect("a file").len()
    );
    for other in ["small", "wide", "nano"] {
        for part in ["train", "val"] {
            let read = |folder: &str| tokens(&scratch.path().join(folder), part);
            assert!(read("whole") == read(other), "{other}, {part}");
        }
    }
    let train = tokens(&scratch.path().join("whole"), "train");
    assert_eq!(whole.train.tokens, train.len() as u64);
    let ends = train.iter().filter(|&&token| token == whole.end_of_text).count() as u64;
    assert_eq!((whole.train.documents, small_shards.train.documents), (ends, ends));
    let documents = sage_train::data::corpus::Corpus::new(5).documents(400_000);
    assert_eq!(whole.train.documents + whole.validation.documents, documents.len() as u64);
    let bytes: usize = documents.iter().map(String::len).sum();
    assert_eq!(whole.train.text_bytes + whole.validation.text_bytes, bytes as u64);
    assert_eq!(small_shards.train.text_bytes, whole.train.text_bytes);

    // Runs on all four folders have the same losses. `nano` loses its sidecars (`.bin.json`), because other programs
    // do not write them.
    for entry in std::fs::read_dir(scratch.path().join("nano")).expect("a folder").flatten() {
        if entry.file_name().to_string_lossy().ends_with(".bin.json") {
            std::fs::remove_file(entry.path()).expect("gone");
        }
    }
    for folder in ["whole", "small", "wide", "nano"] {
        scratch.ok(&small(&["--data", folder, "--steps", "3", "--name", folder, "--vocab-size", "500"]));
        assert_eq!(losses(&scratch, folder), losses(&scratch, "whole"), "{folder}");
    }
    scratch.ok(&small(&[
        "--data",
        "small/train_*.bin",
        "--steps",
        "1",
        "--name",
        "pattern",
        "--vocab-size",
        "500",
    ]));
}

#[test]
fn shards_of_a_text_are_its_tokens() {
    let scratch = Scratch::new();
    let text = sage_train::data::corpus::Corpus::new(1).documents(600_000).concat();
    scratch.file("a.txt", &text);
    scratch.ok(&["data", "prepare", "a.txt", "--to", "shards", "--vocab-size", "400"]);
    let shards = tokens(&scratch.path().join("shards"), "train");
    let tokenizer =
        sage_train::data::Tokenizer::load(&scratch.path().join("shards/tokenizer.json")).expect("one");
    let mut wanted = tokenizer.encode(&text).expect("tokens");
    wanted.push(tokenizer.end_of_text());
    assert!(shards == wanted);
    assert_eq!(tokenizer.decode(&shards[..shards.len() - 1]).expect("text"), text);
}

#[test]
fn every_kind_of_input_gives_the_same_shards() {
    let scratch = Scratch::new();
    let lines = json_lines(300_000).replace("\"text\"", "\"content\"");
    let half = lines.len() / 2 + lines[lines.len() / 2..].find('\n').expect("a line") + 1;
    scratch.file("all.jsonl", &lines);
    scratch.file("parts/a.jsonl.zst", zstd::encode_all(&lines.as_bytes()[..half], 3).expect("zstd"));
    scratch.file("parts/b.jsonl", &lines[half..]);
    scratch.file("parts/readme.md", "passed over");
    let flags = ["--text-field", "content", "--vocab-size", "400"];
    scratch.ok(&[&["data", "tokenizer", "all.jsonl", "--to", "t.json"][..], &flags].concat());
    let flags = ["--text-field", "content", "--tokenizer", "t.json"];
    for (to, inputs) in [
        ("one", vec!["all.jsonl"]),
        ("folder", vec!["parts"]),
        ("pattern", vec!["parts/*.jsonl*"]),
        ("list", vec!["parts/a.jsonl.zst", "parts/b.jsonl"]),
    ] {
        scratch.ok(&[&["data", "prepare", "--to", to][..], &inputs, &flags].concat());
        let read = |folder: &str| tokens(&scratch.path().join(folder), "train");
        assert!(read(to) == read("one"), "{to}");
    }
}

#[test]
fn several_sources_are_mixed_by_weight_and_come_back_from_the_config() {
    let scratch = Scratch::new();
    scratch.file("words.txt", "one two three four five six seven ".repeat(2000));
    scratch.file("digits.txt", "31415926535897932384626433832795 ".repeat(2000));
    let mix = |name: &str, weights: [&str; 2]| {
        let data = [format!("words.txt={}", weights[0]), format!("digits.txt={}", weights[1])];
        scratch.ok(&small(&["--data", &data[0], "--data", &data[1], "--steps", "4", "--name", name]));
    };
    mix("even", ["1", "1"]);
    mix("scaled", ["3", "3"]);
    mix("uneven", ["9", "1"]);
    assert_eq!(losses(&scratch, "even"), losses(&scratch, "scaled"));
    assert_ne!(losses(&scratch, "even"), losses(&scratch, "uneven"));
    scratch.ok(&["--config", "runs/uneven/config.toml", "--name", "again"]);
    assert_eq!(losses(&scratch, "uneven"), losses(&scratch, "again"));
}

#[test]
fn attention_is_masked_by_document_if_requested() {
    let scratch = Scratch::new();
    // Short documents that are independent of each other.
    let lines: String =
        (0..3000).map(|n| format!("{{\"text\": \"{} is {}\"}}\n", n, n * 7919 % 1000)).collect();
    scratch.file("a.jsonl", lines);
    for (name, mask) in [("off", "off"), ("on", "on"), ("again", "on")] {
        let flags = ["--data", "a.jsonl", "--document-mask", mask, "--steps", "4", "--name", name];
        scratch.ok(&small(&flags));
    }
    assert_eq!(losses(&scratch, "on"), losses(&scratch, "again"));
    assert_ne!(losses(&scratch, "on"), losses(&scratch, "off"));
}

#[test]
fn a_run_says_that_its_validation_data_is_short() {
    let scratch = Scratch::new();
    scratch.file("a.txt", "one two three four five six seven ".repeat(2000));
    let short = |name: &str, tokens: &str| {
        scratch.ok(&small(&["--data", "a.txt", "--steps", "1", "--name", name, "--eval-tokens", tokens]));
        let log = scratch.path().join("runs").join(name).join("log.txt");
        let log = std::fs::read_to_string(log).expect("a log");
        log.contains("validation data is shorter than --eval-tokens")
    };
    assert!(short("long", "1m") && !short("short", "64"));
}

#[test]
fn the_sequences_of_a_run_can_be_written_out() {
    let scratch = Scratch::new();
    scratch.file("a.jsonl", json_lines(200_000));
    scratch.ok(&["data", "prepare", "a.jsonl", "--to", "shards", "--vocab-size", "300"]);
    let of = |steps: &str, to: &str| {
        scratch.ok(&small(&["--data", "shards", "--steps", steps, "--write-batches", to]));
        let shard = sage_train::data::shard::Shard::open(&scratch.path().join(to)).expect("a shard");
        let mut tokens = Vec::new();
        shard.read(0, shard.len() as usize, &mut tokens).expect("tokens");
        tokens
    };
    let (two, three) = (of("2", "two.bin"), of("3", "three.bin"));
    // 256 tokens per step are eight sequences of 32, each written with its next token.
    assert_eq!((two.len(), three.len()), (2 * 8 * 33, 3 * 8 * 33));
    assert!(two == three[..two.len()]);
    let all = tokens(&scratch.path().join("shards"), "train");
    for sequence in two.chunks(33) {
        let places = (0..all.len() - 32).step_by(32);
        assert_eq!(places.filter(|&at| all[at..at + 33] == *sequence).count(), 1);
    }
    assert!(!scratch.path().join("runs").exists());
}

#[test]
fn messages_about_data() {
    let scratch = Scratch::new();
    scratch.file("a.jsonl", json_lines(200_000));
    scratch.file("blank.txt", " \n");
    scratch.file("zero.txt", "text\0text");
    scratch.file("broken.txt.gz", "not gzip");
    scratch.file("broken.parquet", "PAR1 not parquet PAR1");
    scratch.file("no-tokenizer/train.bin", vec![7; 4000]);
    scratch.file("not-a-tokenizer.json", "{}");
    scratch.file("nothing/readme.md", "");
    scratch.ok(&["data", "prepare", "a.jsonl", "--to", "shards", "--vocab-size", "400"]);
    scratch.ok(&["data", "prepare", "a.jsonl", "--to", "other", "--vocab-size", "420"]);
    let shard = |folder: &str| scratch.path().join(folder).join("train_000001.bin");
    let whole = std::fs::read(shard("shards")).expect("a shard");
    scratch.file("cut/train_000001.bin", &whole[..whole.len() - 2]);
    let mut foreign = whole.clone();
    foreign[4] = 9;
    scratch.file("version/train_000001.bin", &foreign);
    let to = ["--to", "new"];
    let prepare = |inputs: &[&'static str]| [&["data", "prepare"][..], inputs, &to].concat();
    let mut text = String::new();
    for (name, args) in [
        ("nothing there", prepare(&["missing"])),
        ("nothing in it", prepare(&["blank.txt"])),
        ("no file in it", prepare(&["nothing"])),
        ("a zero byte", prepare(&["zero.txt"])),
        ("not gzip", prepare(&["broken.txt.gz"])),
        ("not parquet", prepare(&["broken.parquet"])),
        ("no such field", prepare(&["a.jsonl", "--text-field", "content"])),
        ("tokens already", prepare(&["shards"])),
        ("not a name", prepare(&["hf:../etc"])),
        ("not a tokenizer", prepare(&["a.jsonl", "--tokenizer", "not-a-tokenizer.json"])),
        ("no tokenizer", prepare(&["a.jsonl", "--tokenizer", "missing.json"])),
        ("a folder that exists", vec!["data", "prepare", "a.jsonl", "--to", "shards"]),
        ("no shards to check", vec!["data", "check", "nothing"]),
        ("a shard that is cut off", vec!["data", "check", "cut"]),
        ("a shard of another version", vec!["data", "check", "version"]),
        ("shards without a tokenizer", vec!["--data", "no-tokenizer"]),
        ("two tokenizers", vec!["--data", "shards", "--data", "other"]),
        ("text beside shards", vec!["--data", "."]),
        ("a weight of nothing", vec!["--data", "a.jsonl=0"]),
        ("a vocabulary too small", vec!["--data", "shards", "--vocab-size", "300"]),
    ] {
        let error = scratch.fails(&args);
        text += &format!("-- {name}\n{}\n", error[error.find("error:").expect("an error")..].trim_end());
    }
    // A preparation that fails leaves no folder.
    assert!(!scratch.path().join("new").exists() && !scratch.path().join("new.partial").exists());
    let hashes = regexless(&text);
    insta::assert_snapshot!(hashes);
}

/// Replaces 12-digit hashes by `HASH`, because they may differ between builds.
fn regexless(text: &str) -> String {
    let hidden = |word: &str| word.len() == 12 && word.bytes().all(|b| b.is_ascii_hexdigit());
    text.lines()
        .map(|line| {
            line.split(' ').map(|w| if hidden(w) { "HASH" } else { w }).collect::<Vec<_>>().join(" ") + "\n"
        })
        .collect()
}

/// If a shard was changed after preparation, a run fails, and `data check` reports the shard.
#[test]
fn changed_bytes_of_shards_end_a_run() {
    let scratch = Scratch::new();
    scratch.file("a.jsonl", json_lines(300_000));
    scratch.ok(&[
        "data",
        "prepare",
        "a.jsonl",
        "--to",
        "shards",
        "--vocab-size",
        "300",
        "--shard-tokens",
        "20k",
    ]);
    let run = small(&["--data", "shards", "--steps", "6"]);
    scratch.ok(&run);
    let shard = scratch.path().join("shards/train_000003.bin");
    let mut bytes = std::fs::read(&shard).expect("a shard");
    let middle = (bytes.len() / 2) & !1;
    // The changed token is also in the vocabulary, so only the sidecar shows the change.
    bytes[middle] ^= 1;
    std::fs::write(&shard, bytes).expect("a shard");
    let error = scratch.fails(&run);
    assert!(error.contains("train_000003.bin does not match its .bin.json file"), "{error}");
    assert!(error.contains("hint:"), "{error}");
    let error = scratch.fails(&["data", "check", "shards"]);
    assert!(error.contains("train_000003.bin"), "{error}");
}

#[test]
fn lines_that_end_as_on_windows_are_read_as_on_unix() {
    let scratch = Scratch::new();
    let text = "one\r\ntwo\rthree\r\n".repeat(30_000) + "\r";
    scratch.file("windows.txt", &text);
    scratch.file("unix.txt", text.replace("\r\n", "\n"));
    for name in ["windows", "unix"] {
        let file = format!("{name}.txt");
        scratch.ok(&["data", "prepare", &file, "--to", name, "--vocab-size", "300"]);
    }
    let of = |name: &str| tokens(&scratch.path().join(name), "train");
    assert!(of("windows") == of("unix"));
}

/// Hidden files in a folder are not read, and the byte order mark of a file is not part of its text. A file in two
/// sources is refused. A missing shard ends a run.
#[test]
fn what_is_no_text_is_not_read_as_such() {
    let scratch = Scratch::new();
    let text = "Once upon a time there was a run.\n".repeat(3000);
    let tokens = |data: &[&str], name: &str| {
        let flags = [data, &["--steps", "1", "--name", name]].concat();
        scratch.ok(&crate::support::small(&flags));
        let log =
            std::fs::read_to_string(scratch.path().join("runs").join(name).join("log.txt")).expect("a log");
        let line = log.lines().find(|line| line.contains("training and")).expect("a summary");
        // The line without its time.
        line.split_once("Z ").expect("a time").1.to_owned()
    };
    scratch.file("plain/a.txt", &text);
    scratch.file("marked/a.txt", format!("\u{feff}{text}"));
    scratch.file("marked/.a.txt.swp.txt", "x".repeat(5000));
    scratch.file("marked/.git/b.txt", "y".repeat(5000));
    assert_eq!(tokens(&["--data", "plain"], "p"), tokens(&["--data", "marked"], "m"));
    let twice = crate::support::small(&["--data", "plain", "--data", "plain/a.txt", "--steps", "1"]);
    assert!(scratch.fails(&twice).contains("a file is given twice"));

    let docs: String = (0..8000)
        .map(|n| format!("{{\"text\": \"Document {n} has some words in it, and ends.\"}}\n"))
        .collect();
    scratch.file("docs.jsonl", docs);
    let shards = ["--to", "shards", "--vocab-size", "300", "--shard-tokens", "64k"];
    scratch.ok(&[&["data", "prepare", "docs.jsonl"], &shards[..]].concat());
    let train = crate::support::small(&["--data", "shards", "--steps", "1"]);
    scratch.ok(&train);
    let listed = std::fs::read_to_string(scratch.path().join("shards/dataset.json")).expect("a list");
    let name =
        listed.split('"').find(|word| word.ends_with(".bin") && word.contains("train")).expect("a shard");
    std::fs::remove_file(scratch.path().join("shards").join(name)).expect("it goes");
    let missing = scratch.fails(&train);
    assert!(missing.contains("a shard is missing") && missing.contains(name), "{missing}");
}

#[test]
fn bad_documents_are_skipped_if_requested_and_files_are_listed() {
    let scratch = Scratch::new();
    let mut lines = json_lines(200_000).into_bytes();
    scratch.file("text/good.jsonl", &lines);
    lines.extend(b"{\"text\": 7}\nno JSON\n{\"text\": \"caf\xe9\"}\n");
    scratch.file("text/mixed.jsonl", &lines);
    scratch.file("text/notes.md", "# not data");
    let prepare = ["data", "prepare", "text", "--vocab-size", "500", "--to"];
    scratch.fails(&[&prepare[..], &["refused"]].concat());
    assert!(!scratch.path().join("refused").exists());
    let out = scratch.ok(&[&prepare[..], &["kept", "--skip-bad"]].concat());
    assert!(out.contains("3 documents of 1 file could not be read"), "{out}");
    let kept = Prepared::read(&scratch.path().join("kept")).expect("a description");
    let [good, mixed] = &kept.files[..] else { panic!("{:?}", kept.files) };
    assert_eq!((good.skipped, mixed.skipped), (0, 3));
    assert_eq!((good.documents, good.text_bytes), (mixed.documents, mixed.text_bytes));
    assert_eq!(good.documents + mixed.documents, kept.train.documents + kept.validation.documents);
    assert_eq!(mixed.bytes, lines.len() as u64);
}
