//! The results of runs, and the files that they leave.

use crate::support::{Scratch, small, wait_until};

#[test]
fn a_run_leaves_everything_and_its_config_makes_it_again() {
    let scratch = Scratch::new();
    let flags = ["--steps", "6", "--eval-every", "3", "--sample-tokens", "20", "--peak-tflops", "0.5"];
    let table = scratch.ok(&small(&flags));
    assert!(table.contains("val loss") && table.contains("runs/tiny-sagebwd-001"), "{table}");
    let folder = scratch.path().join("runs/tiny-sagebwd-001");
    for file in [
        "config.toml",
        "metrics.jsonl",
        "loss.svg",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "log.txt",
        "sample.txt",
    ] {
        let size = std::fs::metadata(folder.join(file)).map(|m| m.len()).unwrap_or(0);
        assert!(size > 0, "{file}");
    }
    let first = scratch.metrics("tiny-sagebwd-001");
    assert_eq!(first.iter().map(|p| p.step).collect::<Vec<_>>(), [1, 2, 3, 4, 5, 6]);
    assert_eq!(first.iter().filter(|p| p.val_loss.is_some()).count(), 2);
    assert_eq!(first[5].tokens, 6 * 256);
    for point in &first {
        let mfu = point.mfu.expect("the peak is given");
        assert!(mfu > 0.0 && mfu < 1.0, "{mfu}");
    }
    // loss / (bits per byte * ln 2) is the number of bytes per token.
    let bits = first[5].val_bits_per_byte.expect("validated");
    let (loss, nats_a_byte) = (first[5].val_loss.expect("validated"), bits * std::f64::consts::LN_2);
    assert!((1.0..6.0).contains(&(loss / nats_a_byte)), "{loss} nats, {bits} bits a byte");

    scratch.ok(&["--config", "runs/tiny-sagebwd-001/config.toml"]);
    let again = scratch.metrics("tiny-sagebwd-002");
    let numbers = |points: &[sage_train::metrics::Point]| -> Vec<(f64, f64, f64, Option<f64>)> {
        points.iter().map(|p| (p.loss, p.grad_norm, p.lr, p.val_loss)).collect()
    };
    assert_eq!(numbers(&first), numbers(&again));
    let weights = |run: &str| {
        std::fs::read(scratch.path().join("runs").join(run).join("model.safetensors")).expect("weights")
    };
    assert!(weights("tiny-sagebwd-001") == weights("tiny-sagebwd-002"));

    // Earlier versions saved a file without tables, and a switch as `"on"` or `"off"`.
    let saved = scratch.path().join("runs/tiny-sagebwd-001/config.toml");
    let tables: toml::Table =
        std::fs::read_to_string(saved).expect("settings").parse().expect("a settings file");
    let flat = sage_train::settings::tables::flat(tables, "config.toml").expect("flat settings");
    assert!(flat["qk-norm"] == "on".into());
    scratch.file("flat.toml", flat.to_string());
    scratch.ok(&["--config", "flat.toml"]);
    assert!(weights("tiny-sagebwd-001") == weights("tiny-sagebwd-003"));
}

#[test]
fn results_do_not_depend_on_threads_but_on_the_seed() {
    let scratch = Scratch::new();
    // The context is long enough that the backward divides the keys among threads.
    let long = ["--context", "256", "--tokens-per-step", "1k"];
    for attn in ["fpa", "sagebwd"] {
        for (name, threads, seed) in
            [("one", "1", "5"), ("two", "2", "5"), ("three", "3", "5"), ("other", "2", "6")]
        {
            let name = format!("{attn}-{name}");
            let flags =
                ["--attn", attn, "--steps", "3", "--threads", threads, "--seed", seed, "--name", &name];
            scratch.ok(&small(&[&flags[..], &long].concat()));
        }
        let weights = |name: &str| {
            std::fs::read(scratch.path().join(format!("runs/{attn}-{name}/model.safetensors")))
                .expect("weights")
        };
        assert!(weights("one") == weights("two"), "{attn}: 2 threads");
        assert!(weights("one") == weights("three"), "{attn}: 3 threads");
        assert!(weights("one") != weights("other"), "{attn}: the seed does nothing");
    }
}

