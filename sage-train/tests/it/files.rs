//! Data on disk: kinds of files, many shards, names, pipes, the cache of the hub.

use std::io::Write;

use sage_train::data::prepare::Prepared;

use crate::support::{Scratch, json_lines, small};

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(bytes).expect("gzip");
    encoder.finish().expect("gzip")
}

/// Every kind of file gives the same shards.
#[test]
fn published_kinds_of_files_are_read() {
    let scratch = Scratch::new();
    let lines = json_lines(60_000);
    let texts: Vec<String> = lines
        .lines()
        .map(|line| {
            serde_json::from_str::<serde_json::Value>(line).expect("JSON")["text"]
                .as_str()
                .expect("text")
                .into()
        })
        .collect();
    scratch.file("plain/a.jsonl", &lines);
    scratch.ok(&["data", "tokenizer", "plain", "--to", "t.json", "--vocab-size", "400"]);
    let half = lines.len() / 2 + lines[lines.len() / 2..].find('\n').expect("a line") + 1;
    // Files of C4 and Dolma have several gzip members and padding after the last member.
    let members = [gzip(&lines.as_bytes()[..half]), gzip(&lines.as_bytes()[half..]), vec![0; 5000]].concat();
    scratch.file("gz/c4-train.00000.json.gz", members);
    scratch.file("nd/a.ndjson", &lines);
    scratch.file("json/a.json", &lines);
    let nested: String = texts
        .iter()
        .map(|text| serde_json::json!({"id": 1, "doc": {"text": text}}).to_string() + "\n")
        .collect();
    scratch.file("nested/a.jsonl", nested);
    let quoted = |text: &String| format!("7,\"{}\"\n", text.replace('"', "\"\""));
    scratch.file("csv/a.csv", format!("id,text\n{}", texts.iter().map(quoted).collect::<String>()));
    let prepare = |input: &str, to: &str, more: &[&str]| {
        let args = ["data", "prepare", input, "--tokenizer", "t.json", "--to", to];
        scratch.ok(&[&args[..], more].concat());
        std::fs::read(scratch.path().join(to).join("train_000001.bin")).expect("a shard")
    };
    let wanted = prepare("plain", "wanted", &[]);
    for (input, more) in [
        ("gz", &[][..]),
        ("nd", &[]),
        ("json/a.json", &[]),
        ("nested", &["--text-field", "doc.text"]),
        ("csv/*.csv", &[]),
    ] {
        let to = input.replace(['/', '*'], "-") + "-out";
        assert!(prepare(input, &to, more) == wanted, "{input}");
    }
    // Messages use the field names of the file.
    scratch.file("chat.jsonl", "{\"id\": 1, \"messages\": [{\"role\": \"user\"}]}\n");
    scratch.file("array.json", "[\n{\"text\": \"a\"}]\n");
    scratch.file("other.csv", "id,body\n1,a\n");
    for (file, words) in [
        ("chat.jsonl", ["no key `text` among the keys id, messages", "chat data"]),
        ("array.json", ["line 1", "jq -c"]),
        ("other.csv", ["columns id, body", "--text-field"]),
    ] {
        let error = scratch.fails(&["data", "prepare", file, "--tokenizer", "t.json", "--to", "x"]);
        assert!(words.iter().all(|word| error.contains(word)), "{error}");
    }
    let mut long = zstd::Encoder::new(Vec::new(), 1).expect("zstd");
    long.window_log(28).and_then(|()| long.long_distance_matching(true)).expect("a window");
    long.write_all(&vec![7; (1 << 28) + 1]).expect("zstd");
    scratch.file("long.jsonl.zst", long.finish().expect("zstd"));
    let error = scratch.fails(&["data", "prepare", "long.jsonl.zst", "--tokenizer", "t.json", "--to", "x"]);
    assert!(error.contains("--long=31"), "{error}");
}

/// The number of shards may exceed the process's limit on open files.
#[test]
#[cfg(unix)]
fn more_shards_than_open_files_are_trained_on() {
    let scratch = Scratch::new();
    scratch.file("a.jsonl", json_lines(400_000));
    scratch.ok(&[
        "data",
        "prepare",
        "a.jsonl",
        "--to",
        "shards",
        "--vocab-size",
        "300",
        "--shard-tokens",
        "1024",
    ]);
    let shards = Prepared::read(&scratch.path().join("shards")).expect("a list").train.shards.len();
    assert!(shards > 100, "{shards}");
    let run = small(&["--data", "shards", "--steps", "2", "--threads", "1"]).join(" ");
    let command = format!("ulimit -n 64 && exec {} {run}", env!("CARGO_BIN_EXE_sage-train"));
    let output = std::process::Command::new("sh")
        .args(["-c", &command])
        .current_dir(scratch.path())
        .output()
        .expect("a shell");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
#[cfg(target_os = "linux")]
fn pipes_are_passed_over_and_names_that_are_not_utf8_are_not() {
    use std::os::unix::ffi::OsStrExt;
    let scratch = Scratch::new();
    scratch.file("text/a.jsonl", json_lines(200_000));
    let made = std::process::Command::new("mkfifo").arg(scratch.path().join("text/pipe.txt")).status();
    assert!(made.expect("mkfifo").success());
    let args = small(&["--data", "text", "--steps", "1", "--name", "run"]);
    let output = scratch.run(&args);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success()
            && said.contains("1 item ignored (pipe, socket, device or folder link), such as text/pipe.txt"),
        "{said}"
    );
    let name = std::ffi::OsStr::from_bytes(b"caf\xe9.jsonl");
    std::fs::write(scratch.path().join("text").join(name), json_lines(90_000)).expect("a file");
    let error = scratch.fails(&["data", "prepare", "text", "--to", "x", "--vocab-size", "300"]);
    assert!(error.contains("the name of a file is not UTF-8"), "{error}");
    scratch.ok(&small(&["--data", "text", "--steps", "1", "--name", "both"]));
    let losses = |run: &str| scratch.metrics(run)[0].loss;
    assert_ne!(losses("run"), losses("both"));
}

#[test]
fn without_a_home_the_hub_says_what_to_set_and_its_cache_works_offline() {
    let scratch = Scratch::new();
    let command = |variables: &[(&str, &str)], args: &[&str]| {
        std::process::Command::new(env!("CARGO_BIN_EXE_sage-train"))
            .args(args)
            .current_dir(scratch.path())
            .env_clear()
            .envs(variables.iter().copied())
            .output()
            .expect("the command starts")
    };
    let prepare = ["data", "prepare", "hf:some-one/stories", "--to", "out", "--vocab-size", "300"];
    let output = command(&[], &prepare);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.code() == Some(2) && said.contains("HF_HOME"), "{said}");
    // A data set in the cache needs no connection.
    let repo = "cache/datasets--some-one--stories";
    scratch.file(&format!("{repo}/refs/main"), "c0ffee");
    scratch.file(&format!("{repo}/snapshots/c0ffee/data/a.jsonl"), json_lines(60_000));
    let cache = scratch.path().join("cache").display().to_string();
    let args = [&prepare[..2], &["hf:some-one/stories:data/*.jsonl"], &prepare[3..]].concat();
    for offline in [("HF_HUB_OFFLINE", "1"), ("HF_ENDPOINT", "http://127.0.0.1:9")] {
        let output = command(&[("HF_HUB_CACHE", &cache), offline], &args);
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() && said.contains("1 file in the cache"), "{said}");
        std::fs::remove_dir_all(scratch.path().join("out")).expect("removed");
    }
}
