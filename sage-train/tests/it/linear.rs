//! Training with linear layers in FP8.

use crate::support::{Scratch, small};

fn course(scratch: &Scratch, run: &str) -> Vec<(f64, f64)> {
    scratch.metrics(run).iter().map(|point| (point.loss, point.grad_norm)).collect()
}

fn train(scratch: &Scratch, name: &str, flags: &[&str]) -> Vec<(f64, f64)> {
    let run = ["--attn", "fpa", "--layers", "3", "--steps", "6", "--name", name];
    scratch.ok(&small(&[&run[..], flags].concat()));
    course(scratch, name)
}

/// Neither recomputed activations nor a resume change the FP8 values.
#[test]
fn recomputation_and_a_resume_give_the_same_bits() {
    let scratch = Scratch::new();
    let fp8 = train(&scratch, "fp8", &["--linear", "fp8"]);
    for recompute in ["attention", "block"] {
        let again = train(&scratch, recompute, &["--linear", "fp8", "--recompute", recompute]);
        assert_eq!(again, fp8, "{recompute}");
    }
    // The model has biases, whose gradients are sums of rows, and a separate output matrix.
    let flags = [
        "--linear",
        "fp8",
        "--linear-head",
        "fp8",
        "--vocab-size",
        "272",
        "--qkv-bias",
        "on",
        "--untied",
        "on",
    ];
    let biased = train(&scratch, "biased", &flags);
    assert_ne!(biased, fp8);
    assert_eq!(train(&scratch, "biased-again", &[&flags[..], &["--recompute", "block"]].concat()), biased);
    for scaling in ["delayed", "current"] {
        let flags =
            ["--linear", "fp8", "--schedule", "constant", "--warmup-steps", "0", "--linear-scaling", scaling];
        let whole = train(&scratch, &format!("whole-{scaling}"), &flags);
        let cut = format!("cut-{scaling}");
        train(&scratch, &cut, &[&flags[..], &["--steps", "3"]].concat());
        scratch.ok(&["--resume", &format!("runs/{cut}"), "--steps", "6"]);
        assert_eq!(course(&scratch, &cut), whole, "{scaling}");
    }
    // With delayed scaling the checkpoint contains the scales; with current scaling no scales are stored.
    let about = |run: &str| {
        let path = scratch.path().join(format!("runs/{run}/checkpoints/step-00000006/checkpoint.json"));
        std::fs::read_to_string(path).expect("a checkpoint")
    };
    assert!(about("cut-delayed").contains("\"scales\"") && !about("cut-current").contains("\"scales\""));
    assert_eq!(scratch.metrics("fp8")[5].fp8_saturated, Some(0));
    // If weights grow by a large factor in a step, the run diverges.
    let flags = ["--attn", "fpa", "--linear", "fp8", "--steps", "6", "--eval-every", "2", "--name", "steep"];
    let steep = ["--lr", "2", "--warmup-steps", "0", "--schedule", "constant", "--clip", "0"];
    let said = scratch.fails(&small(&[&flags[..], &steep].concat()));
    assert!(said.contains("have saturated since the last validation, 0 in the interval before"), "{said}");
}

/// In FP8 each matmul has a relative rounding error of about .04. So the first gradient differs from the gradient with
/// all layers in the compute type, but by no more than the sum of a few roundings. With `--linear-bf16-layers` for all
/// layers, the gradients are equal.
#[test]
fn layers_can_stay_in_the_compute_type() {
    let scratch = Scratch::new();
    let exact = train(&scratch, "exact", &["--linear", "bf16"]);
    let fp8 = train(&scratch, "fp8", &["--linear", "fp8"]);
    let all = train(&scratch, "all", &["--linear", "fp8", "--linear-bf16-layers", "0-2"]);
    let ends = train(&scratch, "ends", &["--linear", "fp8", "--linear-bf16-layers", "0,-1"]);
    let wide = train(&scratch, "wide", &["--linear", "fp8", "--linear-gradient", "e5m2"]);
    assert_eq!(all, exact);
    assert!(ends != exact && ends != fp8 && wide != fp8);
    for other in [&fp8, &ends, &wide] {
        let (loss, norm) = (other[0].0 / exact[0].0, other[0].1 / exact[0].1);
        assert!((loss - 1.0).abs() < 2e-3 && (norm - 1.0).abs() < 0.1, "{loss} {norm}");
    }
    // An FP8 output matrix gives the logits a relative error of .037 (one matmul). The loss changes by less.
    let head = train(&scratch, "head", &["--linear", "fp8", "--linear-head", "fp8", "--vocab-size", "272"]);
    let plain = train(&scratch, "plain", &["--linear", "fp8", "--vocab-size", "272"]);
    assert!(head[0].0 != plain[0].0 && (head[0].0 / plain[0].0 - 1.0).abs() < 2e-3, "{head:?} {plain:?}");
    assert!((head[0].1 / plain[0].1 - 1.0).abs() < 0.1, "{head:?} {plain:?}");
    // The run validates in the compute type, as `eval` does. `eval` reads fewer tokens here, so the losses differ.
    let eval = |run: &str| scratch.loss(&["eval", run, "--tokens", "2k"]);
    let last = scratch.metrics("fp8").last().and_then(|point| point.val_loss).expect("a validation");
    assert!((eval("runs/fp8") - last).abs() < 2e-2);
    // `--linear-eval fp8` changes the validation loss and does not change the training.
    let validated = train(&scratch, "validated", &["--linear", "fp8", "--linear-eval", "fp8"]);
    assert_eq!(validated, fp8);
    let in_fp8 = scratch.metrics("validated").last().and_then(|point| point.val_loss).expect("a validation");
    assert!(in_fp8 != last && (in_fp8 / last - 1.0).abs() < 2e-3, "{in_fp8} {last}");
    assert_eq!(eval("runs/validated"), eval("runs/fp8"));
    let plan = scratch.ok(&["--dry-run", "--config", "runs/ends/config.toml"]);
    assert!(plan.contains("FP8 in training") && plan.contains("layers 0, 2"), "{plan}");
}

