//! Models in Hugging Face's format are imported and exported. scripts/hf_golden.py made the golden models with
//! transformers.

mod foreign;
mod sla2;
mod training;

use std::path::{Path, PathBuf};

use candle_core::{DType, Device, Result, Tensor};
use candle_sage::Scheme;
use sage_train::device::DeviceKind;
use sage_train::evaluate::{Example, choose};
use sage_train::hf;
use sage_train::settings::Settings;
use sage_train::trained::Trained;

use crate::support::{Scratch, json_lines, small};

const KINDS: [&str; 4] = ["llama", "qwen3", "qwen2", "llama3"];

fn golden(kind: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(kind)
}

fn open(folder: &Path, place: DeviceKind) -> Trained {
    Trained::open(folder, place, Settings::default(), false).expect("a model")
}

/// The largest difference between the model's logits and transformers' logits, relative to the largest logit.
fn distance(folder: &Path, kind: &str) -> Result<f64> {
    let trained = open(folder, DeviceKind::Cpu);
    let golden = candle_core::safetensors::load(golden(kind).join("logits.safetensors"), &Device::Cpu)?;
    let model = trained.model().expect("a model");
    let hidden = model.hidden(&golden["ids"].to_dtype(DType::U32)?)?;
    let logits = model.logits(&hidden)?.reshape(golden["logits"].dims())?;
    let largest = |x: &Tensor| x.abs()?.flatten_all()?.max(0)?.to_scalar::<f32>();
    let difference = largest(&(&logits - &golden["logits"])?)?;
    // We expect the rounding error of two layers with f32 sums of at most 64 terms: some tens of 2^-24.
    Ok(f64::from(difference / largest(&golden["logits"])?))
}

#[test]
fn logits_are_those_of_transformers() -> Result<()> {
    for kind in KINDS {
        let distance = distance(&golden(kind), kind)?;
        assert!(distance < 5e-6, "{kind}: {distance:e}");
    }
    Ok(())
}

/// A published model that is trained with a learning rate of 1e-30 is exported unchanged; with 1e-2 it changes.
#[test]
fn a_model_is_imported_trained_and_exported() -> Result<()> {
    for kind in KINDS {
        let scratch = Scratch::new();
        scratch.file("a.jsonl", json_lines(300_000));
        let folder = golden(kind).display().to_string();
        let flags =
            ["--init-from", &folder, "--data", "a.jsonl", "--context", "64", "--tokens-per-step", "1k"];
        let flags = [&flags[..], &["--steps", "3", "--sample-tokens", "0", "--attn", "fpa"]].concat();
        scratch.ok(&[&flags[..], &["--lr", "1e-30", "--weight-decay", "0", "--name", "still"]].concat());
        scratch.ok(&[&flags[..], &["--lr", "1e-2", "--name", "moved"]].concat());
        let bf16 = |name: &str| match name {
            "half" => vec!["--dtype", "bf16"],
            _ => vec![],
        };
        for (run, to) in [("still", "same"), ("still", "half"), ("moved", "other")] {
            let run = format!("runs/{run}");
            scratch.ok(&[&["export", &run, "--to", to][..], &bf16(to)].concat());
        }
        let at = |name: &str| scratch.path().join(name);
        assert!(distance(&at("same"), kind)? < 5e-6);
        assert!(distance(&at("other"), kind)? > 1e-2);
        // An export has the imported weights bit for bit. With `--dtype bf16` it has them rounded to bf16.
        let load = |path: PathBuf| candle_core::safetensors::load(path, &Device::Cpu);
        let (before, after) =
            (load(golden(kind).join("model.safetensors"))?, load(at("same/model.safetensors"))?);
        let half = load(at("half/model.safetensors"))?;
        assert_eq!((before.len(), before.len()), (after.len(), half.len()));
        for (name, tensor) in &before {
            let bits = |t: &Tensor| t.flatten_all()?.to_vec1::<f32>();
            assert_eq!(bits(tensor)?, bits(&after[name])?, "{name}");
            assert_eq!(half[name].dtype(), DType::BF16);
            assert_eq!(
                bits(&tensor.to_dtype(DType::BF16)?.to_dtype(DType::F32)?)?,
                bits(&half[name].to_dtype(DType::F32)?)?
            );
        }
        assert!(scratch.fails(&["export", "runs/still", "--to", "same"]).contains("exists already"));
    }
    Ok(())
}

