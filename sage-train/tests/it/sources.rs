//! The data of training and of validation: mixtures, `--val-data`, `eval --data`.

use sage_train::data::prepare::Prepared;
use sage_train::data::shard::Shard;

use crate::support::{Scratch, json_lines, small};

/// The columns of a source in a table of shares: tokens, share in percent, epochs.
fn shares(text: &str, source: &str) -> [f64; 3] {
    let row =
        text.lines().find(|line| line.contains(&format!("{source} "))).unwrap_or_else(|| panic!("{text}"));
    let columns: Vec<f64> = row
        .split_whitespace()
        .skip_while(|word| *word != source)
        .skip(1)
        .filter(|word| *word != "%")
        .map(|word| word.replace([',', '~'], "").parse().expect("a number"))
        .collect();
    columns.try_into().expect("three columns")
}

fn log(scratch: &Scratch, run: &str) -> String {
    std::fs::read_to_string(scratch.path().join("runs").join(run).join("log.txt")).expect("a log")
}

#[test]
fn sources_without_weights_are_mixed_by_their_size() {
    let scratch = Scratch::new();
    scratch.file("big.jsonl", json_lines(400_000));
    scratch.file("small.jsonl", json_lines(8_000));
    scratch.ok(&["data", "tokenizer", "big.jsonl", "--to", "t.json", "--vocab-size", "300"]);
    let run = |data: &[&str], more: &[&str]| {
        scratch.ok(&small(&[data, &["--tokenizer", "t.json", "--steps", "3"], more].concat()))
    };
    let both = ["--data", "big.jsonl", "--data", "small.jsonl"];
    run(&both, &["--name", "by-size"]);
    let (big, little) = (log(&scratch, "by-size"), log(&scratch, "by-size"));
    let ([big_tokens, big_share, big_epochs], [tokens, share, epochs]) =
        (shares(&big, "big.jsonl"), shares(&little, "small.jsonl"));
    assert!((big_share / share / (big_tokens / tokens) - 1.0).abs() < 0.05, "{big}");
    assert!((big_share + share - 100.0).abs() < 0.02 && (big_epochs - epochs).abs() < 0.02, "{big}");
    assert!(share < 5.0, "{share}");
    // Shares follow the weights, and epochs follow from the shares.
    run(&["--data", "big.jsonl=1", "--data", "small.jsonl=1"], &["--name", "even"]);
    let [tokens, share, epochs] = shares(&log(&scratch, "even"), "small.jsonl");
    assert_eq!(share, 50.0);
    assert!((epochs - 3.0 * 256.0 * 0.5 / tokens).abs() < 0.006, "{epochs}");
    // `--dry-run` shows the same shares. It estimates a text file's number of tokens, and marks estimates with `~`.
    let planned = run(&both, &["--dry-run"]);
    assert!(shares(&planned, "small.jsonl")[1] < 5.0 && planned.contains('~'), "{planned}");
    scratch.ok(&["data", "prepare", "big.jsonl", "--tokenizer", "t.json", "--to", "shards"]);
    let planned = run(&["--data", "shards"], &["--dry-run"]);
    let train = Prepared::read(&scratch.path().join("shards")).expect("a list").train;
    assert_eq!(shares(&planned, "shards")[..2], [train.tokens as f64, 100.0]);
    // `--dry-run` counts only training tokens, and refuses what a run would refuse.
    scratch.file("both/big.jsonl", json_lines(400_000));
    scratch.file("both/small.jsonl", json_lines(8_000));
    let planned = run(&["--data", "both", "--val-data", "both/big.jsonl"], &["--dry-run"]);
    assert!(shares(&planned, "both")[0] < 3000.0, "{planned}");
    for (data, why) in [
        (&["--data", "both", "--data", "both/big.jsonl"][..], "twice"),
        (&["--data", "big.jsonl", "--val-data", "big.jsonl"], "kept for validation"),
    ] {
        let error =
            scratch.fails(&small(&[data, &["--steps", "1", "--tokenizer", "t.json", "--dry-run"]].concat()));
        assert!(error.contains(why), "{error}");
    }
    let error = scratch.fails(&small(&["--data", "big.jsonl=0.7", "--data", "small.jsonl", "--steps", "1"]));
    assert!(error.contains("some sources of --data have weights"), "{error}");
}