#[test]
fn accumulation_does_not_change_the_step() {
    let scratch = Scratch::new();
    for (name, micro) in [("whole", "8"), ("parts", "2")] {
        scratch.ok(&small(&["--attn", "fpa", "--steps", "3", "--micro-batch", micro, "--name", name]));
    }
    // The same tokens, with f32 sums in another order.
    for (a, b) in scratch.metrics("whole").iter().zip(scratch.metrics("parts")) {
        assert!((a.loss / b.loss - 1.0).abs() < 1e-5, "{} {}", a.loss, b.loss);
        assert!((a.grad_norm / b.grad_norm - 1.0).abs() < 1e-4, "{} {}", a.grad_norm, b.grad_norm);
    }
}

#[test]
fn training_learns_and_comparison_prints_both() {
    let scratch = Scratch::new();
    let table = scratch.ok(&small(&[
        "--compare",
        "fpa,sagebwd,none",
        "--steps",
        "60",
        "--lr",
        "1e-2",
        "--name",
        "c",
    ]));
    for name in ["fpa", "sagebwd", "none", "unigram entropy"] {
        assert!(table.contains(name), "{table}");
    }
    let last = |run: &str| scratch.metrics(run).last().and_then(|p| p.val_loss).expect("validated");
    let first = scratch.metrics("c/fpa")[0].loss;
    assert!(last("c/fpa") < first - 1.5, "{first} became {}", last("c/fpa"));
    assert!(
        (last("c/sagebwd") / last("c/fpa") - 1.0).abs() < 0.02,
        "{} {}",
        last("c/sagebwd"),
        last("c/fpa")
    );
    // Attention changes the loss. In so few steps it need not lower the loss.
    assert_ne!(last("c/none"), last("c/fpa"));
    assert!(scratch.path().join("runs/c/report.html").exists());
}

#[test]
fn every_kind_of_data_gives_the_same_tokens() {
    let scratch = Scratch::new();
    let documents: Vec<String> = (0..40)
        .map(|n| format!("Document {n} speaks of {} things, again and again.\n", n * n).repeat(20))
        .collect();
    let lines: String =
        documents.iter().map(|d| serde_json::json!({"id": 1, "text": d}).to_string() + "\n\n").collect();
    scratch.file("a.jsonl", &lines);
    scratch.file("a.jsonl.zst", zstd::encode_all(lines.as_bytes(), 3).expect("zstd"));
    for (n, document) in documents.iter().enumerate() {
        let name = format!("folder/{}/{n:03}.txt", if n < 20 { "a" } else { "b" });
        match n % 2 {
            0 => scratch.file(&name, document),
            _ => scratch.file(&(name + ".zst"), zstd::encode_all(document.as_bytes(), 3).expect("zstd")),
        };
    }
    scratch.file("folder/notes.md", "passed over");
    for (name, data) in [("lines", "a.jsonl"), ("zst", "a.jsonl.zst"), ("folder", "folder")] {
        scratch.ok(&small(&["--data", data, "--steps", "2", "--name", name]));
    }
    let losses = |run: &str| scratch.metrics(run).iter().map(|p| p.loss).collect::<Vec<_>>();
    assert_eq!(losses("lines"), losses("zst"));
    assert_eq!(losses("lines"), losses("folder"));
}

