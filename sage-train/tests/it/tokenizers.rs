//! Tokenizers of other projects: which token ends a document, leading spaces, added tokens, and tokenizers that change
//! the text.

use sage_train::data::Tokenizer;
use sage_train::data::prepare::Prepared;
use sage_train::data::shard::Shard;
use serde_json::{Value, json};

use crate::support::{Scratch, json_lines, small};

/// A tokenizer of SentencePiece's kind. Its vocabulary has the `added` tokens, a token for each byte, printable
/// characters with `▁` for the space, and results of merges.
fn sentence_piece(normalizer: Value, added: &[(&str, bool)]) -> Value {
    let mut vocab = serde_json::Map::new();
    let mut add = |entry: String| {
        let id = vocab.len();
        vocab.entry(entry).or_insert(id.into());
    };
    added.iter().for_each(|(name, _)| add((*name).into()));
    (0..256).for_each(|byte| add(format!("<0x{byte:02X}>")));
    (33..127u8).for_each(|byte| add(char::from(byte).into()));
    for entry in ["▁", "th", "the", "▁the", "▁r", "er", "an", "▁a"] {
        add(entry.into());
    }
    let merges = ["t h", "th e", "▁ the", "▁ r", "e r", "a n", "▁ a"];
    let added: Vec<Value> = added
        .iter()
        .enumerate()
        .map(|(id, (content, special))| {
            json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
                   "normalized": false, "special": special})
        })
        .collect();
    let strips = normalizer.to_string().contains("Prepend");
    let mut decoders = vec![
        json!({"type": "Replace", "pattern": {"String": "▁"}, "content": " "}),
        json!({"type": "ByteFallback"}),
        json!({"type": "Fuse"}),
    ];
    if strips {
        decoders.push(json!({"type": "Strip", "content": " ", "start": 1, "stop": 0}));
    }
    json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": added, "normalizer": normalizer,
        "pre_tokenizer": null, "post_processor": null, "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {"type": "BPE", "dropout": null, "unk_token": "<unk>", "continuing_subword_prefix": null,
                  "end_of_word_suffix": null, "fuse_unk": true, "byte_fallback": true, "ignore_merges": false,
                  "vocab": vocab, "merges": merges}
    })
}

fn spaces() -> Value {
    json!({"type": "Replace", "pattern": {"String": " "}, "content": "▁"})
}