/// Two ranks compute with the same FP8 values as a run on one rank, but add gradients in another order. With delayed
/// scaling each rank measures its own first micro-batch, so the ranks' first scales may differ by a power of two, which
/// affects only subnormal values. From the second step on all ranks have the same scales.
#[test]
fn ranks_have_the_same_codes() {
    let scratch = Scratch::new();
    for (scaling, limit) in [("current", 1e-6), ("delayed", 1e-3)] {
        let batch = ["--tokens-per-step", "512", "--micro-batch", "2"];
        let schedule = ["--schedule", "constant", "--warmup-steps", "0"];
        let flags = [&["--linear", "fp8", "--linear-scaling", scaling][..], &batch, &schedule].concat();
        let on_two = [&flags[..], &["--gpus", "2", "--device", "cpu"]].concat();
        let named = |name: &str| format!("{name}-{scaling}");
        let one = train(&scratch, &named("one"), &flags);
        let two = train(&scratch, &named("two"), &on_two);
        assert!((one[0].1 / two[0].1 - 1.0).abs() < limit, "{scaling}: {:?} {:?}", one[0], two[0]);
        // With current scaling the first loss does not depend on the number of ranks: the scale of a weight matrix is
        // computed from its parts on both ranks.
        assert!(scaling != "current" || one[0].0 == two[0].0, "{:?} {:?}", one[0], two[0]);
        assert_eq!(train(&scratch, &named("again"), &on_two), two);
        // Any number of ranks can resume the run. One rank quantizes whole matrices. Two ranks quantize parts and
        // gather them. The FP8 values are the same.
        let longer = [&on_two[..], &["--steps", "8"]].concat();
        let longer = train(&scratch, &named("longer"), &longer);
        scratch.ok(&["--resume", &format!("runs/{}", named("two")), "--steps", "8"]);
        let resumed = course(&scratch, &named("two"));
        assert!(scaling != "current" || resumed[6].0 == longer[6].0, "{:?} {:?}", resumed[6], longer[6]);
    }
}

/// In FP8, two ranks have nearly the losses of one rank, with AdamW and with Muon. `--piece-mb` splits the parameters.
#[test]
fn pieces_in_fp8_are_gathered() {
    let scratch = Scratch::new();
    let batch = ["--tokens-per-step", "1k", "--micro-batch", "2", "--piece-mb", "0.02", "--eval-every", "3"];
    let head =
        ["--linear", "fp8", "--linear-head", "fp8", "--linear-scaling", "current", "--vocab-size", "272"];
    for (name, more) in [
        ("adamw", &["--untied", "on", "--linear-eval", "fp8"][..]),
        ("muon", &["--optimizer", "muon", "--linear-bf16-layers", "1"]),
    ] {
        let flags = [&head[..], &batch, more].concat();
        let one = train(&scratch, name, &flags);
        let two = format!("{name}-2");
        let several = train(&scratch, &two, &[&flags[..], &["--gpus", "2", "--device", "cpu"]].concat());
        assert_eq!(one[0].0, several[0].0, "{name}");
        for (step, (one, several)) in one.iter().zip(&several).enumerate() {
            assert!((one.0 / several.0 - 1.0).abs() < 1e-3, "{name}, step {step}: {one:?} {several:?}");
        }
        let validated = |run: &str| scratch.metrics(run)[5].val_loss.expect("a validation");
        assert!((validated(name) / validated(&two) - 1.0).abs() < 1e-3, "{name}");
    }
}

