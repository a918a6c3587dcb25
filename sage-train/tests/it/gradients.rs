//! The bias of low-bit gradients: `probe --gradient`, and runs that begin with another run's weights.

use std::collections::HashMap;

use candle_core::{DType, Device, Tensor};
use sage_train::metrics::GradientErrors;

use crate::support::{Scratch, small};

/// The mean of the micro-batches' gradients has the norm that training recorded for the step over the same sequences.
/// Both gradients are f32 sums of 16 terms, in different order.
#[test]
fn the_mean_gradient_is_that_of_a_step() {
    let scratch = Scratch::new();
    let flags =
        ["--attn", "fpa", "--layers", "2", "--tokens-per-step", "1k", "--micro-batch", "2", "--steps", "4"];
    scratch
        .ok(&small(&[&flags[..], &["--checkpoint-every", "3", "--keep-every", "1", "--name", "r"]].concat()));
    let checkpoint = "runs/r/checkpoints/step-00000003";
    let probe = ["probe", checkpoint, "--gradient", "--micro-batches", "16"];
    let files = ["--json", "g.json", "--csv", "g.csv", "--svg", "g.svg"];
    let schemes = ["--schemes", "sagebwd;sagebwd:products=scores"];
    let table = scratch.ok(&[&probe[..], &files, &schemes].concat());
    assert!(
        table.contains("after step 3") && table.contains("products scores") && table.contains("layer 1"),
        "{table}"
    );
    let read = |name: &str| std::fs::read_to_string(scratch.path().join(name)).expect("a file");
    let all: Vec<GradientErrors> = serde_json::from_str(&read("g.json")).expect("JSON");
    let [paper, scores] = all.as_slice() else { panic!("two schemes") };
    let names: Vec<&str> = paper.parts.iter().map(|part| part.name.as_str()).collect();
    assert_eq!(names, ["all", "embedding", "layer 0", "layer 1", "norm"]);
    let (count, last) = paper.parts[0].curve.last().expect("a curve");
    assert_eq!((*count, paper.tokens), (16, 64));
    let trained = scratch.metrics("r")[3].grad_norm;
    assert!((last.exact.sqrt() / trained - 1.0).abs() < 1e-5, "{} for {trained}", last.exact.sqrt());
    // The 16-bit gradients are equal, and errors are smaller with fewer INT8 matmuls.
    assert_eq!(paper.parts[0].curve[0].1.exact, scores.parts[0].curve[0].1.exact);
    assert!(scores.parts[0].curve[0].1.error < paper.parts[0].curve[0].1.error);
    assert_eq!(read("g.csv").lines().count(), 1 + 2 * 5 * 5);
    assert!(read("g.svg").contains("noise of the data"));
    // The report plots all probes of the run. A scheme that was probed twice appears once.
    scratch.ok(&[&probe[..], &["--schemes", "sagebwd"]].concat());
    scratch.ok(&["report", "runs/r", "--figures", "figures"]);
    let figure = read("figures/gradients.svg");
    assert!(figure.contains("noise of the data") && figure.contains("products scores"), "{figure}");
    let kept: Vec<GradientErrors> = serde_json::from_str(&read("runs/r/gradients.json")).expect("JSON");
    assert_eq!(kept.len(), 2);
    for (flags, why) in [
        (&["--gradient", "--micro-batches", "24"][..], "16, 32, 64"),
        (
            &["--gradient", "--schemes", "fpa"],
            "unquantized attention has no errors to measure: it is the reference",
        ),
        (&["--gradient", "--heads"], "cannot be used with"),
        (&["--gradient", "--micro-batch", "64", "--micro-batches", "1024"], "distinct sequences"),
        (&["--device", "cpu"], "--linear or --sigma"),
        (&["--schemes", "sagebwd"], "--gradient"),
    ] {
        let error = scratch.fails(&[&["probe", "runs/r"], flags].concat());
        assert!(error.contains(why), "{flags:?}: {error}");
    }
}

