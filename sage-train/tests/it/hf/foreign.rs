//! Folders that other programs wrote: ids of special tokens, output matrices, settings of the rotary embedding.

use std::collections::HashMap;

use candle_core::{DType, Device, Result, Tensor};
use sage_train::data::{Boundaries, Tokenizer};
use sage_train::hf;
use serde_json::{Value, json};

use super::golden;
use crate::support::Scratch;

/// Copies the golden Llama to folder `m`, with changes of its `config.json`.
fn folder(scratch: &Scratch, changes: &Value) {
    for file in ["model.safetensors", "tokenizer.json"] {
        scratch.file(&format!("m/{file}"), std::fs::read(golden("llama").join(file)).expect("a file"));
    }
    let text = std::fs::read(golden("llama").join("config.json")).expect("a file");
    let mut config: Value = serde_json::from_slice(&text).expect("JSON");
    for (key, value) in changes.as_object().expect("an object") {
        config[key] = value.clone();
    }
    scratch.file("m/config.json", config.to_string());
}

#[test]
fn documents_begin_and_end_as_the_folder_says() {
    let scratch = Scratch::new();
    let found = |changes: Value| {
        folder(&scratch, &changes);
        let at = scratch.path().join("m");
        Tokenizer::load(&at.join("tokenizer.json")).and_then(|tokenizer| hf::boundaries(&at, &tokenizer))
    };
    let of = |begin: u32, ends: &[u32]| Ok(Boundaries { begin, ends: ends.to_vec() });
    let neither = json!({"bos_token_id": null, "eos_token_id": null});
    assert_eq!(found(neither.clone()), of(0, &[0]));
    assert_eq!(found(json!({"bos_token_id": 3, "eos_token_id": 5})), of(3, &[5]));
    assert_eq!(found(json!({"bos_token_id": [3, 4], "eos_token_id": [5, 7]})), of(3, &[5, 7]));
    // Ids that no token has are ignored.
    assert_eq!(found(json!({"bos_token_id": -1, "eos_token_id": [5, 300]})), of(0, &[5]));
    for wrong in [json!("</s>"), json!([0, null])] {
        let error = found(json!({"eos_token_id": wrong})).expect_err("not an id").to_string();
        assert!(error.contains("eos_token_id") && error.contains("hint:"), "{error}");
    }
    // Each key of generation_config.json overrides the same key of config.json.
    scratch.file("m/generation_config.json", json!({"eos_token_id": [9, 8]}).to_string());
    assert_eq!(found(json!({"bos_token_id": 3, "eos_token_id": 5})), of(3, &[9, 8]));
    // Each id in `eos_token_id` ends a text. If it lists every token, the sample is empty.
    let all: Vec<u32> = (0..300).collect();
    scratch.file("m/generation_config.json", json!({"bos_token_id": 0, "eos_token_id": all}).to_string());
    let output = scratch.run(&["sample", "m", "the", "--tokens", "5"]);
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(String::from_utf8_lossy(&output.stdout), "the\n", "{told}");
    assert!(
        told.contains("0 tokens, then the document ends")
            && told.contains("saw `<|endoftext|>` before the text"),
        "{told}"
    );
    let output = scratch.run(&["sample", "m", "the", "--tokens", "5", "--no-bos"]);
    assert!(output.status.success() && !String::from_utf8_lossy(&output.stderr).contains("before the text"));
    assert!(scratch.fails(&["sample", "m", "--no-bos"]).contains("needs a first token"));
}

/// Without a `tokenizer_config.json`, `eos_token_id` of `config.json` is the end-of-text token if this token is
/// special.
#[test]
fn a_tokenizer_takes_the_id_of_its_model() {
    let scratch = Scratch::new();
    folder(&scratch, &json!({"eos_token_id": [0]}));
    let path = scratch.path().join("m/tokenizer.json");
    let text = std::fs::read_to_string(&path).expect("a file").replace("<|endoftext|>", "<|stop|>");
    std::fs::write(&path, text).expect("a file");
    assert_eq!(Tokenizer::load(&path).expect("a tokenizer").end_of_text(), 0);
    // Token 2 is a quotation mark, and not a special token.
    folder(&scratch, &json!({"eos_token_id": 2}));
    assert_eq!(Tokenizer::load(&path).expect("a tokenizer").end_of_text(), 0);
}

