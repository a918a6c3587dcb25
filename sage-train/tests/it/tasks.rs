//! Tasks of lm-evaluation-harness from JSON lines.

use crate::support::{Scratch, small};

const TASKS: [&str; 8] = [
    "--task",
    "piqa=piqa.jsonl",
    "--task",
    "arc=arc.jsonl",
    "--task",
    "hellaswag=swag.jsonl",
    "--task",
    "lambada=lambada.jsonl",
];

/// Writes a file with three questions for each task.
fn files(scratch: &Scratch) {
    let piqa = "{\"goal\": \"Boil an egg\", \"sol1\": \"in water\", \"sol2\": \"in sand\", \"label\": 0}\n\
                {\"goal\": \"Cut bread\", \"sol1\": \"with a spoon\", \"sol2\": \"with a knife\", \"label\": 1}\n\
                {\"goal\": \"Sleep\", \"sol1\": \"in a bed\", \"sol2\": \"in a pan\", \"label\": 0}\n";
    let arc = "{\"question\": \"Which is cold?\", \"choices\": {\"text\": [\"ice\", \"fire\"], \"label\": [\"A\", \"B\"]}, \
               \"answerKey\": \"A\"}\n";
    let swag = "{\"activity_label\": \"Roofs\", \"ctx_a\": \"A man sits.\", \"ctx_b\": \"he [title] There\", \
                \"endings\": [\"runs.\", \"is [step] up.\", \"sees the dog\", \"eats\"], \"label\": \"1\"}\n";
    scratch.file("piqa.jsonl", piqa);
    scratch.file("arc.jsonl", arc.repeat(3));
    scratch.file("swag.jsonl", swag.repeat(3));
    scratch.file("lambada.jsonl", "{\"text\": \"the dog ran after the cat\"}\n".repeat(3));
}

#[test]
fn tasks_are_scored_for_any_tokenizer() {
    let scratch = Scratch::new();
    scratch.ok(&small(&["--steps", "2", "--name", "r"]));
    files(&scratch);
    let text = scratch.ok(&[&["eval", "runs/r"], &TASKS[..]].concat());
    let rows: Vec<&str> = text.lines().collect();
    assert_eq!(rows.len(), 4, "{text}");
    for (row, (name, words)) in rows.iter().zip([
        ("piqa", "chance 50.0 %"),
        ("arc", "(acc_norm)"),
        ("hellaswag", "(acc)"),
        ("lambada", "perplexity"),
    ]) {
        assert!(row.starts_with(name) && row.contains("of 3 =") && row.contains(words), "{row}");
    }
    let error = scratch.fails(&["eval", "runs/r", "--task", "piqa=lambada.jsonl"]);
    assert!(
        error.contains("line 1: a field is missing") && error.contains("goal, sol1, sol2, label"),
        "{error}"
    );
    assert!(scratch.fails(&["eval", "runs/r", "--task", "mmlu=x"]).contains("hellaswag, arc, piqa, lambada"));
}

/// The harness gives an export the same scores as `eval`.
#[test]
#[ignore = "needs python3 with lm_eval[hf]"]
fn the_harness_scores_the_same() {
    let scratch = Scratch::new();
    scratch.ok(&small(&["--steps", "20", "--name", "r"]));
    scratch.ok(&["export", "runs/r", "--to", "hf"]);
    files(&scratch);
    let text = scratch.ok(&[&["eval", "hf", "--device", "cpu"], &TASKS[..]].concat());
    let script = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../scripts/check_lm_eval.py");
    let tasks = TASKS.iter().filter(|word| word.contains('='));
    let output = std::process::Command::new("python3")
        .arg(script)
        .arg("hf")
        .args(tasks)
        .current_dir(scratch.path())
        .output();
    let output = output.expect("python3");
    let theirs = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{theirs}{}", String::from_utf8_lossy(&output.stderr));
    for row in text.lines() {
        let mut words = row.split_whitespace();
        let name = words.next().expect("a task");
        let theirs = theirs.lines().find(|line| line.starts_with(name)).expect("a row of the harness");
        // `eval` prints `.. = 66.67 % +- 27.22 (acc)`, and the harness `acc 0.6667`.
        let parts: Vec<&str> = row.split(" = ").collect();
        for (part, score) in parts[1..].iter().zip(["acc ", "acc_norm "]) {
            let ours: f64 = part.split(' ').next().expect("a share").parse().expect("a number");
            let at = theirs.find(score).expect("the score") + score.len();
            let harness: f64 = theirs[at..].split(' ').next().expect("a share").parse().expect("a number");
            assert!((ours / 100.0 - harness).abs() < 1e-3, "{row} | {theirs}");
        }
    }
}