#[test]
fn a_run_that_diverges_stops_before_the_update_and_says_where() {
    let scratch = Scratch::new();
    let text = scratch.fails(&small(&[
        "--lr",
        "1e30",
        "--warmup-steps",
        "0",
        "--clip",
        "0",
        "--steps",
        "50",
        "--name",
        "boom",
    ]));
    let error = &text[text.find("error:").expect("an error")..];
    assert!(
        error.contains("stopped before the update") && error.contains("at step") && error.contains("hint:"),
        "{error}"
    );
    // The metrics remain, with finite values in every line, and the log contains the reason for the end.
    let points = scratch.metrics("boom");
    assert!(!points.is_empty() && points.len() < 50);
    assert!(points.iter().all(|p| p.loss.is_finite() && p.grad_norm.is_finite()));
    let folder = scratch.path().join("runs/boom");
    assert!(!folder.join("model.safetensors").exists() && folder.join("loss.svg").exists());
    let log = std::fs::read_to_string(folder.join("log.txt")).expect("a log");
    assert!(log.contains("stopped before the update"), "{log}");
    let is_time = |text: &str| text.len() == 20 && text.ends_with('Z') && text.as_bytes()[10] == b' ';
    assert!(log.lines().all(|line| line.get(..20).is_some_and(is_time)), "{log}");
}

#[test]
fn a_run_that_is_cut_off_has_whole_weights() {
    let scratch = Scratch::new();
    let mut child = std::process::Command::new(env!("CARGO_BIN_EXE_sage-train"))
        .args(small(&["--steps", "100000", "--eval-every", "2", "--eval-tokens", "256", "--name", "cut"]))
        .current_dir(scratch.path())
        .stderr(std::process::Stdio::null())
        .spawn()
        .expect("the command starts");
    let weights = scratch.path().join("runs/cut/model.safetensors");
    wait_until(|| weights.exists());
    child.kill().expect("it runs");
    child.wait().expect("an end");
    let table = scratch.ok(&["probe", "runs/cut"]);
    assert!(table.contains("unquantized attention"), "{table}");
}

#[test]
fn a_last_step_that_diverges_is_not_a_success() {
    let scratch = Scratch::new();
    let flags = ["--lr", "1e30", "--warmup-steps", "0", "--clip", "0", "--steps", "1", "--name", "last"];
    let text = scratch.fails(&small(&flags));
    assert!(text.contains("after step 1"), "{text}");
    let points = scratch.metrics("last");
    assert!(points.len() == 1 && points[0].loss.is_finite() && points[0].val_loss.is_none());
    assert!(!scratch.path().join("runs/last/model.safetensors").exists());
}

#[test]
fn probe_measures_every_layer_of_a_finished_run() {
    let scratch = Scratch::new();
    let flags =
        ["--attn", "fpa", "--layers", "2", "--context", "128", "--tokens-per-step", "512", "--steps", "4"];
    scratch.ok(&small(&flags));
    // Relative L2 errors of O, dQ, dK and dV, one row per layer.
    let errors = |more: &[&str]| -> Vec<Vec<f64>> {
        let probe = ["probe", "runs/tiny-fpa-001", "--sequences", "2", "--csv", "probe.csv"];
        let table = scratch.ok(&[&probe[..], more].concat());
        assert!(table.contains("delta cos/rel L2") && table.contains("outliers k"), "{table}");
        let text = std::fs::read_to_string(scratch.path().join("probe.csv")).expect("CSV");
        let quoted =
            text.lines().skip(1).map(|line| line.rsplit_once('"').expect("a scheme").1.split(',').collect());
        let cells: Vec<Vec<&str>> = quoted.collect();
        let of = |layer: &str, name: &str| {
            let row = cells.iter().find(|row| row[6] == layer && row[8] == "all" && row[9] == name);
            row.expect("a row")[11].parse().expect("a number")
        };
        ["0", "1"].map(|layer| ["O", "dQ", "dK", "dV"].map(|name| of(layer, name)).to_vec()).to_vec()
    };
    let (vector, tile) = (errors(&[]), errors(&["--granularity", "tile"]));
    for (vector, tile) in vector.iter().zip(&tile) {
        assert!(vector.iter().all(|e| *e > 0.0 && *e < 0.1), "{vector:?}");
        // The backward's scales do not affect the forward, and affect every gradient.
        assert_eq!(vector[0], tile[0]);
        assert!(
            vector[1..].iter().zip(&tile[1..]).all(|(vector, tile)| vector < tile),
            "{vector:?} {tile:?}"
        );
    }
    let heads = scratch.ok(&["probe", "runs/tiny-fpa-001", "--heads", "--products", "--qk-scale", "1,2"]);
    assert!(heads.contains("0.1 ") && heads.contains("Q and K times 2"), "{heads}");
    for (wrong, said) in [
        (&["--qk-scale", "1,0"][..], "qk-scale"),
        (&["--smoothing", "none,k"], "invalid value 'none,k'"),
        (&["--head-dim", "32"], "cannot be used with"),
        (&["--context", "1m"], "hint:"),
    ] {
        let text = scratch.fails(&[&["probe", "runs/tiny-fpa-001"], wrong].concat());
        assert!(text.contains(said), "{text}");
    }
}