#[test]
fn another_output_matrix_is_refused() -> Result<()> {
    let scratch = Scratch::new();
    folder(&scratch, &json!({}));
    let path = scratch.path().join("m/model.safetensors");
    let mut weights: HashMap<String, Tensor> = candle_core::safetensors::load(&path, &Device::Cpu)?;
    let sample = ["sample", "m", "the", "--tokens", "8", "--temperature", "0"];
    let expected = scratch.ok(&sample);
    let embedding = weights.remove("model.embed_tokens.weight").expect("an embedding");
    weights.insert("lm_head.weight".into(), embedding.clone());
    candle_core::safetensors::save(&weights, &path)?;
    // safetensors' `save_model` stores a tied matrix once, under either name.
    assert_eq!(scratch.ok(&sample), expected);
    weights.insert("model.embed_tokens.weight".into(), embedding.clone());
    candle_core::safetensors::save(&weights, &path)?;
    assert_eq!(scratch.ok(&sample), expected);
    weights.insert("lm_head.weight".into(), (embedding + 1e-3)?);
    candle_core::safetensors::save(&weights, &path)?;
    let error = scratch.fails(&["sample", "m", "the", "--tokens", "1"]);
    assert!(error.contains("tie_word_embeddings: true, and lm_head.weight that is not"), "{error}");
    Ok(())
}

/// A Mistral without `sliding_window` has a window of 4096; null turns windows off. A window that is as long as the
/// model's longest sequence is kept, because `--context` may be longer. A Qwen2 or Qwen3 has windows only with
/// `use_sliding_window`, in the layers that `max_window_layers` or `layer_types` selects.
#[test]
fn sliding_windows_are_settings() {
    let scratch = Scratch::new();
    let windows = |own: Value| {
        folder(&scratch, &own);
        let read = hf::settings(&scratch.path().join("m")).map_err(|error| error.to_string())?;
        let pattern = read.model.window_pattern.map_or(String::new(), |pattern| pattern.to_string());
        Ok::<_, String>((read.model.window.map(|window| window.0), pattern))
    };
    for whole in [
        json!({"model_type": "mistral", "sliding_window": null}),
        json!({"model_type": "qwen2", "sliding_window": null, "use_sliding_window": true}),
        json!({"model_type": "qwen2", "sliding_window": 8, "use_sliding_window": null}),
        json!({"model_type": "llama", "sliding_window": 8, "use_sliding_window": true, "layer_types": ["full_attention", "full_attention"]}),
        json!({"model_type": "qwen2", "sliding_window": 8, "use_sliding_window": false}),
        json!({"model_type": "qwen2", "sliding_window": 8, "use_sliding_window": true}),
    ] {
        assert_eq!(windows(whole), Ok((None, String::new())));
    }
    for (mistral, tokens) in [
        (json!({"model_type": "mistral", "sliding_window": 64}), 64),
        (json!({"model_type": "mistral"}), 4096),
        (json!({"model_type": "ministral"}), 4096),
    ] {
        assert_eq!(windows(mistral), Ok((Some(tokens), "S".into())));
    }
    // transformers' AutoModel loads a Mistral with `layer_types` as a Ministral.
    for kind in ["mistral", "ministral"] {
        let of_layers = json!({"model_type": kind, "sliding_window": 8, "layer_types": ["full_attention", "sliding_attention"]});
        assert_eq!(windows(of_layers), Ok((Some(8), "LS".into())));
    }
    let first = json!({"model_type": "qwen2", "sliding_window": 8, "use_sliding_window": true, "max_window_layers": 1});
    assert_eq!(windows(first), Ok((Some(8), "LS".into())));
    let kinds = |kinds: &[&str]| json!({"model_type": "qwen3", "sliding_window": 8, "use_sliding_window": true, "layer_types": kinds});
    assert_eq!(windows(kinds(&["sliding_attention", "full_attention"])), Ok((Some(8), "SL".into())));
    for (bad, word) in [
        (kinds(&["sliding_attention", "chunked_attention"]), "layers of chunked_attention"),
        (kinds(&["sliding_attention"]), "1 layer_types"),
        (kinds(&[]), "0 layer_types"),
        (json!({"model_type": "mistral", "sliding_window": 0}), "a window of at least 1"),
    ] {
        let error = windows(bad).expect_err("refused");
        assert!(error.contains(word) && error.contains("hint:"), "{error}");
    }
}

