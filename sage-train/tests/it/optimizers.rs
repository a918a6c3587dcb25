//! Training with Muon.

use crate::support::{Scratch, small};

fn train(scratch: &Scratch, name: &str, flags: &[&str]) -> Vec<(f64, f64)> {
    let run = ["--attn", "fpa", "--layers", "2", "--name", name];
    scratch.ok(&small(&[&run[..], flags].concat()));
    scratch.metrics(name).iter().map(|point| (point.loss, point.grad_norm)).collect()
}

/// Two runs are bit-identical, and so is a resumed run; a run from a checkpoint's weights can begin with the
/// checkpoint's moments. A checkpoint has Muon's momentum and row statistics for each hidden matrix, and AdamW's two
/// moments for every other parameter.
#[test]
fn muon_learns_and_resumes_with_the_same_bits() {
    let scratch = Scratch::new();
    let muon = ["--optimizer", "muon", "--schedule", "constant", "--warmup-steps", "0", "--lr", "5e-3"];
    let with = |more: &[&'static str]| [&muon[..], &["--muon-beta2", "0.9"], more].concat();
    let whole = train(&scratch, "whole", &with(&["--steps", "12"]));
    assert_eq!(train(&scratch, "again", &with(&["--steps", "12"])), whole);
    assert!(whole[11].0 < whole[0].0 - 0.1, "it learns: {whole:?}");
    train(&scratch, "cut", &with(&["--steps", "6"]));
    scratch.ok(&["--resume", "runs/cut", "--steps", "12"]);
    let cut: Vec<_> = scratch.metrics("cut").iter().map(|point| (point.loss, point.grad_norm)).collect();
    assert_eq!(cut, whole);
    let state = scratch.path().join("runs/whole/checkpoints/step-00000012/state.safetensors");
    let bytes = std::fs::read(state).expect("a checkpoint");
    let text = String::from_utf8_lossy(
        &bytes[8..8 + u64::from_le_bytes(bytes[..8].try_into().expect("8")) as usize],
    )
    .into_owned();
    let matrix = "model.layers.0.mlp.up_proj.weight";
    assert!(
        text.contains(&format!("muon.momentum/{matrix}")) && !text.contains(&format!("adamw.mean/{matrix}"))
    );
    assert!(text.contains(&format!("muon.row_square/{matrix}")));
    assert!(
        text.contains("adamw.square/model.norm.weight") && text.contains("adamw.mean/model.embed_tokens")
    );
    for moments in ["on", "off"] {
        let from = "runs/whole/checkpoints/step-00000012";
        let flags = ["--init-from", from, "--init-moments", moments, "--steps", "2"];
        let name = format!("branch-{moments}");
        train(&scratch, &name, &with(&flags));
    }
}

/// Each setting has an effect, also the separate learning rate of matrices.
#[test]
fn settings_of_muon_count() {
    let scratch = Scratch::new();
    let steps = ["--steps", "3", "--schedule", "constant", "--warmup-steps", "0"];
    let adamw = train(&scratch, "adamw", &steps);
    let muon = train(&scratch, "muon", &[&["--optimizer", "muon"][..], &steps].concat());
    let all = [
        ("lr", ["--muon-lr", "1e-2"]),
        ("warmup", ["--muon-warmup-steps", "2"]),
        ("decay", ["--muon-weight-decay", "0.5"]),
        ("rows", ["--muon-beta2", "0.5"]),
        ("momentum", ["--muon-momentum", "0.5"]),
        ("quintic", ["--muon-orthogonalization", "quintic"]),
        ("original", ["--muon-scale", "original"]),
        ("heads", ["--muon-heads", "together"]),
    ];
    let help = scratch.ok(&["--help"]);
    for flag in help.split_whitespace().filter(|word| word.starts_with("--muon-")) {
        let flag = flag.trim_end_matches(|c: char| !c.is_ascii_alphanumeric());
        assert!(all.iter().any(|(_, flags)| flags[0] == flag), "{flag} is not tested");
    }
    let mut seen = vec![adamw, muon];
    for (name, flags) in all {
        seen.push(train(&scratch, name, &[&["--optimizer", "muon"][..], &flags, &steps].concat()));
    }
    for (n, one) in seen.iter().enumerate() {
        assert_eq!(one[0].0, seen[0][0].0, "the first step has the same weights");
        assert!(seen[..n].iter().all(|other| other[2] != one[2]), "{n}: {seen:?}");
    }
    scratch.ok(&["eval", "runs/warmup", "--device", "cpu"]);
    let plan = scratch.ok(&["--dry-run", "--config", "runs/quintic/config.toml"]);
    assert!(plan.contains("Muon for hidden matrices") && plan.contains("quintic"), "{plan}");
    for (flags, part) in [
        (&["--muon-lr", "1e-2"][..], "--optimizer muon"),
        (&["--optimizer", "muon", "--muon-momentum", "1"], "muon-momentum"),
        (&["--optimizer", "lion"], "possible values"),
    ] {
        let error = scratch.fails(&small(&[&["--dry-run"], flags].concat()));
        assert!(error.contains(part), "{flags:?}: {error}");
    }
    let error = scratch.fails(&["--resume", "runs/muon", "--optimizer", "adamw"]);
    assert!(error.contains("optimizer"), "{error}");
}

/// Each rank orthogonalizes some of the matrices. Any number of ranks, also with context parallelism, trains like one
/// rank, except for the order of sums. A repeated run is bit-identical, and another number of ranks can resume a run.
/// With three ranks shard boundaries are inside matrices.
#[test]
fn ranks_share_matrices() {
    let scratch = Scratch::new();
    let muon = ["--optimizer", "muon", "--schedule", "constant", "--warmup-steps", "0", "--lr", "5e-3"];
    let with = |more: &[&'static str]| {
        [&muon[..], &["--muon-beta2", "0.9", "--tokens-per-step", "768"], more].concat()
    };
    let one = train(&scratch, "one", &with(&["--steps", "6"]));
    for (name, flags) in [
        ("two", &["--gpus", "2"][..]),
        ("three", &["--gpus", "3"]),
        ("context", &["--gpus", "2", "--context-parallel", "2"]),
    ] {
        let several = train(&scratch, name, &with(&[&["--steps", "6"], flags].concat()));
        for (step, ((loss, norm), (of_one, norm_of_one))) in several.iter().zip(&one).enumerate() {
            // Several ranks add in another order than one rank, and Muon's polynomials amplify the roundings by at most
            // 2^10.
            assert!((loss - of_one).abs() < 1e-3 * of_one, "{name}, {step}: {loss} {of_one}");
            assert!((norm - norm_of_one).abs() < 1e-2 * norm_of_one, "{name}, {step}: {norm} {norm_of_one}");
        }
    }
    assert_eq!(
        train(&scratch, "again", &with(&["--steps", "6", "--gpus", "3"])),
        train(&scratch, "three-again", &with(&["--steps", "6", "--gpus", "3"])),
    );
    // Whichever rank owns a matrix, rank 0 has its row statistics, and writes them.
    let rows = |file: &str| -> Vec<(String, Vec<f32>)> {
        let path = scratch.path().join("runs").join(file);
        let all = candle_core::safetensors::load(path, &candle_core::Device::Cpu).expect("a checkpoint");
        let rows = all.into_iter().filter(|(name, _)| name.starts_with("muon.row_square/"));
        let mut rows: Vec<_> = rows.map(|(name, x)| (name, x.to_vec1().expect("f32"))).collect();
        rows.sort_by(|(a, _), (b, _)| a.cmp(b));
        rows
    };
    let of_one = rows("one/checkpoints/step-00000006/state.safetensors");
    let of_three = rows("three/checkpoints/step-00000006/state-00001-of-00003.safetensors");
    assert_eq!(of_one.len(), 14);
    for ((name, a), (of, b)) in of_one.iter().zip(&of_three) {
        assert!(name == of && a.iter().all(|x| *x > 0.0));
        let (mut difference, mut size) = (0.0, 0.0);
        a.iter().zip(b).for_each(|(a, b)| (difference, size) = (difference + (a - b).powi(2), size + a * a));
        assert!(difference < 1e-4 * size, "{name}: {a:?} {b:?}");
    }
    train(&scratch, "cut", &with(&["--steps", "3", "--gpus", "3"]));
    scratch.ok(&["--resume", "runs/cut", "--steps", "6", "--gpus", "2"]);
    let cut: Vec<f64> = scratch.metrics("cut").iter().map(|point| point.loss).collect();
    assert!(cut.iter().zip(&one).all(|(loss, (of_one, _))| (loss - of_one).abs() < 1e-3 * of_one), "{cut:?}");
}