#[test]
fn a_continued_run_needs_the_folder_no_more() {
    let scratch = Scratch::new();
    scratch.file("a.jsonl", json_lines(300_000));
    for file in ["config.json", "model.safetensors", "tokenizer.json"] {
        scratch.file(&format!("m/{file}"), std::fs::read(golden("llama").join(file)).expect("a file"));
    }
    let flags = ["--init-from", "m", "--data", "a.jsonl", "--context", "64", "--tokens-per-step", "1k"];
    scratch.ok(&[&flags[..], &["--steps", "2", "--sample-tokens", "0", "--name", "r"]].concat());
    std::fs::remove_dir_all(scratch.path().join("m")).expect("gone");
    scratch.ok(&["--resume", "runs/r", "--steps", "4"]);
    scratch.ok(&["--resume", "runs/r", "--steps", "5"]);
    assert_eq!(scratch.metrics("r").len(), 5);
}

/// An example is a context with endings to choose from. The mean loss of each ending follows from transformers' logits.
#[test]
fn the_ending_with_the_lowest_mean_loss_is_chosen() -> Result<()> {
    let trained = open(&golden("qwen3"), DeviceKind::Cpu);
    let golden = candle_core::safetensors::load(golden("qwen3").join("logits.safetensors"), &Device::Cpu)?;
    let ids: Vec<Vec<u32>> = golden["ids"].to_dtype(DType::U32)?.to_vec2()?;
    let losses = candle_nn::ops::log_softmax(&golden["logits"], 2)?.to_vec3::<f32>()?;
    // A long ending is the six tokens after the context in a golden sequence, so the golden logits give its loss.
    let known = |row: usize, at: usize, len: usize| -> f32 {
        (at..at + len).map(|n| -losses[row][n - 1][ids[row][n] as usize]).sum::<f32>() / len as f32
    };
    let (mut right, mut wrong) = (Vec::new(), Vec::new());
    for (at, likeliest) in [(5, true), (12, false), (30, true), (20, false)] {
        // The other ending is one token. The likeliest token's loss is below the mean loss of the long ending, and the
        // least likely token's loss is above it.
        let row = &losses[0][at - 1];
        let mut order: Vec<u32> = (0..300).collect();
        order.sort_by(|&a, &b| row[b as usize].total_cmp(&row[a as usize]));
        let other = order[if likeliest { 0 } else { 299 }];
        let (long, short) = (known(0, at, 6), -row[other as usize]);
        assert_eq!(short < long, likeliest);
        let endings = vec![ids[0][at..at + 6].to_vec(), vec![other]];
        let example = |label| Example {
            context: ids[0][..at].to_vec(),
            endings: endings.clone(),
            lengths: vec![6, 1],
            label,
        };
        right.push(example(usize::from(likeliest)));
        wrong.push(example(usize::from(!likeliest)));
    }
    let model = trained.model().expect("a model");
    for (examples, expected) in [(right, 4), (wrong, 0)] {
        let choices = choose(&model, &examples, 64, &Device::Cpu, &mut |_| ()).expect("choices");
        assert_eq!((choices.by_length, choices.examples), (expected, 4));
    }
    Ok(())
}