#[test]
fn the_kind_of_rotary_embedding_may_be_written_twice() {
    let scratch = Scratch::new();
    let read = |rope: Value| {
        folder(&scratch, &json!({"rope_parameters": null, "rope_theta": 5000, "rope_scaling": rope}));
        hf::settings(&scratch.path().join("m")).map(|s| (s.model.rope_base, s.model.rope_scaling))
    };
    for plain in [json!(null), json!({"type": "default", "rope_type": "default"}), json!({"type": "default"})]
    {
        assert_eq!(read(plain), Ok((Some(5000.0), None)));
    }
    let llama3 = json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16});
    let scaling = "8,1,4,16".parse().expect("a scaling");
    assert_eq!(read(llama3), Ok((Some(5000.0), Some(scaling))));
    for scaled in [
        json!({"type": "yarn", "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}),
        json!({"type": "yarn", "factor": 4.0}),
        json!({"type": "yarn", "rope_type": "default", "factor": 4.0}),
    ] {
        let error = read(scaled).expect_err("scaled").to_string();
        assert!(error.contains("rotary scaling yarn") && error.contains("rope_type: default"), "{error}");
    }
    // If values contradict each other, transformers uses `rope_scaling` instead of `rope_parameters`, and the inner
    // `rope_theta` instead of the outer. We refuse such a file.
    assert_eq!(read(json!({"rope_type": "default", "rope_theta": 5000})), Ok((Some(5000.0), None)));
    for contradiction in [
        json!({"rope_theta": 5000, "rope_scaling": {"rope_type": "default", "rope_theta": 77}}),
        json!({"rope_theta": 5000, "rope_parameters": {"rope_type": "default", "rope_theta": 9000}}),
        json!({"rope_parameters": {"rope_type": "default"}, "rope_scaling": {"rope_type": "llama3", "factor": 8.0,
            "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}}),
        json!({"rope_parameters": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 16},
            "original_max_position_embeddings": 32}),
    ] {
        folder(&scratch, &json!({"rope_parameters": null, "rope_theta": null, "rope_scaling": null}));
        folder(&scratch, &contradiction);
        let error = hf::settings(&scratch.path().join("m")).expect_err("two embeddings").to_string();
        assert!(
            error.contains("contradict each other") && error.contains("hint:"),
            "{contradiction}: {error}"
        );
    }
    let outside = json!({"rope_parameters": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0}, "original_max_position_embeddings": 16});
    folder(&scratch, &outside);
    let found = hf::settings(&scratch.path().join("m")).expect("settings");
    assert_eq!(found.model.rope_scaling, Some(scaling));
    // The message is about the architecture, whatever else the file lacks.
    scratch.file("m/config.json", r#"{"model_type": "gpt2", "n_embd": 32}"#);
    let error = hf::settings(&scratch.path().join("m")).expect_err("another").to_string();
    assert!(
        error.contains("model_type gpt2") && error.contains("llama, mistral, ministral, qwen2, qwen3"),
        "{error}"
    );
}

/// Missing fields have transformers' defaults. Fields that transformers does not read are ignored.
#[test]
fn fields_are_read_as_transformers_reads_them() {
    let scratch = Scratch::new();
    let path = scratch.path().join("m/config.json");
    let read = |changes: Value, missing: &str| {
        folder(&scratch, &changes);
        let mut config: Value = serde_json::from_slice(&std::fs::read(&path).expect("a file")).expect("JSON");
        config.as_object_mut().expect("an object").remove(missing);
        scratch.file("m/config.json", config.to_string());
        hf::settings(&scratch.path().join("m")).map_err(|error| error.to_string())
    };
    let of_type = |kind: &str| json!({"model_type": kind, "sliding_window": null});
    assert_eq!(read(of_type("qwen3"), "head_dim").expect("settings").model.head_dim, Some(128));
    assert_eq!(read(of_type("llama"), "rms_norm_eps").expect("settings").model.norm_eps, Some(1e-6));
    read(of_type("qwen2"), "max_position_embeddings").expect("settings");
    assert_eq!(hf::longest(&scratch.path().join("m")), Ok(32_768));
    let bias = |kind: &str, key: &str| json!({"model_type": kind, "sliding_window": null, key: true});
    for (kind, key, is_read) in [
        ("llama", "mlp_bias", true),
        ("qwen3", "attention_bias", true),
        ("qwen3", "mlp_bias", false),
        ("qwen2", "attention_bias", false),
        ("mistral", "attention_bias", false),
    ] {
        let found = read(bias(kind, key), "");
        assert_eq!(found.is_err_and(|error| error.contains("biases")), is_read, "{kind} {key}");
    }
    let error = read(json!({"is_causal": false}), "").expect_err("an encoder");
    assert!(error.contains("is_causal: false"), "{error}");
    let error = read(json!({"rms_norm_eps": "1e-6"}), "").expect_err("a string");
    assert!(error.contains("line 1 column"), "{error}");
}

/// Weights that are not floats are refused, and so are weights whose scales are in another tensor.
#[test]
fn quantized_weights_are_refused() -> Result<()> {
    let scratch = Scratch::new();
    folder(&scratch, &json!({"quantization_config": {"quant_method": "fp8"}}));
    let error = scratch.fails(&["sample", "m", "the", "--tokens", "1"]);
    assert!(error.contains("quantized weights (quantization_config)"), "{error}");
    folder(&scratch, &json!({"quantization_config": null}));
    scratch.ok(&["sample", "m", "the", "--tokens", "1"]);
    let path = scratch.path().join("m/model.safetensors");
    let mut weights: HashMap<String, Tensor> = candle_core::safetensors::load(&path, &Device::Cpu)?;
    let norm = weights["model.norm.weight"].to_dtype(DType::U8)?;
    weights.insert("model.norm.weight".into(), norm);
    candle_core::safetensors::save(&weights, &path)?;
    let error = scratch.fails(&["sample", "m", "the", "--tokens", "1"]);
    assert!(error.contains("model.norm.weight in u8") && error.contains("hint:"), "{error}");
    // A tensor that no part of the model needs may have any type.
    folder(&scratch, &json!({}));
    let bytes = std::fs::read(&path).expect("a file");
    let data = 8 + u64::from_le_bytes(bytes[..8].try_into().expect("eight bytes")) as usize;
    let mut header: Value = serde_json::from_slice(&bytes[8..data]).expect("JSON");
    let end = bytes.len() - data;
    header["mask"] = json!({"dtype": "BOOL", "shape": [2], "data_offsets": [end, end + 2]});
    let header = header.to_string().into_bytes();
    let length = (header.len() as u64).to_le_bytes();
    scratch.file("m/model.safetensors", [&length[..], &header, &bytes[data..], &[0, 1]].concat());
    let output = scratch.run(&["sample", "m", "the", "--tokens", "1"]);
    let warning = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success() && warning.contains("ignored 1 weight of m, such as mask"), "{warning}");
    Ok(())
}

/// The names of a base model's weights lack `model.`. Weights in a format other than safetensors are refused.
#[test]
fn weights_of_base_models_are_found() -> Result<()> {
    let scratch = Scratch::new();
    folder(&scratch, &json!({}));
    let sample = ["sample", "m", "the", "--tokens", "8", "--temperature", "0"];
    let expected = scratch.ok(&sample);
    let path = scratch.path().join("m/model.safetensors");
    let weights: HashMap<String, Tensor> = candle_core::safetensors::load(&path, &Device::Cpu)?;
    let of_base = |name: &str| name.strip_prefix("model.").unwrap_or(name).to_owned();
    let weights: HashMap<_, _> = weights.into_iter().map(|(name, x)| (of_base(&name), x)).collect();
    candle_core::safetensors::save(&weights, &path)?;
    assert_eq!(scratch.ok(&sample), expected);
    std::fs::write(&path, "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n")
        .expect("a file");
    assert!(scratch.fails(&sample).contains("git lfs pull"));
    std::fs::rename(&path, path.with_file_name("pytorch_model.bin")).expect("a file");
    let error = scratch.fails(&sample);
    assert!(error.contains("neither model.safetensors nor model.safetensors.index.json"), "{error}");
    Ok(())
}

#[test]
fn special_tokens_of_a_prompt_are_text_unless_asked() {
    let scratch = Scratch::new();
    folder(&scratch, &json!({}));
    let tokenizer = Tokenizer::load(&scratch.path().join("m/tokenizer.json")).expect("a tokenizer");
    let prompt = "the<|endoftext|>the";
    let (text, tokens) = (tokenizer.encode(prompt), tokenizer.encode_with_special_tokens(prompt));
    let [text, tokens] = [text, tokens].map(|ids| ids.expect("ids"));
    assert!(!text.contains(&0) && tokens.iter().filter(|&&id| id == 0).count() == 1, "{text:?} {tokens:?}");
    let warned = |more: &[&str]| {
        let output = scratch.run(&[&["sample", "m", prompt, "--tokens", "1"], more].concat());
        assert!(output.status.success());
        String::from_utf8_lossy(&output.stderr).contains("special tokens are encoded as text")
    };
    assert!(warned(&[]) && !warned(&["--special-tokens"]));
}