/// Runs that begin with the weights of a run, of its checkpoint or of its export are bit-identical.
#[test]
fn a_run_begins_with_the_weights_of_another() {
    let scratch = Scratch::new();
    scratch.ok(&small(&[
        "--attn",
        "sagebwd",
        "--smoothing",
        "kv",
        "--qk-norm",
        "on",
        "--steps",
        "4",
        "--name",
        "r",
    ]));
    scratch.ok(&["export", "runs/r", "--to", "hf"]);
    let losses = |from: &str, name: &str, flags: &[&str]| -> Vec<f64> {
        let begin =
            ["--init-from", from, "--corpus-mb", "1", "--context", "32", "--steps", "3", "--name", name];
        let size = [
            "--tokens-per-step",
            "256",
            "--micro-batch",
            "4",
            "--eval-tokens",
            "512",
            "--sample-tokens",
            "0",
        ];
        scratch.ok(&[&begin[..], &size, flags].concat());
        scratch.metrics(name).iter().map(|point| point.loss).collect()
    };
    let wanted = losses("hf", "of-export", &["--attn", "fpa"]);
    assert_eq!(losses("runs/r", "of-run", &["--attn", "fpa"]), wanted);
    assert_eq!(losses("runs/r/checkpoints/step-00000004", "of-checkpoint", &["--attn", "fpa"]), wanted);
    // Without --attn a run has the attention of the run that its weights are from.
    losses("runs/r", "alike", &[]);
    let config = std::fs::read_to_string(scratch.path().join("runs/alike/config.toml")).expect("settings");
    assert!(config.contains("smoothing = \"kv\"") && config.contains("attn = \"sagebwd\""), "{config}");
    // If a run with SLA2 begins with weights of a model without SLA2, its router begins as in a new model. A run that
    // begins with an SLA2 run's weights adopts `--sla2-blocks` and `--sla2-block`, but not `--sla2-dense-steps`.
    let sla2 = ["--attn", "sla2", "--sla2-blocks", "1", "--sla2-block", "16", "--sla2-dense-steps", "2"];
    let wanted = losses("hf", "sla2-of-export", &sla2);
    assert_eq!(losses("runs/r", "sla2-of-run", &sla2), wanted);
    assert_eq!(losses("runs/r/checkpoints/step-00000004", "sla2-of-checkpoint", &sla2), wanted);
    losses("runs/sla2-of-run", "sla2-again", &[]);
    let config =
        std::fs::read_to_string(scratch.path().join("runs/sla2-again/config.toml")).expect("settings");
    assert!(config.contains("blocks = 1") && config.contains("block = 16"), "{config}");
    assert!(!config.contains("dense-steps = 2\n"), "{config}");
    // Two `--data` flags give a mixture of both texts.
    scratch.file("a.txt", "Some text of a kind. ".repeat(200));
    scratch.file("b.txt", "And something else entirely! ".repeat(200));
    let eval = |data: &[&str]| scratch.ok(&[&["eval", "runs/r", "--all"], data].concat());
    let both = eval(&["--data", "a.txt", "--data", "b.txt"]);
    assert!(both != eval(&["--data", "a.txt"]) && both != eval(&["--data", "b.txt"]), "{both}");
    // The tokenizer belongs to the weights.
    scratch.ok(&small(&["--attn", "fpa", "--steps", "1", "--corpus-seed", "5", "--name", "o"]));
    // A preset that pads the vocabulary: its rows are taken over. Weights with other rows do not fit it.
    let padded = ["--preset", "40m", "--steps", "1", "--name", "padded"];
    scratch.ok(&small(&padded));
    let begin =
        ["--init-from", "runs/padded", "--corpus-mb", "1", "--context", "32", "--tokens-per-step", "256"];
    scratch.ok(&[&begin[..], &["--micro-batch", "4", "--steps", "1", "--sample-tokens", "0"]].concat());
    let error = scratch.fails(&["--init-from", "runs/r", "--preset", "40m", "--dry-run"]);
    assert!(
        error.contains("the vocabulary does not fit") && error.contains("300 rows, as in runs/r"),
        "{error}"
    );
    let other = ["--init-from", "runs/r", "--tokenizer", "runs/o/tokenizer.json", "--corpus-mb", "1"];
    assert!(scratch.fails(&other).contains("not the one that the weights were trained with"));
    let tokenizer = scratch.path().join("runs/r/tokenizer.json");
    std::fs::rename(&tokenizer, scratch.path().join("runs/r/other.json")).expect("moved");
    let begin = ["--init-from", "runs/r", "--corpus-mb", "1", "--context", "32", "--tokens-per-step", "256"];
    assert!(scratch.fails(&begin).contains("tokenizer.json"));
}

#[test]
fn the_built_in_continuations_are_a_plan() {
    let scratch = Scratch::new();
    scratch.ok(&small(&["--attn", "fpa", "--steps", "2", "--name", "r"]));
    let sweep = ["sweep", "continuation-mini", "--dry-run", "--no-measure", "--device", "cpu"];
    assert!(scratch.fails(&sweep).contains("--init-from RUN/checkpoints"));
    scratch.file("text.txt", "Some text. ".repeat(10_000));
    let plan =
        scratch.ok(&[&sweep[..], &["--data", "text.txt", "--init-from", "runs/r/checkpoints/step-00000002"]]
            .concat());
    assert!(plan.contains("\n72 runs, "), "{plan}");
}