#[test]
fn what_is_another_computation_is_refused() {
    let scratch = Scratch::new();
    let good = std::fs::read_to_string(golden("llama").join("config.json")).expect("a file");
    let mut text = String::new();
    for (name, from, to) in [
        ("another architecture", "\"model_type\": \"llama\"", "\"model_type\": \"mixtral\""),
        (
            "an output matrix that is missing",
            "\"tie_word_embeddings\": true",
            "\"tie_word_embeddings\": false",
        ),
        ("biases of all projections", "\"attention_bias\": false", "\"attention_bias\": true"),
        ("biases that are missing", "\"model_type\": \"llama\"", "\"model_type\": \"qwen2\""),
        ("other scaled angles", "\"rope_type\": \"default\"", "\"rope_type\": \"yarn\""),
        ("a scaling without numbers", "\"rope_type\": \"default\"", "\"rope_type\": \"llama3\""),
        (
            "other layers",
            "\"model_type\": \"llama\"",
            "\"layer_types\": [\"chunked_attention\"], \"model_type\": \"llama\"",
        ),
        ("another activation", "\"hidden_act\": \"silu\"", "\"hidden_act\": \"gelu\""),
        ("no heads", "\"num_attention_heads\": 4", "\"num_attention_heads\": 0"),
        ("another shape", "\"hidden_size\": 32", "\"hidden_size\": 48"),
        ("not JSON", "{", "["),
    ] {
        let folder = name.replace(' ', "-");
        for file in ["model.safetensors", "tokenizer.json"] {
            scratch.file(
                &format!("{folder}/{file}"),
                std::fs::read(golden("llama").join(file)).expect("a file"),
            );
        }
        assert!(good.contains(from), "{from}");
        scratch.file(&format!("{folder}/config.json"), good.replacen(from, to, 1));
        let error = scratch.fails(&["sample", &folder]);
        text += &format!("-- {name}\n{}\n", error.trim_end());
    }
    let folder = scratch.path().join("index");
    for file in ["config.json", "tokenizer.json"] {
        scratch.file(&format!("index/{file}"), std::fs::read(golden("llama").join(file)).expect("a file"));
    }
    for (name, index) in [
        ("a way out", r#"{"weight_map": {"a": "../another-shape/model.safetensors"}}"#),
        ("no weights", r#"{"weight_map": {}}"#),
    ] {
        std::fs::write(folder.join("model.safetensors.index.json"), index).expect("a file");
        text += &format!("-- {name}\n{}\n", scratch.fails(&["sample", "index"]).trim_end());
    }
    insta::assert_snapshot!(text);
}

#[test]
fn weights_may_be_in_several_files() -> Result<()> {
    let scratch = Scratch::new();
    for file in ["config.json", "tokenizer.json"] {
        scratch.file(&format!("m/{file}"), std::fs::read(golden("qwen3").join(file)).expect("a file"));
    }
    let all = candle_core::safetensors::load(golden("qwen3").join("model.safetensors"), &Device::Cpu)?;
    let mut map = serde_json::Map::new();
    for part in 0..2 {
        let file = format!("model-{part}.safetensors");
        let of_part = |name: &&String| name.len() % 2 == part;
        let some: std::collections::HashMap<&String, Tensor> =
            all.keys().filter(of_part).map(|name| (name, all[name].clone())).collect();
        some.keys().for_each(|name| drop(map.insert(name.to_string(), file.clone().into())));
        candle_core::safetensors::save(&some, scratch.path().join("m").join(file))?;
    }
    scratch.file("m/model.safetensors.index.json", serde_json::json!({ "weight_map": map }).to_string());
    assert!(distance(&scratch.path().join("m"), "qwen3")? < 5e-6);
    Ok(())
}

/// The export of a model trained for FP4 has its attention settings in a separate file. A run that starts from the
/// export adopts the settings. The export of a SageBwd model has no such file.
#[test]
fn an_export_says_what_attention_it_was_trained_for() -> Result<()> {
    let scratch = Scratch::new();
    let told = Scheme::all().into_iter().filter(|scheme| !scheme.runtime_settings().is_empty());
    let names: Vec<_> = told.map(|scheme| scheme.name()).collect();
    assert_eq!(
        names,
        ["attn-qat"],
        "this test, and `hf::attention`, which reads what an export says, need the new scheme"
    );
    for (attn, flags) in
        [("attn-qat", &["--value-groups", "head-dim", "--value-scale", "head"][..]), ("sagebwd", &[])]
    {
        scratch.ok(&small(&[&["--attn", attn, "--steps", "2", "--name", attn], flags].concat()));
        scratch.ok(&["export", &format!("runs/{attn}"), "--to", attn]);
    }
    let text = std::fs::read_to_string(scratch.path().join("attn-qat/attention.json")).expect("a file");
    let said: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    assert_eq!(said["scheme"], "attn-qat");
    assert_eq!(said["format"], "nvfp4");
    assert_eq!(said["value_groups"], "head-dim");
    assert_eq!(said["value_scale"], "head");
    assert!(!scratch.path().join("sagebwd/attention.json").exists());
    scratch.ok(&small(&["--init-from", "attn-qat", "--steps", "2", "--name", "tuned"]));
    let tuned = std::fs::read_to_string(scratch.path().join("runs/tuned/log.txt")).expect("a log");
    assert!(
        tuned.contains("Attn-QAT, smoothing none, values by head-dim, P by row-max, scale of V by head"),
        "{tuned}"
    );
    std::fs::write(scratch.path().join("attn-qat/attention.json"), r#"{"scheme": "attn-x"}"#)
        .expect("a file");
    let error = scratch.fails(&small(&["--init-from", "attn-qat", "--steps", "2"]));
    assert!(error.contains("attn-x") && error.contains("hint:"), "{error}");
    // A warning counts the weights that the new run does not use.
    let without = scratch.run(&small(&["--init-from", "sagebwd", "--qk-norm", "off", "--steps", "2"]));
    let told = String::from_utf8_lossy(&without.stderr).into_owned();
    assert!(without.status.success() && told.contains("ignored 2 weights of sagebwd"), "{told}");
    let loss = |attn: &[&str]| scratch.ok(&[&["eval", "runs/sagebwd", "--tokens", "4k"], attn].concat());
    assert_ne!(loss(&["--attn", "attn-qat"]), loss(&["--attn", "fpa"]), "eval --attn changes the numerics");
    Ok(())
}

/// For an exported model, transformers computes the same loss as `eval`.
#[test]
#[ignore = "needs python3 with torch and transformers"]
fn transformers_computes_the_same_loss() {
    let scratch = Scratch::new();
    scratch.file("a.jsonl", json_lines(300_000));
    scratch.ok(&[
        "data",
        "prepare",
        "a.jsonl",
        "--to",
        "shards",
        "--vocab-size",
        "512",
        "--val-fraction",
        "0.2",
    ]);
    for qk_norm in ["on", "off"] {
        let train =
            ["--data", "shards", "--attn", "fpa", "--steps", "20", "--qk-norm", qk_norm, "--name", qk_norm];
        scratch.ok(&small(
            &[&train[..], &["--vocab-size", "512", "--layers", "2", "--key-heads", "1"]].concat(),
        ));
        scratch.ok(&["export", &format!("runs/{qk_norm}"), "--to", qk_norm]);
        let ours = scratch.ok(&["eval", qk_norm, "--data", "shards", "--context", "32", "--tokens", "2k"]);
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../scripts/check_export.py");
        let output = std::process::Command::new("python3")
            .arg(script)
            .args([qk_norm, "shards/val_000001.bin", "32", "64"])
            .current_dir(scratch.path())
            .output()
            .expect("python3");
        let theirs = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let number = |text: &str| -> f64 {
            let rest = &text[text.find("loss").expect("a loss") + 4..];
            rest.split_whitespace().next().expect("a number").parse().expect("a number")
        };
        // Four digits are printed.
        assert!((number(&ours) - number(&theirs)).abs() < 1e-4, "{ours}{theirs}");
    }
}

/// `sample`, `eval` and `probe` accept Hugging Face models of any context. `eval` and `probe` need `--data`.
#[test]
fn a_folder_is_used_whatever_its_context() {
    let scratch = Scratch::new();
    for file in ["model.safetensors", "tokenizer.json"] {
        scratch.file(&format!("m/{file}"), std::fs::read(golden("llama").join(file)).expect("a file"));
    }
    let config = std::fs::read_to_string(golden("llama").join("config.json")).expect("a file");
    scratch.file(
        "m/config.json",
        config.replace("\"max_position_embeddings\": 64", "\"max_position_embeddings\": 2048"),
    );
    scratch.file("a.jsonl", json_lines(300_000));
    let text = scratch.ok(&["sample", "m", "the quick", "--tokens", "5", "--seed", "3"]);
    assert!(text.starts_with("the quick"));
    // The text is longer than the model's context of 64 tokens.
    let llama = golden("llama").display().to_string();
    for attn in [&[][..], &["--attn", "sagebwd"]] {
        let output =
            scratch.run(&[&["sample", &llama, "the", "--tokens", "150", "--seed", "3"], attn].concat());
        let told = String::from_utf8_lossy(&output.stderr);
        assert!(output.stdout.len() > 100, "{told}");
        assert!(told.contains("150 tokens, ") && told.contains("tokens/s"), "{told}");
    }
    for (flag, value) in [("--tokens", "0"), ("--top-p", "0")] {
        assert!(scratch.fails(&["sample", "m", flag, value]).contains("out of range"));
    }
    let flags = ["--data", "a.jsonl", "--context", "48", "--micro-batch", "5", "--tokens", "500"];
    assert!(scratch.ok(&[&["eval", "m"][..], &flags].concat()).contains("perplexity"));
    let probed = scratch.ok(&["probe", "m", "--data", "a.jsonl", "--context", "48", "--sequences", "2"]);
    assert!(probed.contains("SageBwd"), "{probed}");
    let refused = [
        scratch.fails(&["eval", "m"]),
        scratch.fails(&["probe", "m"]),
        scratch.fails(&["eval", "m", "--data", "a.jsonl", "--tokens", "0"]),
        scratch.fails(&["eval", "m", "--hellaswag", "a.jsonl"]),
    ];
    for (error, part) in refused.iter().zip([
        "nothing to evaluate on",
        "nothing to probe on",
        "out of range",
        "GPT-2's tokens",
    ]) {
        assert!(error.contains(part), "{error}");
    }
}

#[test]
fn settings_come_from_the_folder() {
    let settings = hf::settings(&golden("qwen3")).expect("a model");
    assert_eq!(
        (settings.model.layers, settings.model.key_heads, settings.model.head_dim),
        (Some(2), Some(2), Some(16))
    );
    assert_eq!((settings.model.rope_base, settings.model.norm_eps), (Some(1e6), Some(1e-5)));
    assert_eq!(hf::longest(&golden("qwen3")).expect("a model"), 64);
}

/// Components such as biases and windows are settings. A run's plan shows them, and its export has the same loss.
#[test]
fn parts_of_other_models_are_settings() {
    let scratch = Scratch::new();
    scratch.file("a.jsonl", json_lines(300_000));
    let parts = ["--qk-norm", "off", "--qkv-bias", "on", "--untied", "on", "--rope-scaling", "4,1,4,24"];
    let windows = ["--window", "9", "--window-pattern", "SL"];
    let parts = [&parts[..], &windows].concat();
    let flags = [&["--data", "a.jsonl", "--steps", "3", "--attn", "fpa", "--name", "r"][..], &parts].concat();
    let plan = scratch.ok(&small(&[&flags[..], &["--dry-run"]].concat()));
    for part in [
        "windows of 9 tokens (layer pattern SL)",
        "with biases",
        "rotary scaling 4,1,4,24",
        "as many in the output matrix",
    ] {
        assert!(plan.contains(part), "{part}: {plan}");
    }
    scratch.ok(&small(&flags));
    scratch.ok(&["export", "runs/r", "--to", "out"]);
    let config = std::fs::read_to_string(scratch.path().join("out/config.json")).expect("a file");
    for part in [
        "Qwen2ForCausalLM",
        "\"sliding_window\": 9",
        "\"sliding_attention\"",
        "\"rope_type\": \"llama3\"",
        "\"tie_word_embeddings\": false",
    ] {
        assert!(config.contains(part), "{part}: {config}");
    }
    let loss =
        |of: &str| scratch.loss(&["eval", of, "--data", "a.jsonl", "--tokens", "2k", "--context", "32"]);
    assert_eq!(loss("runs/r"), loss("out"));
    // A run cannot drop these components unnoticed.
    for from in ["runs/r", "out"] {
        let tied =
            ["--init-from", from, "--data", "a.jsonl", "--untied", "off", "--steps", "1", "--name", "t"];
        let error = scratch.fails(&tied);
        assert!(error.contains("not the embedding") && error.contains("--untied on"), "{error}");
    }
    let path = scratch.path().join("runs/r/config.toml");
    let config = std::fs::read_to_string(&path).expect("a file");
    for (from, to) in [
        ("untied = true", ""),
        ("4,1,4,24", "8,1,4,24"),
        ("window = 9", "window = 8"),
        ("\"SL\"", "\"S\""),
        ("qkv-bias = true", ""),
    ] {
        assert!(config.contains(from), "{from}: {config}");
        std::fs::write(&path, config.replace(from, to)).expect("a file");
        let error = scratch.fails(&["--resume", "runs/r", "--steps", "5"]);
        assert!(error.contains("hint:"), "{from}: {error}");
    }
    std::fs::write(&path, &config).expect("a file");
    scratch.ok(&["--resume", "runs/r", "--steps", "5"]);
    let error = scratch.fails(&small(&["--rope-scaling", "4,4,1,24", "--dry-run"]));
    assert!(error.contains("rope-scaling is out of range") && error.contains("hint:"), "{error}");
    for (bad, word) in [
        (["--window-pattern", "SL"], "a pattern of windows without a window"),
        (["--window", "0"], "window is out of range"),
    ] {
        let error = scratch.fails(&small(&[&bad[..], &["--attn", "fpa", "--dry-run"]].concat()));
        assert!(error.contains(word) && error.contains("hint:"), "{error}");
    }
    let sparse = ["--window", "9", "--attn", "sla2", "--sla2-blocks", "1", "--sla2-block", "16", "--dry-run"];
    assert!(scratch.fails(&small(&sparse)).contains("SLA2 does not support sliding windows"));
    // A pattern without a window in any layer turns windows off.
    let plan = scratch.ok(&small(&[&sparse[..], &["--window-pattern", "L"]].concat()));
    assert!(!plan.contains("windows of"), "{plan}");
    for (layers, class, name) in [("1", "MistralForCausalLM", "all"), ("2", "MinistralForCausalLM", "some")] {
        let own = ["--layers", layers, "--qk-norm", "off", "--steps", "1", "--attn", "fpa", "--name", name];
        scratch.ok(&small(&[&own[..], &windows, &["--data", "a.jsonl"]].concat()));
        scratch.ok(&["export", &format!("runs/{name}"), "--to", name]);
        let config = std::fs::read_to_string(scratch.path().join(name).join("config.json")).expect("one");
        assert!(config.contains(class) && config.contains("\"sliding_window\": 9"), "{config}");
        assert_eq!(loss(&format!("runs/{name}")), loss(name));
    }
    // transformers has no model with both QK-norm and biases.
    let both = ["--qk-norm", "on", "--qkv-bias", "on", "--steps", "1", "--attn", "fpa", "--name", "both"];
    scratch.ok(&small(&[&both[..], &["--data", "a.jsonl"]].concat()));
    let error = scratch.fails(&["export", "runs/both", "--to", "none"]);
    assert!(error.contains("transformers has no model") && !scratch.path().join("none").exists(), "{error}");
}