/// As in Llama 2: a space before every text.
fn prepended() -> Value {
    json!({"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, spaces()]})
}

const LLAMA: [(&str, bool); 3] = [("<unk>", true), ("<s>", true), ("</s>", true)];

fn read(scratch: &Scratch, shard: &str) -> Vec<u32> {
    let (shard, mut all) = (Shard::open(&scratch.path().join(shard)).expect("a shard"), Vec::new());
    shard.read(0, shard.len() as usize, &mut all).expect("tokens");
    all
}

fn prepared(scratch: &Scratch, folder: &str) -> Prepared {
    Prepared::read(&scratch.path().join(folder)).expect("a list")
}

#[test]
fn the_token_that_ends_a_document_is_found_or_named() {
    let scratch = Scratch::new();
    // Gemma's `</s>` is a tag of HTML, which is not a special token.
    let added =
        [("<pad>", true), ("<eos>", true), ("<unk>", true), ("<s>", false), ("</s>", false), ("[SEP]", true)];
    scratch.file("t/tokenizer.json", sentence_piece(spaces(), &added).to_string());
    scratch.file("a.jsonl", "{\"text\": \"Old <s>price</s> new price.\"}\n{\"text\": \"The river ran.\"}\n");
    let prepare = |to: &str, more: &[&str]| {
        let args = ["data", "prepare", "a.jsonl", "--tokenizer", "t", "--to", to, "--val-fraction", "0"];
        scratch.ok(&[&args[..], more].concat());
        (
            prepared(&scratch, to).end_of_text,
            *read(&scratch, &format!("{to}/train_000001.bin")).last().expect("one"),
        )
    };
    assert_eq!(prepare("found", &[]), (1, 1));
    assert_eq!(prepare("named", &["--end-of-text", "[SEP]"]), (5, 5));
    scratch.file("t/tokenizer_config.json", json!({"eos_token": {"content": "[SEP]"}}).to_string());
    assert_eq!(prepare("configured", &[]), (5, 5));
    // The shards record the chosen end-of-text token, and a run on the shards uses this token.
    assert_eq!(Tokenizer::load(&scratch.path().join("named/tokenizer.json")).expect("one").end_of_text(), 5);
    let train = ["--data", "named", "--vocab-size", "512", "--context", "8", "--val-fraction", "0.3"];
    let train = small(&[&train[..], &["--steps", "1", "--name", "run"]].concat());
    scratch.ok(&train);
    let of_run = scratch.path().join("runs/run/tokenizer.json");
    assert_eq!(Tokenizer::load(&of_run).expect("one").end_of_text(), 5);
    let error = scratch.fails(&[&train[..], &["--end-of-text", "<eos>", "--name", "other"]].concat());
    assert!(
        error.contains("the documents in the shards do not end with the tokenizer's end-of-text token"),
        "{error}"
    );
    let to = ["--to", "x", "--end-of-text", "</end>"];
    let error = scratch.fails(&[&["data", "prepare", "a.jsonl", "--tokenizer", "t"][..], &to].concat());
    assert!(error.contains("no token `</end>`") && error.contains("<eos>, <unk>, [SEP]"), "{error}");
}

/// The end-of-text token of a WordPiece tokenizer is not recognized by its name, so the user must name it.
#[test]
fn word_piece_works_with_a_named_end_and_says_what_it_changes() {
    let scratch = Scratch::new();
    let entries = ["[UNK]", "[SEP]", "the", "river", "ran", "##s", ".", "over"];
    let vocab: serde_json::Map<_, _> =
        entries.iter().enumerate().map(|(id, entry)| ((*entry).to_owned(), id.into())).collect();
    let special = |id: u32, content: &str| {
        json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false,
               "special": true})
    };
    let tokenizer = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [special(0, "[UNK]"), special(1, "[SEP]")],
        "normalizer": {"type": "BertNormalizer", "clean_text": true, "handle_chinese_chars": true, "strip_accents": null,
                       "lowercase": true},
        "pre_tokenizer": {"type": "BertPreTokenizer"}, "post_processor": null,
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": true},
        "model": {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##",
                  "max_input_chars_per_word": 100, "vocab": vocab}
    });
    scratch.file("t.json", tokenizer.to_string());
    let text = "The river ran over stones. ".repeat(200);
    scratch.file("a.txt", &text);
    let args = ["data", "prepare", "a.txt", "--tokenizer", "t.json", "--to", "out"];
    assert!(scratch.fails(&args).contains("--end-of-text"));
    let output = scratch.run(&[&args[..], &["--end-of-text", "[SEP]"]].concat());
    let said = String::from_utf8_lossy(&output.stderr) + String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{said}");
    // `stones` is unknown, and capitals are lost.
    assert!(said.contains("changes text") && said.contains("200 of 1200 tokens are `[UNK]`"), "{said}");
    let prepared = prepared(&scratch, "out");
    assert_eq!((prepared.unknown_tokens, prepared.train.text_bytes), (200, text.len() as u64));
}

#[test]
fn long_texts_come_back_as_they_were() {
    let scratch = Scratch::new();
    let words = "the river ran over the stones and the water ran on ".repeat(6000);
    let lines = words.replace(" and ", "\n");
    let texts = [words, lines, "a".repeat(200_000), " the".repeat(3), "x".into()];
    let metaspace = |scheme: &str| {
        let mut tokenizer = sentence_piece(Value::Null, &LLAMA);
        let part = json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": false});
        tokenizer["pre_tokenizer"] = part.clone();
        tokenizer["decoder"] =
            json!({"type": "Sequence", "decoders": [{"type": "ByteFallback"}, part, {"type": "Fuse"}]});
        tokenizer
    };
    for (name, tokenizer) in [
        ("prepend", sentence_piece(prepended(), &LLAMA)),
        ("none", sentence_piece(spaces(), &LLAMA)),
        ("first", metaspace("first")),
        ("always", metaspace("always")),
    ] {
        let path = scratch.file(&format!("{name}.json"), tokenizer.to_string());
        let tokenizer = Tokenizer::load(&path).expect("a tokenizer");
        for text in &texts {
            // Metaspace treats a space at the beginning of a text as the space that it would insert.
            if text.starts_with(' ') && ["first", "always"].contains(&name) {
                continue;
            }
            let ids = tokenizer.encode(text).expect("ids");
            assert!(tokenizer.decode(&ids).expect("text") == *text, "{name}: {:.40}..", text);
        }
    }
    // `data prepare` reads a file in parts, which gives the same tokens as the whole text.
    scratch.file("a.txt", &texts[1]);
    scratch.ok(&["data", "prepare", "a.txt", "--tokenizer", "prepend.json", "--to", "out"]);
    let tokenizer = Tokenizer::load(&scratch.path().join("prepend.json")).expect("a tokenizer");
    let mut wanted = tokenizer.encode(&texts[1]).expect("ids");
    wanted.push(tokenizer.end_of_text());
    assert!(read(&scratch, "out/train_000001.bin") == wanted);
    assert_eq!(prepared(&scratch, "out").train.text_bytes, texts[1].len() as u64);
}