/// TensorBoard itself reads the event files of a run, also of a resumed run, and finds the metrics in them.
#[test]
#[ignore = "needs python3 with tensorboard"]
fn tensorboard_reads_the_metrics() {
    let scratch = Scratch::new();
    scratch.ok(&small(&["--steps", "20", "--eval-every", "7", "--checkpoint-every", "6", "--name", "r"]));
    std::fs::remove_dir_all(scratch.path().join("runs/r/checkpoints/step-00000020")).expect("gone");
    // The event file of the resumed run invalidates the repeated steps in the earlier file. The pause is needed because
    // the name of an event file contains the time in seconds.
    std::thread::sleep(std::time::Duration::from_millis(1100));
    scratch.ok(&["--resume", "runs/r"]);
    let script = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../scripts/check_tensorboard.py");
    let output =
        std::process::Command::new("python3").arg(script).arg("runs/r").current_dir(scratch.path()).output();
    let output = output.expect("python3");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    assert!(text.contains("are those of metrics.jsonl"), "{text}");
}

#[test]
fn nobody_listening_is_no_reason_to_stop() {
    let scratch = Scratch::new();
    let mut child = std::process::Command::new(env!("CARGO_BIN_EXE_sage-train"))
        .args(small(&["--steps", "3", "--name", "alone"]))
        .current_dir(scratch.path())
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .expect("the command starts");
    drop((child.stdout.take(), child.stderr.take()));
    assert!(child.wait().expect("an end").success());
    assert!(scratch.path().join("runs/alone/model.safetensors").exists());
}