/// Runs that begin with the same weights train on the same batches: their training losses are compared step by step.
#[test]
fn continuations_are_compared_by_their_training_losses() {
    let scratch = Scratch::new();
    scratch.ok(&small(&["--attn", "fpa", "--steps", "4", "--name", "r"]));
    let lists = [
        "--attn",
        "fpa,attn-qat",
        "--order-seed",
        "1,2",
        "--init-from",
        "runs/r",
        "--steps",
        "8",
        "--name",
        "s",
    ];
    scratch.ok(&small(&lists));
    let table = scratch.ok(&["report", "runs/s", "--csv", "s.csv"]);
    let row = table.lines().find(|line| line.starts_with("attn-qat")).expect("a row");
    assert!(table.contains("training loss") && row.matches("2 pairs").count() == 2, "{table}");
    // The expected difference over the last quarter of the steps, from the metrics.
    let points = |attn: &str, seed: &str| {
        let runs = std::fs::read_dir(scratch.path().join("runs/s")).expect("runs");
        let mut names = runs.map(|run| run.expect("a run").file_name().to_string_lossy().into_owned());
        let name = names.find(|name| name.starts_with(attn) && name.ends_with(seed)).expect("a run");
        scratch.metrics(&format!("s/{name}"))
    };
    let late = |attn: &str, seed: &str| {
        let points = points(attn, seed);
        (points[6].loss + points[7].loss) / 2.0
    };
    let base = (late("fpa", "1") + late("fpa", "2")) / 2.0;
    let mean = 100.0 * ((late("attn-qat", "1") + late("attn-qat", "2")) / 2.0 - base) / base;
    let check = |n: usize, mean: f64| {
        let part = row.split(" % ").nth(n).and_then(|part| part.split_whitespace().last()).expect("a number");
        let decimals = part.split('.').nth(1).map_or(0, str::len) as i32;
        let shown: f64 = part.parse().expect("a number");
        assert!((shown - mean).abs() <= 0.51 * 10f64.powi(-decimals), "{shown} for {mean}: {table}");
    };
    assert!(mean.abs() > 1e-2, "{mean}");
    check(1, mean);
    // The least-squares line through eight differences: weights 2 i - 7 add up to zero, and their squares to 168.
    let slope = |seed: &str| {
        let (own, base) = (points("attn-qat", seed), points("fpa", seed));
        let weighted = (0..8).map(|i| (2.0 * i as f64 - 7.0) * (own[i].loss - base[i].loss)).sum::<f64>();
        2.0 * weighted / 168.0 / (own[0].tokens as f64 / 1e6)
    };
    check(2, 100.0 * (slope("1") + slope("2")) / 2.0 / base);
    // Training losses of runs with different numbers of steps are not compared, because the batches differ.
    let alone = std::fs::read_dir(scratch.path().join("runs/s")).expect("runs").find_map(|run| {
        let path = run.expect("a run").path();
        let name = path.display().to_string();
        (name.contains("fpa") && name.ends_with('1')).then_some(name)
    });
    let alone = alone.expect("a run");
    let compared = |name: &str, from: &str, steps: &str| {
        let flags = ["--attn", "attn-qat", "--order-seed", "1", "--name", name];
        scratch.ok(&small(&[&flags[..], &["--init-from", from, "--steps", steps]].concat()));
        scratch.ok(&["report", &alone, &format!("runs/{name}")]).contains("training loss")
    };
    assert!(compared("same", "./runs/r", "8"));
    assert!(!compared("shorter", "runs/r", "4"));
    // Training losses of runs with different initial weights are not compared. Further training changes the weights of
    // `runs/r`.
    scratch.ok(&["--resume", "runs/r", "--steps", "6"]);
    assert!(!compared("later", "runs/r", "8"));
    let table = scratch.ok(&["report", "runs/same", "runs/later"]);
    assert!(
        table.contains("runs started from different weights of runs/r, which was trained further"),
        "{table}"
    );
    // A sweep cannot be extended after the weights that its runs start from have changed.
    let more: Vec<&str> = lists.iter().map(|word| if *word == "1,2" { "1,2,3" } else { word }).collect();
    assert!(scratch.fails(&small(&more)).contains("started from other weights"));
}

fn state(scratch: &Scratch, checkpoint: &str) -> HashMap<String, Vec<f64>> {
    let path = scratch.path().join(checkpoint).join("state.safetensors");
    let read = candle_core::safetensors::load(path, &Device::Cpu).expect("a checkpoint");
    let values = |tensor: Tensor| tensor.flatten_all()?.to_dtype(DType::F64)?.to_vec1();
    read.into_iter().map(|(name, tensor)| (name, values(tensor).expect("f32"))).collect()
}

