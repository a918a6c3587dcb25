//! Data sets by name, from a server on loopback that answers as the Hugging Face Hub does.

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};

use crate::support::{Scratch, json_lines};

struct Hub {
    address: String,
    asked: Arc<Mutex<Vec<String>>>,
}

/// How the server sends a file.
#[derive(Clone, Copy, PartialEq)]
enum Response {
    Whole,
    /// Half of the file the first time, then the connection ends.
    CutOnce,
    /// Always half of the file, with the half's length in the header.
    CutAlways,
    /// With an etag that is a path outside of the cache.
    BadEtag,
}

struct Files {
    names: Vec<String>,
    held: HashMap<String, (Vec<u8>, Response)>,
}

impl Hub {
    fn start(files: Files) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = format!("http://{}", listener.local_addr().expect("an address"));
        let asked = Arc::new(Mutex::new(Vec::new()));
        let (base, log, files) = (address.clone(), asked.clone(), Arc::new(files));
        // The thread ends with the test binary.
        std::thread::spawn(move || {
            let cut = Arc::new(Mutex::new(Vec::new()));
            for stream in listener.incoming().flatten() {
                let (base, log, files, cut) = (base.clone(), log.clone(), files.clone(), cut.clone());
                std::thread::spawn(move || answer(stream, &base, &files, &log, &cut));
            }
        });
        Self { address, asked }
    }

    /// Runs the command with this server as the hub.
    fn prepare(&self, scratch: &Scratch, input: &str, to: &str) -> std::process::Output {
        let home = scratch.path().join("hub").display().to_string();
        let variables = [("HF_ENDPOINT", self.address.as_str()), ("HF_HOME", home.as_str())];
        scratch.run_with(&["data", "prepare", input, "--to", to, "--vocab-size", "400"], &variables)
    }

    fn asked(&self) -> Vec<String> {
        std::mem::take(&mut self.asked.lock().expect("a log"))
    }
}

fn answer(
    mut stream: TcpStream,
    base: &str,
    files: &Files,
    log: &Mutex<Vec<String>>,
    cut: &Mutex<Vec<String>>,
) {
    let mut reader = BufReader::new(stream.try_clone().expect("a stream"));
    let mut request = String::new();
    if reader.read_line(&mut request).is_err() {
        return;
    }
    let path = request.split_whitespace().nth(1).unwrap_or("/").to_owned();
    let mut range = None;
    let mut line = String::new();
    while reader.read_line(&mut line).is_ok_and(|read| read > 2) {
        let lower = line.to_ascii_lowercase();
        if let Some(bytes) = lower.trim().strip_prefix("range: bytes=") {
            let (first, last) = bytes.split_once('-').expect("a range");
            range = Some((first.parse::<usize>().expect("a number"), last.parse::<usize>().ok()));
        }
        line.clear();
    }
    log.lock().expect("a log").push(format!("{path} {range:?}"));
    let mut send = |status: &str, headers: &str, body: &[u8], length: usize| {
        let head =
            format!("HTTP/1.1 {status}\r\nContent-Length: {length}\r\nConnection: close\r\n{headers}\r\n");
        let _ = stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(body));
    };
    let of_info = "/api/datasets/some-one/stories.v2/revision/main";
    if path == of_info {
        let siblings: Vec<_> =
            files.names.iter().map(|name| serde_json::json!({ "rfilename": name })).collect();
        let body = serde_json::json!({ "sha": "c0ffee", "siblings": siblings }).to_string();
        return send("200 OK", "Content-Type: application/json\r\n", body.as_bytes(), body.len());
    }
    if let Some(name) = path.strip_prefix("/datasets/some-one/stories.v2/resolve/main/") {
        // The Hugging Face Hub redirects to its server of large files; here `/cdn/` is this server.
        let Some((_, manner)) = files.held.get(name) else { return send("404 Not Found", "", b"", 0) };
        let etag = if *manner == Response::BadEtag {
            "../../../out".into()
        } else {
            format!("tag-{}", name.replace(['/', '.'], "-"))
        };
        let headers =
            format!("Location: {base}/cdn/{name}\r\nX-Repo-Commit: c0ffee\r\nX-Linked-Etag: \"{etag}\"\r\n");
        return send("302 Found", &headers, b"", 0);
    }
    let held = path.strip_prefix("/cdn/").and_then(|name| Some((name, files.held.get(name)?)));
    let Some((name, (bytes, manner))) = held else { return send("404 Not Found", "", b"", 0) };
    let (first, last) = range.unwrap_or((0, None));
    let last = last.unwrap_or(bytes.len() - 1).min(bytes.len() - 1);
    if first > last {
        return send("416 Range Not Satisfiable", "", b"", 0);
    }
    let body = &bytes[first..=last];
    let headers = format!("Content-Range: bytes {first}-{last}/{}\r\n", bytes.len());
    let mut cut = cut.lock().expect("a list");
    let half = &body[..body.len() / 2];
    let probe = body.len() == 1;
    match manner {
        Response::CutOnce if !probe && !cut.contains(&name.to_owned()) => {
            cut.push(name.to_owned());
            send("206 Partial Content", &headers, half, body.len());
        }
        Response::CutAlways if !probe => send("206 Partial Content", &headers, half, half.len()),
        _ => send("206 Partial Content", &headers, body, body.len()),
    }
}