/// One run has all stages: dense attention, training of the router, SLA2. It saves its resolved settings, so `eval`
/// uses the same attention as the last training step.
#[test]
fn sla2_trains_in_stages_and_is_evaluated_as_it_ended() {
    let scratch = Scratch::new();
    let sla2 = ["--attn", "sla2", "--context", "128", "--sla2-block", "16", "--sla2-blocks", "1"];
    let stages = ["--steps", "8", "--sla2-dense-steps", "5", "--sla2-router-steps", "2", "--eval-every", "4"];
    scratch.ok(&small(&[&sla2[..], &stages, &["--tokens-per-step", "512", "--name", "stages"]].concat()));
    let points = scratch.metrics("stages");
    assert_eq!(points.len(), 8);
    let last = points[7].val_loss.expect("validated");
    // The selection is also measured in the dense stage. Each of the eight blocks of 16 tokens sees itself and one
    // block before it.
    let seen = 8 * (16 * 17 / 2) + 7 * 16 * 16;
    let sparsity = 1.0 - f64::from(seen) / f64::from(128 * 129 / 2);
    assert_eq!(points[2].sla2_sparsity, None);
    for point in [&points[3], &points[7]] {
        let of = |number: Option<f64>| number.expect("measured with a validation");
        assert!((of(point.sla2_sparsity) - sparsity).abs() < 1e-9, "{point:?}");
        assert!((0.05..1.0).contains(&of(point.sla2_mass_caught)), "{point:?}");
        assert!((0.5..1.0).contains(&of(point.sla2_exact_weight)), "{point:?}");
        assert!((1.0..=8.0).contains(&of(point.sla2_users_ratio)), "{point:?}");
    }
    let saved = std::fs::read_to_string(scratch.path().join("runs/stages/config.toml")).expect("settings");
    for line in ["[sla2]", "\nblock = 16", "\nblocks = 1", "\ndense-steps = 5", "\nrouter-steps = 2"] {
        assert!(saved.contains(line), "{line} in {saved}");
    }
    // An evaluation uses SLA2 as in training; dense attention gives another loss.
    let tokens = ["--tokens", "2k", "--device", "cpu"];
    let sparse = scratch.loss(&[&["eval", "runs/stages"], &tokens[..]].concat());
    let dense = scratch.loss(&[&["eval", "runs/stages", "--attn", "sagebwd"], &tokens[..]].concat());
    assert!((sparse - last).abs() < 0.2 && sparse != dense, "{sparse}, {dense}, in training {last}");
    scratch.ok(&["sample", "runs/stages", "--tokens", "5"]);
    scratch.ok(&["probe", "runs/stages", "--sequences", "1"]);
    // A longer run continues from the checkpoint, with its stages at the same steps.
    scratch.ok(&["--resume", "runs/stages", "--steps", "10"]);
    assert_eq!(scratch.metrics("stages").len(), 10);
    let dense_run = ["--attn", "sla2", "--context", "128", "--steps", "2", "--sla2-dense-steps", "3"];
    assert!(scratch.fails(&small(&dense_run)).contains("sla2-dense-steps"));
}

/// `eval --token-by-token` computes the same loss as a forward over whole sequences. Only with SageBwd the two losses
/// differ slightly, because scales and means of whole sequences include later tokens.
#[test]
fn tokens_are_predicted_one_by_one() {
    let scratch = Scratch::new();
    for attn in ["fpa", "sagebwd"] {
        scratch.ok(&small(&["--attn", attn, "--steps", "6", "--name", attn]));
        let folder = format!("runs/{attn}");
        let text =
            scratch.ok(&["eval", &folder, "--token-by-token", "--tokens", "200", "--micro-batch", "3"]);
        let number = |line: &str| -> f64 {
            let found =
                text.lines().find_map(|l| l.strip_prefix(line)).unwrap_or_else(|| panic!("{line} in {text}"));
            found.split_whitespace().next().and_then(|n| n.parse().ok()).expect("a number")
        };
        let (whole, alone) = (number("whole "), number("token by token "));
        assert_eq!(number("tokens "), 224.0, "whole sequences of 32");
        assert!((whole - alone).abs() < if attn == "fpa" { 2e-4 } else { 0.05 }, "{attn}: {whole}, {alone}");
        let same = scratch.ok(&["eval", &folder, "--tokens", "200"]);
        assert!(same.contains(&format!("{whole:.4}")), "{whole} in {same}");
        let tokens = |text: &str| -> Vec<u64> {
            let line = text.lines().find(|line| line.starts_with("tokens")).expect("a line").replace(',', "");
            line.split_whitespace().filter_map(|word| word.parse().ok()).collect()
        };
        let all = scratch.ok(&["eval", &folder, "--all"]);
        assert_eq!(tokens(&same), [224, tokens(&all)[0]], "{same}{all}");
        assert!(tokens(&all)[0] > 224 && !all.contains("--all"), "{all}");
        // `--by-position` prints the loss in each of eight ranges of positions. Their mean equals the overall loss.
        let parted = scratch.ok(&["eval", &folder, "--tokens", "200", "--by-position", "--micro-batch", "3"]);
        let table = parted.lines().skip_while(|line| !line.starts_with("positions")).skip(1);
        let losses: Vec<f64> = table.map(|line| line.rsplit(' ').next().unwrap().parse().unwrap()).collect();
        let mean = losses.iter().sum::<f64>() / 8.0;
        assert!(losses.len() == 8 && (mean - whole).abs() < 2e-4, "{mean}, {whole} in {parted}");
    }
}

