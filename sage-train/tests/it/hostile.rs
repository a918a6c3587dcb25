//! Reads files with random damage: no reader may panic, or allocate memory only because a file claims to need
//! it.
//!
//! `HOSTILE_CASES` is the number of variants of each file (default 300).

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::path::{Path, PathBuf};

use clap::ValueEnum;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use sage_train::checkpoint::{self, FoundCheckpoint};
use sage_train::config::Config;
use sage_train::data::shard::{Format, Shard, ShardWriter};
use sage_train::data::{Tokenizer, reader};
use sage_train::evaluate::read_examples;
use sage_train::hf;
use sage_train::model::{Parameters, Parts, State};
use sage_train::ranks::{Rank, first_message};
use sage_train::report::{ReportOptions, Study};
use sage_train::runs::Run;
use sage_train::settings::Settings;
use sage_train::sweep::Spec;

use crate::support::{Scratch, json_lines, small};

/// The system's allocator, which records the largest single request of each thread.
struct RecordingAllocator;

thread_local! {
    static LARGEST: Cell<usize> = const { Cell::new(0) };
}

fn note(bytes: usize) {
    let _ = LARGEST.try_with(|largest| largest.set(largest.get().max(bytes)));
}

// SAFETY: every call is forwarded unchanged to the system's allocator.
#[allow(unsafe_code)]
unsafe impl GlobalAlloc for RecordingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        note(layout.size());
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        note(layout.size());
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        note(size);
        unsafe { System.realloc(at, layout, size) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: RecordingAllocator = RecordingAllocator;

fn cases() -> usize {
    std::env::var("HOSTILE_CASES").map_or(300, |n| n.parse().expect("HOSTILE_CASES is a number"))
}

/// `whole` with one to four random changes: a flipped bit, a random byte, an extreme number (in binary or decimal), a
/// truncation, or a duplicated piece.
fn broken(whole: &[u8], rng: &mut ChaCha8Rng) -> Vec<u8> {
    let mut bytes = whole.to_vec();
    for _ in 0..rng.random_range(1..=4) {
        if bytes.is_empty() {
            return bytes;
        }
        // Half of the changes are in the first 256 bytes, because headers matter more than the rest.
        let end = if rng.random_bool(0.5) { bytes.len().min(256) } else { bytes.len() };
        let at = rng.random_range(0..end);
        match rng.random_range(0..6) {
            0 => bytes[at] ^= 1 << rng.random_range(0..8),
            1 => bytes[at] = rng.random(),
            2 => {
                let number: u64 =
                    [0, 1, 0x7f, 0xffff, i32::MAX as u64, u32::MAX.into(), u64::MAX][rng.random_range(0..7)];
                let width = 1 << rng.random_range(0..4);
                for (byte, new) in bytes[at..].iter_mut().zip(&number.to_le_bytes()[..width]) {
                    *byte = *new;
                }
            }
            3 => bytes.truncate(at),
            4 => {
                let piece: Vec<u8> = bytes[at..].iter().take(rng.random_range(1..64)).copied().collect();
                bytes.splice(at..at, piece);
            }
            _ => {
                if let Some(digit) = bytes[at..].iter().position(u8::is_ascii_digit) {
                    bytes.splice(at + digit..=at + digit, *b"99999999999");
                }
            }
        }
    }
    bytes
}

/// Reads damaged variants of a file. A reader may return an error or succeed; a reader that panics or
/// allocates too much fails the test.
fn try_all(what: &str, path: &Path, limit: usize, read: &dyn Fn(&Path) -> bool) {
    let whole = std::fs::read(path).expect("a file");
    assert!(read(path), "{what} is read while it is whole");
    let mut rng = ChaCha8Rng::seed_from_u64(11);
    let mut accepted = 0;
    for case in 0..cases() {
        let bytes = broken(&whole, &mut rng);
        std::fs::write(path, &bytes).expect("a file");
        LARGEST.set(0);
        accepted += usize::from(read(path));
        let largest = LARGEST.get();
        assert!(largest <= limit.max(64 * whole.len()), "{what}, case {case}: {largest} bytes at once");
    }
    std::fs::write(path, whole).expect("a file");
    println!("{what}: {} variants, {accepted} of them accepted", cases());
}

/// The largest allowed allocation, in bytes, for a file of some kilobytes.
const LIMIT: usize = 16 << 20;

#[test]
fn shards_and_their_sidecars() {
    let scratch = Scratch::new();
    for &format in Format::value_variants() {
        let path = scratch.path().join(format!("{format}.bin"));
        let mut writer = ShardWriter::create(&path, format, "t", 300).expect("a shard");
        for _ in 0..20 {
            writer.write(&[1, 2, 3, 299], 9, 9).expect("tokens");
            writer.end_document();
        }
        writer.finish().expect("whole");
        let read = |_: &Path| {
            let Ok(shard) = Shard::open(&path) else { return false };
            let mut tokens = Vec::new();
            shard.read(0, shard.len() as usize, &mut tokens).is_ok() && shard.check().is_ok()
        };
        try_all(&format!("{format} shard"), &path, LIMIT, &read);
        let sidecar = path.with_extension("bin.json");
        try_all(&format!("{format} sidecar"), &sidecar, LIMIT, &read);
    }
}

/// The control channel of ranks: one message of each kind.
#[test]
fn messages_of_ranks() {
    let scratch = Scratch::new();
    let long = "a".repeat(2000);
    let messages = [
        r#"{"challenge":{"nonce":"00ff"}}"#.to_owned(),
        r#"{"hello":{"version":"0.1.0","rank":3,"of":8,"host":"node","nonce":"00ff","proof":"ff00"}}"#
            .to_owned(),
        format!(r#"{{"text":{{"topic":"data","text":"{long}"}}}}"#),
        r#"{"all":{"topic":"data","texts":["one","two"]}}"#.to_owned(),
        r#"{"beat":{"step":7,"ticks":123,"doing":"step 7 of 9","aside":false}}"#.to_owned(),
        r#"{"failed":{"why":"no room"}}"#.to_owned(),
        r#"{"over":{"why":"no room","code":75}}"#.to_owned(),
        r#""bye""#.to_owned(),
    ];
    let framed = |text: &str| [&(text.len() as u32).to_le_bytes()[..], text.as_bytes()].concat();
    // The error for an unknown kind lists every kind.
    let error = first_message(&framed("\"x\"")).expect_err("an unknown kind").to_string();
    let kinds: Vec<_> = error.split('`').skip(3).step_by(2).collect();
    assert!(kinds.len() == messages.len(), "{error}");
    for kind in kinds {
        assert!(messages.iter().any(|text| text.contains(&format!("\"{kind}\""))), "no message is `{kind}`");
    }
    let bytes: Vec<u8> = messages.iter().flat_map(|text| framed(text)).collect();
    let path = scratch.path().join("messages");
    std::fs::write(&path, bytes).expect("a file");
    let read = |path: &Path| {
        let bytes = std::fs::read(path).expect("a file");
        let mut rest = bytes.as_slice();
        while !rest.is_empty() {
            let Ok((said, after)) = first_message(rest) else { return false };
            assert!(said.len() <= 64 * rest.len(), "a message is as long as its bytes");
            rest = after;
        }
        true
    };
    try_all("messages", &path, LIMIT, &read);
}

#[test]
fn every_extension_of_data() {
    let scratch = Scratch::new();
    let lines = json_lines(20_000);
    let rows: String = (0..200).map(|n| format!("{n},\"one, \"\"two\"\"\nand {n}\"\n")).collect();
    let gzip = |bytes: &[u8]| {
        let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        std::io::Write::write_all(&mut encoder, bytes).expect("gzip");
        encoder.finish().expect("gzip")
    };
    let files = [
        ("a.txt", lines.clone().into_bytes()),
        ("a.txt.gz", gzip(lines.as_bytes())),
        ("a.md", lines.clone().into_bytes()),
        ("a.jsonl", lines.clone().into_bytes()),
        ("a.ndjson", lines.clone().into_bytes()),
        ("a.json", lines.clone().into_bytes()),
        ("a.jsonl.gz", gzip(lines.as_bytes())),
        ("a.jsonl.zst", zstd::encode_all(lines.as_bytes(), 3).expect("zstd")),
        ("a.csv", format!("id,text\n{rows}").into_bytes()),
        ("a.parquet", parquet(&lines)),
    ];
    let tried: Vec<_> = files.iter().flat_map(|(name, _)| name.split('.')).collect();
    for extension in reader::extensions().split(|c: char| !c.is_alphanumeric() && c != '.') {
        let Some(extension) = extension.strip_prefix('.') else { continue };
        assert!(tried.contains(&extension), "no damaged .{extension} is read");
    }
    for (name, bytes) in files {
        let path = scratch.file(name, bytes);
        // Decoders allocate windows and pages of the size in the header: zstd up to 128 MiB, parquet up to 2 GiB for a
        // page (its size is a signed 32-bit number).
        let limit = match name {
            "a.jsonl.zst" => 130 << 20,
            "a.parquet" => (2 << 30) + 64,
            _ => LIMIT,
        };
        try_all(name, &path, limit, &|path| reader::read(path, "text", &mut |_| Ok(())).is_ok());
    }
}

/// Rows of text as a parquet file.
fn parquet(lines: &str) -> Vec<u8> {
    use parquet::data_type::{ByteArray, ByteArrayType};
    let schema = parquet::schema::parser::parse_message_type("message m { required binary text (UTF8); }");
    let properties = parquet::file::properties::WriterProperties::builder()
        .set_compression(parquet::basic::Compression::SNAPPY)
        .build();
    let mut bytes = Vec::new();
    let schema = std::sync::Arc::new(schema.expect("a schema"));
    let mut writer = parquet::file::writer::SerializedFileWriter::new(&mut bytes, schema, properties.into())
        .expect("a writer");
    let rows: Vec<ByteArray> = lines.lines().map(ByteArray::from).collect();
    let mut group = writer.next_row_group().expect("a group");
    let mut column = group.next_column().expect("next").expect("a column");
    column.typed::<ByteArrayType>().write_batch(&rows, None, None).expect("rows");
    column.close().expect("closed");
    group.close().expect("closed");
    writer.close().expect("closed");
    bytes
}

#[test]
fn checkpoints() {
    let scratch = Scratch::new();
    scratch.ok(&small(&["--steps", "2", "--name", "r"]));
    let run = scratch.path().join("runs/r");
    let step = run.join("checkpoints/step-00000002");
    let found = |_: &Path| FoundCheckpoint::at(&run, Rank::ALONE).is_ok();
    for file in ["checkpoint.json", "COMPLETE", "state.safetensors"] {
        try_all(file, &step.join(file), LIMIT, &found);
    }
    // Reads the tensors without checking the hash.
    let config =
        Config::resolve(Config::read_settings(&run.join("config.toml")).expect("settings")).expect("a run");
    let restore = |path: &Path| {
        let (device, dtype) = (&candle_core::Device::Cpu, candle_core::DType::F32);
        let state = State::open(vec![(path.to_owned(), Parts::new())]);
        state
            .and_then(|state| {
                Parameters::restore(config.model.parameter_specs(), &state, device, dtype, None)
            })
            .is_ok()
    };
    try_all("tensors of a state", &step.join("state.safetensors"), LIMIT, &restore);
    // A checkpoint of two ranks, each of which wrote a part of the state.
    scratch.ok(&small(&["--steps", "2", "--name", "two", "--gpus", "2", "--device", "cpu"]));
    let step = scratch.path().join("runs/two/checkpoints/step-00000002");
    let use_it = |_: &Path| {
        let (device, dtype) = (&candle_core::Device::Cpu, candle_core::DType::F32);
        let opened = checkpoint::open(&step);
        opened
            .and_then(|(_, state)| {
                Parameters::restore(config.model.parameter_specs(), &state, device, dtype, None)
            })
            .is_ok()
    };
    for file in ["checkpoint.json", "state-00002-of-00002.safetensors"] {
        try_all(file, &step.join(file), LIMIT, &use_it);
    }
    let resolve = |path: &Path| Config::read_settings(path).and_then(Config::resolve).is_ok();
    try_all("config.toml", &run.join("config.toml"), LIMIT, &resolve);
    try_all("tokenizer.json", &run.join("tokenizer.json"), LIMIT, &|path| Tokenizer::load(path).is_ok());
}

#[test]
fn models_and_examples() {
    let scratch = Scratch::new();
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/qwen3");
    let copy = |name: &str| -> PathBuf {
        scratch.file(&format!("m/{name}"), std::fs::read(golden.join(name)).expect("a file"))
    };
    let (config, weights) = (copy("config.json"), copy("model.safetensors"));
    let folder = scratch.path().join("m");
    let settings = hf::settings(&folder).expect("a model");
    let model = Config::resolve(settings).expect("a model").model;
    let load = |_: &Path| {
        let settings = hf::settings(&folder).and_then(Config::resolve);
        let device = candle_core::Device::Cpu;
        settings.is_ok() && hf::load(&folder, &model, &device, candle_core::DType::F32, None).is_ok()
    };
    try_all("config.json", &config, LIMIT, &load);
    try_all("model.safetensors", &weights, LIMIT, &load);
    let mut words = vec![0u16; 512];
    (words[0], words[1], words[2], words[4]) = (20_240_522u32 as u16, (20_240_522u32 >> 16) as u16, 1, 2);
    for index in 0..2u16 {
        words.extend([u16::MAX, 2 * 17, index, 1, 4, 3, 5, 6, 7, 1, 9, 1, 10, 1, 11, 1, 12]);
    }
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    let examples = scratch.file("hellaswag.bin", bytes);
    try_all("hellaswag.bin", &examples, LIMIT, &|path| read_examples(path).is_ok());
}

/// All files of a run that a report reads.
#[test]
fn folders_of_runs() {
    let scratch = Scratch::new();
    scratch.ok(&small(&[
        "--steps",
        "6",
        "--eval-every",
        "2",
        "--probe-every",
        "2",
        "--attn",
        "sagebwd",
        "--name",
        "r",
    ]));
    let run = scratch.path().join("runs/r");
    let report = |_: &Path| {
        let Ok(run) = Run::read(&run) else { return false };
        let study = Study::new(vec![run], &ReportOptions::default());
        study.is_ok_and(|study| {
            let _ = (study.to_text(), study.to_markdown(), study.to_csv());
            study.to_html().is_ok() & study.figures().is_ok()
        })
    };
    for file in ["metrics.jsonl", "probes.jsonl", "starts.json", "ending.json", "config.toml"] {
        try_all(file, &run.join(file), 64 << 20, &report);
    }
}

/// A tokenizer that can be loaded may still be invalid for encoding.
#[test]
fn tokenizers() {
    let scratch = Scratch::new();
    scratch.file("a.jsonl", json_lines(60_000));
    scratch.ok(&["data", "tokenizer", "a.jsonl", "--to", "t.json", "--vocab-size", "400"]);
    let use_it = |path: &Path| {
        let Ok(tokenizer) = Tokenizer::load(path) else { return false };
        let ids = tokenizer.encode("What was said, ünïcödé 🦀 \u{0}\n\n  then.");
        ids.and_then(|ids| tokenizer.decode(&ids)).is_ok()
    };
    try_all("t.json", &scratch.path().join("t.json"), LIMIT, &use_it);
}

#[test]
fn sweeps() {
    let scratch = Scratch::new();
    let sweep = scratch.file(
        "s.toml",
        "about = \"a\"\n[settings]\nsteps = 3\n[grid]\nattn = [\"fpa\", \"sagebwd\"]\nseed = [1, 2]\n",
    );
    let plan = |path: &Path| {
        Spec::read(path).and_then(|spec| spec.runs(&Settings::default(), &Default::default())).is_ok()
    };
    try_all("s.toml", &sweep, LIMIT, &plan);
}