/// Two one-step runs begin at a checkpoint, one with its moments, one with moments of 0. Both have the same gradient,
/// so their moments differ only because of the initial values.
#[test]
fn moments_of_a_checkpoint_are_begun_with_and_need_no_correction() {
    let scratch = Scratch::new();
    let run = |more: &[&str]| {
        let flags = [
            "--attn",
            "fpa",
            "--corpus-mb",
            "1",
            "--lr",
            "3e-3",
            "--schedule",
            "constant",
            "--warmup-steps",
            "0",
        ];
        scratch.ok(&small(&[&flags[..], more].concat()))
    };
    let from = |run: &str, step: u64| format!("runs/{run}/checkpoints/step-{step:08}");
    let one_step = |from: &str, moments: &str, name: &str| {
        let flags = ["--order-seed", "9", "--steps", "1", "--init-moments", moments];
        run(&[&["--init-from", from, "--name", name][..], &flags].concat());
        state(&scratch, &format!("runs/{name}/checkpoints/step-00000001"))
    };
    // The bias of moments depends on the betas of the run that made them.
    run(&["--steps", "3", "--beta1", "0.8", "--beta2", "0.9", "--name", "r"]);
    let (first, second) = (from("r", 3), from("warm", 1));
    let (lr, decay, eps, betas) = (3e-3, 0.1, 1e-8, [0.9f64, 0.95]);
    let biased = [0.8f64, 0.9].map(|beta| 1.0 - beta.powi(3));
    // Moments whose initial values were bias-corrected have no bias after a step.
    for (from, bias, names) in [(first, biased, ["warm", "cold"]), (second, [1.0; 2], ["warmer", "colder"])] {
        let old = state(&scratch, &from);
        let [warm, cold] = [("on", names[0]), ("off", names[1])].map(|(on, name)| one_step(&from, on, name));
        let mut longest = 0.0f64;
        for name in old.keys().filter(|name| !name.starts_with("adamw.")) {
            let row = |state: &HashMap<String, Vec<f64>>, row: usize| {
                state[&format!("{}{name}", ["", "adamw.mean/", "adamw.square/"][row])].clone()
            };
            for moment in [1, 2] {
                let kept = betas[moment - 1] / bias[moment - 1];
                let all = row(&old, moment).into_iter().zip(row(&warm, moment)).zip(row(&cold, moment));
                for ((old, warm), new) in all {
                    // Each moment is rounded twice in f32, its initial value three times.
                    let allowed = 3.0 * f64::from(f32::EPSILON) * ((kept * old).abs() + new.abs());
                    assert!(
                        (warm - (kept * old + new)).abs() <= allowed,
                        "{name}: {warm} of {old} and {new}"
                    );
                }
            }
            let (mean, square) = (row(&warm, 1), row(&warm, 2));
            let keep = if name.ends_with("norm.weight") { 1.0 } else { 1.0 - lr * decay };
            for (i, (before, after)) in row(&old, 0).into_iter().zip(row(&warm, 0)).enumerate() {
                let step = lr * mean[i] / (square[i].sqrt() + eps);
                // All values are f32: a few roundings of the step, two of the weight.
                let allowed = f64::from(f32::EPSILON) * (8.0 * step.abs() + before.abs());
                assert!((after - (keep * before - step)).abs() <= allowed, "{name}: {before} {after} {step}");
                longest = longest.max(step.abs());
            }
        }
        assert!(longest > 0.1 * lr, "{longest}");
    }
    // A resumed run applies no bias correction either.
    let flags = ["--init-from", &from("r", 3), "--order-seed", "9", "--init-moments", "on"];
    run(&[&flags[..], &["--steps", "3", "--name", "whole"]].concat());
    scratch.ok(&["--resume", "runs/warm", "--steps", "3"]);
    assert!(state(&scratch, &from("whole", 3)) == state(&scratch, &from("warm", 3)));
    // `--init-moments on` needs a checkpoint that has moments of all parameters.
    let sparse = ["--attn", "sla2", "--sla2-block", "16", "--sla2-blocks", "1", "--init-moments", "on"];
    let error =
        scratch.fails(&small(&[&sparse[..], &["--init-from", &from("r", 3), "--steps", "2"]].concat()));
    assert!(error.contains("no moments of a parameter"), "{error}");
    assert!(
        scratch
            .fails(&["--init-from", "runs/r", "--init-moments", "on"])
            .contains("no moments of an optimizer")
    );
    assert!(scratch.fails(&["--init-moments", "on"]).contains("without --init-from"));
}