/// With FP8 in validation, a run with `sla2-window` can print samples, although their lengths are not multiples of 16.
/// A context of 40 tokens is an error: a batch of validation may be a single sequence, and 40 is not a multiple of 16.
#[test]
fn validation_in_fp8_needs_multiples_of_16() {
    let scratch = Scratch::new();
    let fp8 = ["--linear", "fp8", "--linear-eval", "fp8", "--steps", "3", "--sample-tokens", "3"];
    let window = ["--attn", "sla2-window", "--sla2-blocks", "1", "--sla2-block", "16", "--name", "window"];
    scratch.ok(&small(&[&fp8[..], &window].concat()));
    let error = scratch.fails(&small(
        &[&fp8[..], &["--context", "40", "--micro-batch", "2", "--tokens-per-step", "320"]].concat(),
    ));
    assert!(error.contains("context does not fit FP8 matmuls"), "{error}");
}

#[test]
fn what_does_not_fit_is_refused() {
    let scratch = Scratch::new();
    for (flags, part) in [
        (&["--linear-gradient", "e5m2"][..], "--linear fp8"),
        (&["--linear", "bf16", "--linear-bf16-layers", "0"], "--linear fp8"),
        (&["--linear-scaling", "current"], "--linear fp8"),
        (&["--linear-eval", "fp8"], "--linear fp8"),
        (&["--linear", "fp8", "--linear-bf16-layers", "9"], "no such layer"),
        (&["--linear", "fp8", "--linear-bf16-layers", "first"], "not a list of layers"),
        (&["--linear", "fp8", "--ffn", "72"], "a multiple of 16"),
        (&["--linear", "fp8", "--linear-head", "fp8", "--vocab-size", "300"], "a multiple of 16"),
        (&["--linear-head", "fp8"], "--linear fp8"),
        (&["--linear", "int8"], "possible values"),
    ] {
        let error = scratch.fails(&small(&[&["--dry-run"], flags].concat()));
        assert!(error.contains(part), "{flags:?}: {error}");
    }
    scratch.file("s.toml", "[linear]\nprecision = \"fp8\"\ngradient = \"e5m2\"\n");
    let plan = scratch.ok(&["--dry-run", "--config", "s.toml"]);
    assert!(plan.contains("gradients E5M2"), "{plan}");
}

/// Errors are relative. Rounding a matrix with many values of similar size to E4M3 has an error of .026. A matmul of
/// two such matrices has .037, and .059 if one of them is in E5M2. The errors are smaller where few values dominate.
#[test]
fn probe_measures_linear_layers() {
    let scratch = Scratch::new();
    train(&scratch, "fp8", &["--linear", "fp8"]);
    train(&scratch, "e5m2", &["--linear", "fp8", "--linear-gradient", "e5m2"]);
    train(&scratch, "plain", &["--attn", "none"]);
    let errors = |run: &str, matrices: usize| -> Vec<Vec<f64>> {
        let table = scratch.ok(&["probe", run, "--linear", "--sequences", "2", "--csv", "linear.csv"]);
        assert!(table.contains("query-key-value") && table.contains("mean"), "{table}");
        let text = std::fs::read_to_string(scratch.path().join("linear.csv")).expect("CSV");
        let numbers = |line: &str| line.split(',').skip(2).map(|x| x.parse().expect("a number")).collect();
        let all: Vec<Vec<f64>> = text.lines().skip(1).map(numbers).collect();
        assert_eq!(all.len(), 3 * matrices, "{text}");
        all
    };
    let (in_e4m3, in_e5m2) = (errors("runs/fp8", 4), errors("runs/e5m2", 4));
    let dx = |all: &[Vec<f64>]| all.iter().map(|errors| errors[1]).sum::<f64>();
    assert!(dx(&in_e5m2) > 1.2 * dx(&in_e4m3), "{in_e4m3:?} {in_e5m2:?}");
    let both = in_e4m3.into_iter().zip(in_e5m2);
    for (e4m3, e5m2) in both {
        assert!(e4m3.iter().all(|error| (0.01..0.06).contains(error)), "{e4m3:?}");
        let of_e5m2 = e5m2[1..].iter().all(|error| (0.015..0.09).contains(error));
        assert!((0.01..0.06).contains(&e5m2[0]) && of_e5m2, "{e5m2:?}");
    }
    assert!(scratch.ok(&["probe", "runs/plain", "--linear", "--sequences", "2"]).contains(" - "));
    assert_eq!(errors("runs/plain", 2).len(), 6);
    for (flags, part) in
        [(&["--context", "24", "--sequences", "1"][..], "multiple of 16"), (&["--heads"], "cannot be used")]
    {
        let error = scratch.fails(&[&["probe", "runs/fp8", "--linear"], flags].concat());
        assert!(error.contains(part), "{error}");
    }
}