#[test]
fn samples_keep_their_space_and_exports_add_no_tokens() {
    let scratch = Scratch::new();
    let mut tokenizer = sentence_piece(prepended(), &LLAMA);
    tokenizer["post_processor"] = json!({
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}}
    });
    scratch.file("t.json", tokenizer.to_string());
    // Every word is `the`, so a model that has learned anything continues with ` the`.
    scratch.file("a.txt", "the ".repeat(20_000));
    let train =
        ["--data", "a.txt", "--tokenizer", "t.json", "--steps", "40", "--lr", "0.01", "--name", "run"];
    scratch.ok(&small(&[&train[..], &["--vocab-size", "384"]].concat()));
    let sample = ["sample", "runs/run", "the the the", "--tokens", "4", "--temperature", "0"];
    assert!(scratch.ok(&sample).starts_with("the the the the"), "{}", scratch.ok(&sample));
    scratch.ok(&["export", "runs/run", "--to", "hf"]);
    let read = |name: &str| -> Value {
        serde_json::from_slice(&std::fs::read(scratch.path().join("hf").join(name)).expect("a file"))
            .expect("JSON")
    };
    assert!(read("tokenizer.json")["post_processor"].is_null());
    assert_eq!(read("tokenizer_config.json")["add_bos_token"], false);
    let tokenizer: Value = serde_json::from_slice(
        &std::fs::read(scratch.path().join("runs/run/tokenizer.json")).expect("a file"),
    )
    .expect("JSON");
    assert!(tokenizer["post_processor"].is_object(), "the run's own is what it was given");
}

/// Bits per byte refer to the original text, whatever the tokenizer changes.
#[test]
fn bits_a_byte_are_of_the_original_text() {
    let scratch = Scratch::new();
    let plain: String =
        json_lines(60_000).replace("fi", "\u{fb01}").replace("the", "\u{ff54}\u{ff48}\u{ff45}");
    scratch.file("a.jsonl", &plain);
    scratch.ok(&["data", "tokenizer", "a.jsonl", "--to", "bytes.json", "--vocab-size", "300"]);
    let text = std::fs::read_to_string(scratch.path().join("bytes.json")).expect("a tokenizer");
    let mut nfkc: Value = serde_json::from_str(&text).expect("JSON");
    nfkc["normalizer"] = json!({"type": "NFKC"});
    scratch.file("nfkc.json", nfkc.to_string());
    let bytes: u64 = plain
        .lines()
        .map(|line| {
            serde_json::from_str::<Value>(line).expect("JSON")["text"].as_str().expect("text").len() as u64
        })
        .sum();
    for name in ["bytes", "nfkc"] {
        let file = format!("{name}.json");
        scratch.ok(&[
            "data",
            "prepare",
            "a.jsonl",
            "--tokenizer",
            &file,
            "--to",
            name,
            "--val-fraction",
            "0",
        ]);
        assert_eq!(prepared(&scratch, name).train.text_bytes, bytes, "{name}");
    }
    let train = ["--data", "nfkc", "--steps", "1", "--name", "run", "--vocab-size", "300"];
    scratch.ok(&small(&train));
    let text = scratch.ok(&["eval", "runs/run", "--data", "a.jsonl", "--all"]);
    let number = |name: &str| -> f64 {
        let line = text.lines().find(|line| line.starts_with(name)).unwrap_or_else(|| panic!("{text}"));
        let word = line[name.len()..].split_whitespace().next().expect("a number");
        word.replace(',', "").parse().expect("a number")
    };
    let bits = number("loss") * number("tokens") / std::f64::consts::LN_2;
    // The whole text is evaluated, except fewer than 33 tokens after the last complete sequence.
    let (got, exact) = (number("bits a byte"), bits / bytes as f64);
    assert!((got / exact - 1.0).abs() < 2e-3, "{got} for {exact}");
    let of_shards = scratch.ok(&["eval", "runs/run", "--data", "nfkc", "--all"]);
    assert_eq!(text.lines().last(), of_shards.lines().last());
}