/// A run validates the same weights a second time in another scheme. A report shows both validations as arms, with the
/// ordinary validation as baseline.
#[test]
fn a_second_validation_attends_otherwise() {
    let scratch = Scratch::new();
    let flags = ["--attn", "fpa", "--eval-attn", "attn-qat", "--steps", "4", "--eval-every", "2"];
    scratch.ok(&small(&[&flags[..], &["--eval-tokens", "4k", "--name", "r"]].concat()));
    for point in scratch.metrics("r") {
        assert_eq!(point.val_loss.is_some(), point.step % 2 == 0, "step {}", point.step);
        assert_eq!(point.eval_attn_loss.is_some(), point.step % 2 == 0, "step {}", point.step);
    }
    let last = &scratch.metrics("r")[3];
    for (attn, loss) in [("fpa", last.val_loss), ("attn-qat", last.eval_attn_loss)] {
        let evaluated = scratch.ok(&["eval", "runs/r", "--attn", attn, "--tokens", "4k"]);
        let loss = format!("{:.4}", loss.expect("validated"));
        assert!(evaluated.contains(&loss), "{loss} in {evaluated}");
    }
    assert!(scratch.ok(&["eval", "runs/r", "--attn", "none", "--tokens", "4k"]).contains("none"));
    let log = std::fs::read_to_string(scratch.path().join("runs/r/log.txt")).expect("a log");
    assert!(log.contains("a second time with Attn-QAT"), "{log}");
    let report = scratch.ok(&["report", "runs/r"]);
    let is_baseline = |arm: &str| {
        let line = report.lines().find(|line| line.starts_with(arm));
        line.unwrap_or_else(|| panic!("no {arm} in {report}")).contains("baseline")
    };
    assert!(is_baseline("eval-attn not set ") && !is_baseline("eval-attn attn-qat "), "{report}");
}

/// `eval` and `sample` refuse damaged weights of a run or of an export. `sample` refuses a changed tokenizer.
#[test]
fn a_damaged_model_is_refused() {
    let scratch = Scratch::new();
    scratch.ok(&small(&["--steps", "4", "--name", "r"]));
    let path = |name: &str| scratch.path().join("runs/r").join(name);
    scratch.ok(&["export", "runs/r", "--to", "hf"]);
    for (weights, folder) in
        [(path("model.safetensors"), "runs/r"), (scratch.path().join("hf/model.safetensors"), "hf")]
    {
        let whole = std::fs::read(&weights).expect("weights");
        let mut flipped = whole.clone();
        let last = flipped.len() - 100;
        flipped[last] ^= 1;
        std::fs::write(&weights, flipped).expect("weights");
        for verb in [&["eval", folder, "--data", "text.txt"][..], &["sample", folder, "Once"]] {
            scratch.file("text.txt", "Once upon a time. ".repeat(2000));
            let text = scratch.fails(verb);
            assert!(text.contains("the weights are damaged") && text.contains("hint:"), "{text}");
        }
        std::fs::write(&weights, whole).expect("weights");
        scratch.ok(&["sample", folder, "Once", "--tokens", "2"]);
    }
    let text = std::fs::read_to_string(path("tokenizer.json")).expect("a tokenizer");
    let other = text.replacen("\"merges\":[", "\"merges\": [", 1).replacen('e', "\\u0065", 0);
    std::fs::write(path("tokenizer.json"), other.replacen("\"id\":0", "\"id\":0 ", 1)).expect("a tokenizer");
    scratch.ok(&["sample", "runs/r", "Once", "--tokens", "2"]);
    let at = text.find("\"a\":").expect("an entry");
    std::fs::write(path("tokenizer.json"), format!("{}\"\\u00e9x\":{}", &text[..at], &text[at + 4..]))
        .expect("a tokenizer");
    assert!(scratch.fails(&["sample", "runs/r", "Once"]).contains("tokenizer"));
}