#[test]
fn data_that_is_named_is_evaluated_as_a_whole() {
    let scratch = Scratch::new();
    scratch.file("train.jsonl", json_lines(200_000));
    scratch.file("other.jsonl", json_lines(50_000));
    scratch.ok(&small(&["--data", "train.jsonl", "--steps", "2", "--name", "run"]));
    let tokenizer = ["--tokenizer", "runs/run/tokenizer.json", "--to"];
    let prepare = |data: &[&str], to| scratch.ok(&[&["data", "prepare"], data, &tokenizer, &[to]].concat());
    prepare(&["other.jsonl", "--val-fraction", "0"], "all");
    let tokens = Prepared::read(&scratch.path().join("all")).expect("a list").train.tokens;
    let evaluated = |data: &str| {
        let text = scratch.ok(&["eval", "runs/run", "--data", data, "--all"]);
        let words: Vec<&str> = text.split_whitespace().skip_while(|word| *word != "tokens").collect();
        assert_eq!(words[2], "loss", "all of it: {text}");
        words[1].replace(',', "").parse::<u64>().expect("a number")
    };
    // Every sequence of 32 tokens that is followed by a token is evaluated.
    assert_eq!(evaluated("other.jsonl"), (tokens - 1) / 32 * 32);
    assert_eq!(evaluated("all"), (tokens - 1) / 32 * 32);
    scratch.file("content.jsonl", json_lines(50_000).replace("\"text\"", "\"content\""));
    let content = ["--data", "content.jsonl", "--text-field", "content"];
    assert_eq!(
        scratch.loss(&[&["eval", "runs/run", "--all"], &content[..]].concat()),
        scratch.loss(&["eval", "runs/run", "--all", "--data", "other.jsonl"])
    );
    scratch.ok(&[&["probe", "runs/run", "--sequences", "1"], &content[..]].concat());
    // If prepared data has validation shards, only these are evaluated.
    prepare(&["other.jsonl", "--val-fraction", "0.3"], "parts");
    let validation = Prepared::read(&scratch.path().join("parts")).expect("a list").validation.tokens;
    assert_eq!(evaluated("parts"), (validation - 1) / 32 * 32);
    let output = scratch.run(&["eval", "runs/run", "--data", "train.jsonl"]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && said.contains("was trained on train.jsonl"), "{said}");
}

#[test]
fn validation_data_may_be_named() {
    let scratch = Scratch::new();
    scratch.file("text/train.jsonl", json_lines(100_000));
    scratch.file("text/validation.jsonl", json_lines(30_000).replace("the", "THE"));
    let named = ["--data", "text", "--val-data", "text/validation.jsonl", "--steps", "2"];
    scratch.ok(&small(&[&named[..], &["--name", "folder"]].concat()));
    let apart = ["--data", "text/train.jsonl", "--val-data", "text/validation.jsonl", "--steps", "2"];
    scratch.ok(&small(&[&apart[..], &["--name", "apart"]].concat()));
    let losses = |run: &str| scratch.metrics(run).iter().map(|p| (p.loss, p.val_loss)).collect::<Vec<_>>();
    assert_eq!(losses("folder"), losses("apart"));
    let of_run = scratch.loss(&["eval", "runs/apart", "--all"]);
    assert_eq!(of_run, scratch.loss(&["eval", "runs/apart", "--all", "--data", "text/validation.jsonl"]));
    scratch.ok(&["--resume", "runs/apart", "--steps", "3"]);
    scratch.fails(&small(&[&apart[..], &["--val-fraction", "0.1"]].concat()));

    // With `data prepare --val-data FILE`, the validation shard contains exactly the tokens of FILE.
    let tokenizer = ["--tokenizer", "runs/apart/tokenizer.json"];
    let prepare = |more: &[&str]| scratch.ok(&[&["data", "prepare"], more, &tokenizer].concat());
    prepare(&["text", "--val-data", "text/validation.jsonl", "--to", "both"]);
    prepare(&["text/validation.jsonl", "--to", "alone", "--val-fraction", "0"]);
    let read = |shard: &str| {
        let (shard, mut all) = (Shard::open(&scratch.path().join(shard)).expect("a shard"), Vec::new());
        shard.read(0, shard.len() as usize, &mut all).expect("tokens");
        all
    };
    assert!(read("both/val_000001.bin") == read("alone/train_000001.bin"));
    let listed = Prepared::read(&scratch.path().join("both")).expect("a list");
    assert_eq!(listed.files.len(), 2);
    scratch.ok(&small(&["--data", "both", "--steps", "2", "--name", "shards"]));
    for (a, b) in losses("shards").iter().zip(&losses("apart")) {
        assert!(a.1.zip(b.1).is_none_or(|(a, b)| (a - b).abs() < 0.1));
    }
}