fn files(manner: Response) -> Files {
    let lines = json_lines(300_000);
    let half = lines.len() / 2 + lines[lines.len() / 2..].find('\n').expect("a line") + 1;
    let (a, b) = lines.split_at(half);
    let held = [
        ("data/a.jsonl", a, manner),
        ("data/b.jsonl", b, Response::Whole),
        ("readme.md", "x", Response::Whole),
    ];
    Files {
        names: held.iter().map(|(name, ..)| (*name).into()).collect(),
        held: held.into_iter().map(|(name, text, manner)| (name.into(), (text.into(), manner))).collect(),
    }
}

const NAME: &str = "hf:some-one/stories.v2:data/*.jsonl";

fn shard(scratch: &Scratch, folder: &str) -> Vec<u8> {
    std::fs::read(scratch.path().join(folder).join("train_000001.bin")).expect("a shard")
}

#[test]
fn a_data_set_is_fetched_once_also_over_a_line_that_breaks() {
    let scratch = Scratch::new();
    scratch.file("all.jsonl", json_lines(300_000));
    scratch.ok(&["data", "prepare", "all.jsonl", "--to", "local", "--vocab-size", "400"]);
    for (to, manner) in [("whole", Response::Whole), ("broken", Response::CutOnce)] {
        let hub = Hub::start(files(manner));
        let scratch_of_run = Scratch::new();
        let output = hub.prepare(&scratch_of_run, NAME, to);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        assert!(shard(&scratch_of_run, to) == shard(&scratch, "local"), "{to}");
        let asked = hub.asked();
        assert!(asked.iter().all(|line| !line.contains("readme")), "{asked:?}");
        // An interrupted download is resumed where it stopped.
        let resumed = asked.iter().filter(|line| line.starts_with("/cdn/data/a.jsonl Some((")).any(|line| {
            let first: usize = line
                .split("((")
                .nth(1)
                .and_then(|l| l.split(',').next())
                .expect("a range")
                .parse()
                .expect("a number");
            first > 0
        });
        assert_eq!(resumed, manner == Response::CutOnce, "{asked:?}");
        // The second time, files are read from the cache: only the list is requested.
        let output = hub.prepare(&scratch_of_run, NAME, "again");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        assert!(hub.asked().iter().all(|line| line.starts_with("/api/")));
    }
}

#[test]
fn what_the_hub_does_not_give_is_an_error() {
    let mut text = String::new();
    let mut refused = |name: &str, hub: &Hub, input: &str| {
        let scratch = Scratch::new();
        let output = hub.prepare(&scratch, input, "new");
        let code = output.status.code().expect("an exit code");
        assert_ne!(code, 0, "{name}");
        let error = String::from_utf8_lossy(&output.stderr).replace(&hub.address, "HUB");
        assert!(!scratch.path().join("new").exists() && !scratch.path().join("out").exists());
        text += &format!(
            "-- {name} (exit {code})\n{}\n",
            error[error.find("error:").expect("an error")..].trim_end()
        );
    };
    let hub = Hub::start(files(Response::Whole));
    refused("no such data set", &hub, "hf:nobody/nothing");
    refused("no such file", &hub, "hf:some-one/stories.v2:*.parquet");
    let mut missing = files(Response::Whole);
    missing.names.push("data/c.jsonl".into());
    refused("a file that is listed and missing", &Hub::start(missing), NAME);
    refused("always cut off", &Hub::start(files(Response::CutAlways)), NAME);
    refused("an etag that leads out", &Hub::start(files(Response::BadEtag)), NAME);
    let mut escape = files(Response::Whole);
    escape.names = vec!["data/../../../out.jsonl".into()];
    refused("a file that leads out", &Hub::start(escape), "hf:some-one/stories.v2:**/*.jsonl");
    insta::assert_snapshot!(text);
}
