//! Sweeps: planning, running, skipping, resuming and reporting.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use crate::support::{Scratch, small, wait_until};

/// Writes the file of a sweep of small runs, with `tables` appended.
fn file(scratch: &Scratch, name: &str, tables: &str) -> PathBuf {
    let shared = "[settings]\nlayers = 1\nwidth = 32\nheads = 2\nhead-dim = 16\nffn = 48\ncontext = 32\nvocab-size = 300\n\
                  micro-batch = 4\ntokens-per-step = 256\ncorpus-mb = 1\neval-tokens = \"1k\"\n";
    scratch.file(name, format!("{shared}{tables}"))
}

/// The names of the folders in a sweep's folder that are runs.
fn runs(sweep: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(sweep).expect("a sweep").flatten();
    let is_run = |path: &Path| path.join("metrics.jsonl").exists();
    let mut names: Vec<String> = entries
        .filter(|entry| is_run(&entry.path()))
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .collect();
    names.sort();
    names
}

fn start(scratch: &Scratch, args: &[&str]) -> Child {
    Command::new(env!("CARGO_BIN_EXE_sage-train"))
        .args(args)
        .current_dir(scratch.path())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .expect("the command starts")
}

#[cfg(unix)]
fn children(child: &Child) -> Vec<String> {
    let output = Command::new("pgrep").args(["-P", &child.id().to_string()]).output().expect("pgrep");
    String::from_utf8_lossy(&output.stdout).split_whitespace().map(Into::into).collect()
}

/// Whether a process has ended. Without a waiting parent it stays listed as a zombie.
#[cfg(unix)]
fn is_gone(pid: &str) -> bool {
    let output = Command::new("ps").args(["-o", "stat=", "-p", pid]).output().expect("ps");
    let state = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    state.is_empty() || state.starts_with('Z')
}

#[test]
fn finished_runs_are_passed_over_and_seeds_added_later() {
    let scratch = Scratch::new();
    let tables = "steps = 6\neval-every = 3\n[grid]\nseed = [1, 2]\n[[points]]\nattn = \"fpa\"\n[[points]]\nattn = \"sagebwd\"\n";
    file(&scratch, "s.toml", tables);
    let plan = scratch.ok(&["sweep", "s.toml", "--dry-run"]);
    assert!(plan.contains("4 runs, 6,144 tokens") && plan.contains("sagebwd_seed-2"), "{plan}");
    let table = scratch.ok(&["sweep", "s.toml", "--jobs", "2"]);
    let sweep = scratch.path().join("runs/s");
    assert_eq!(runs(&sweep), ["fpa_seed-1", "fpa_seed-2", "sagebwd_seed-1", "sagebwd_seed-2"]);
    assert!(table.contains("sagebwd") && table.contains("baseline") && table.contains("±"), "{table}");
    let written = |run: &str| {
        let path = sweep.join(run).join("metrics.jsonl");
        std::fs::metadata(path).and_then(|about| about.modified()).expect("metrics")
    };
    let before = written("fpa_seed-1");
    // A run of the sweep has the same weights as a single run with the same settings.
    let alone =
        small(&["--attn", "fpa", "--steps", "6", "--eval-every", "3", "--eval-tokens", "1k", "--seed", "1"]);
    scratch.ok(&alone);
    let weights = |run: &str| std::fs::read(scratch.path().join("runs").join(run).join("model.safetensors"));
    assert!(weights("s/fpa_seed-1").expect("weights") == weights("tiny-fpa-001").expect("weights"));
    // With more seeds on the command line the existing runs stay and are part of the report.
    scratch.ok(&["sweep", "s.toml", "--seed", "1,2,3"]);
    assert_eq!(runs(&sweep).len(), 6);
    assert_eq!(written("fpa_seed-1"), before);
    let page = std::fs::read_to_string(sweep.join("report.html")).expect("a report");
    assert!(page.contains("6 runs") && page.matches("<svg").count() == 2, "{}", page.len());
    for outside in ["http://", "https://", "<script", "<link"] {
        let inside = page.replace("http://www.w3.org/2000/svg", "");
        assert!(!inside.contains(outside), "{outside}");
    }
}

#[test]
fn what_diverges_or_fails_is_a_result_and_ends_no_other() {
    let scratch = Scratch::new();
    let tables = "steps = 8\n[[points]]\nlr = 1e-3\n[[points]]\nlr = 1e30\nwarmup-steps = 0\nclip = 0.0\n\
                  [[points]]\nlr = 2e-3\ncontext = 1048576\ntokens-per-step = 4194304\n";
    file(&scratch, "s.toml", tables);
    let text = scratch.run(&["sweep", "s.toml"]);
    let (out, err) = (String::from_utf8_lossy(&text.stdout), String::from_utf8_lossy(&text.stderr));
    assert!(!text.status.success() && err.contains("1 of 3 runs failed") && err.contains("--retry"), "{err}");
    assert!(out.contains("1 diverged"), "{out}{err}");
    let names = runs(&scratch.path().join("runs/s"));
    assert_eq!(names.len(), 2, "{names:?}");
    // A failed or crashed run is started again only with `--retry`.
    let again = String::from_utf8_lossy(&scratch.run(&["sweep", "s.toml"]).stderr).into_owned();
    assert!(again.contains("3 of 3 runs are skipped") && !again.contains("crashed"), "{again}");
    let retried = String::from_utf8_lossy(&scratch.run(&["sweep", "s.toml", "--retry"]).stderr).into_owned();
    assert!(retried.contains("[1/1]") && retried.contains("crashed"), "{retried}");
    let plan = scratch.ok(&["sweep", "s.toml", "--dry-run"]);
    assert!(plan.contains("diverged") && plan.contains("finished") && plan.contains("crashed"), "{plan}");
}

#[cfg(unix)]
#[test]
fn a_sweep_that_is_stopped_or_killed_resumes_to_the_same_bits() {
    let scratch = Scratch::new();
    let tables = "steps = 400\neval-every = 0\ncheckpoint-every = 20\nseed = 3\n[grid]\nattn = [\"fpa\", \"sagebwd\"]\n";
    file(&scratch, "s.toml", tables);
    let args = ["sweep", "s.toml", "--jobs", "2"];
    let sweep = scratch.path().join("runs/s");
    let checkpoints =
        |run: &str| std::fs::read_dir(sweep.join(run).join("checkpoints")).map_or(0, Iterator::count);
    // A sweep that is asked to stop saves its runs.
    let mut child = start(&scratch, &args);
    wait_until(|| checkpoints("fpa") > 0 && checkpoints("sagebwd") > 0);
    Command::new("kill").args(["-TERM", &child.id().to_string()]).status().expect("kill");
    assert_eq!(child.wait().expect("an end").code(), Some(143));
    let interrupted = |run: &str| {
        let text = std::fs::read_to_string(sweep.join(run).join("ending.json")).unwrap_or_default();
        text.contains("interrupted")
    };
    assert!(interrupted("fpa") && interrupted("sagebwd"));
    // A sweep that is killed together with its runs keeps their checkpoints.
    let before = checkpoints("fpa");
    let mut child = start(&scratch, &args);
    wait_until(|| !interrupted("fpa") && !interrupted("sagebwd") && (checkpoints("fpa") > 0 || before > 0));
    let pids = children(&child);
    child.kill().expect("it runs");
    child.wait().expect("an end");
    Command::new("kill").arg("-KILL").args(&pids).stderr(Stdio::null()).status().ok();
    wait_until(|| pids.iter().all(|pid| is_gone(pid)));
    // Runs whose sweep is killed stop by themselves.
    let mut child = start(&scratch, &args);
    wait_until(|| children(&child).len() == 2);
    let pids = children(&child);
    child.kill().expect("it runs");
    child.wait().expect("an end");
    wait_until(|| pids.iter().all(|pid| is_gone(pid)));
    scratch.ok(&args);
    let flags =
        ["--attn", "sagebwd", "--steps", "400", "--eval-every", "0", "--seed", "3", "--eval-tokens", "1k"];
    scratch.ok(&small(&[&flags[..], &["--name", "alone"]].concat()));
    let weights = |run: &str| std::fs::read(scratch.path().join("runs").join(run).join("model.safetensors"));
    assert!(weights("s/sagebwd").expect("weights") == weights("alone").expect("weights"));
    assert_eq!(runs(&sweep).len(), 2);
}

/// Whatever is changed by hand between two starts of a sweep, no measurement is lost, and no run is mistaken for
/// another.
#[cfg(unix)]
#[test]
fn a_sweep_that_is_changed_by_hand_loses_nothing() {
    let scratch = Scratch::new();
    let tables = |batch: u32| {
        format!(
            "steps = 40\neval-every = 0\ncheckpoint-every = 20\n[grid]\nseed = [1, 2]\nlr = [{batch}e-3]\n"
        )
    };
    file(&scratch, "s.toml", &tables(1));
    let sweep = scratch.path().join("runs/s");
    // A folder of the user has the name of a run.
    scratch.ok(&["sweep", "s.toml", "--only", "0"]);
    scratch.file("runs/s/seed-2/notes.txt", "mine");
    scratch.ok(&["sweep", "s.toml"]);
    assert_eq!(runs(&sweep), ["seed-1", "seed-2-2"]);
    assert!(sweep.join("seed-2/notes.txt").exists());
    // A run with another learning rate is a separate run with a separate folder.
    file(&scratch, "s.toml", &tables(2));
    scratch.ok(&["sweep", "s.toml"]);
    assert_eq!(runs(&sweep), ["seed-1", "seed-1-2", "seed-2-2", "seed-2-3"]);
    // A run with a damaged checkpoint is reported as crashed. The run's folder stays until the run starts again
    // from step 0, and is then moved to `plan/seed-1.attempt-1`.
    let run = sweep.join("seed-1");
    std::fs::write(run.join("ending.json"), "{\"status\": \"interrupted\"}").expect("an ending");
    std::fs::write(run.join("checkpoints/step-00000040/state.safetensors"), "?").expect("a state");
    file(&scratch, "s.toml", &tables(1));
    let failed = scratch.run(&["sweep", "s.toml"]);
    let told = String::from_utf8_lossy(&failed.stderr);
    assert!(!failed.status.success() && told.contains("1 of 2 runs failed"), "{told}");
    let crash = std::fs::read_to_string(sweep.join("plan/seed-1.crash.json")).expect("a reason");
    assert!(crash.contains("state.safetensors"), "{crash}");
    std::fs::remove_dir_all(run.join("checkpoints")).expect("checkpoints");
    scratch.ok(&["sweep", "s.toml", "--retry"]);
    assert_eq!(runs(&sweep), ["seed-1", "seed-1-2", "seed-2-2", "seed-2-3"]);
    assert!(sweep.join("plan/seed-1.attempt-1/metrics.jsonl").exists());
}

/// A sweep counts neither a branched run nor a copy as a planned run. A run that it resumes uses the edited file's
/// settings for validation.
#[cfg(unix)]
#[test]
fn branches_and_copies_do_not_replace_planned_runs() {
    let scratch = Scratch::new();
    let tables = |lr: &str, every: u32| {
        format!("steps = 40\neval-every = {every}\ncheckpoint-every = 20\nlr = {lr}\n")
    };
    file(&scratch, "s.toml", &tables("1e-3", 0));
    scratch.ok(&["sweep", "s.toml"]);
    let sweep = scratch.path().join("runs/s");
    assert_eq!(runs(&sweep), ["sagebwd"]);
    let from = "runs/s/sagebwd/checkpoints/step-00000020";
    scratch.ok(&["--resume", from, "--new-name", "branch", "--lr", "2e-3"]);
    file(&scratch, "s.toml", &tables("2e-3", 0));
    scratch.ok(&["sweep", "s.toml"]);
    assert_eq!(runs(&sweep), ["branch", "sagebwd", "sagebwd-2"]);
    // The first run becomes an interrupted run, with a copy whose name comes first in the alphabet.
    let run = sweep.join("sagebwd");
    std::fs::write(run.join("ending.json"), "{\"status\": \"interrupted\"}").expect("an ending");
    std::fs::remove_dir_all(run.join("checkpoints/step-00000040")).expect("a checkpoint");
    let copy = Command::new("cp").args(["-r", "sagebwd", "copy"]).current_dir(&sweep).status();
    assert!(copy.expect("cp").success());
    file(&scratch, "s.toml", &tables("1e-3", 10));
    scratch.ok(&["sweep", "s.toml"]);
    let ending =
        |name: &str| std::fs::read_to_string(sweep.join(name).join("ending.json")).expect("an ending");
    assert!(ending("sagebwd").contains("finished") && ending("copy").contains("interrupted"));
    let validated: Vec<u64> =
        scratch.metrics("s/sagebwd").iter().filter(|p| p.val_loss.is_some()).map(|p| p.step).collect();
    assert_eq!(validated, [30, 40]);
}

/// A run with its own copy of a tokenizer has the same identity after it was interrupted.
#[cfg(unix)]
#[test]
fn a_run_with_a_tokenizer_resumes_with_the_same_identity() {
    let scratch = Scratch::new();
    scratch.ok(&small(&["--steps", "1", "--name", "first"]));
    let tables =
        "steps = 400\neval-every = 0\ncheckpoint-every = 20\ntokenizer = \"runs/first/tokenizer.json\"\n";
    file(&scratch, "s.toml", tables);
    let sweep = scratch.path().join("runs/s");
    let mut child = start(&scratch, &["sweep", "s.toml"]);
    wait_until(|| std::fs::read_dir(sweep.join("sagebwd/checkpoints")).is_ok_and(|all| all.count() > 0));
    Command::new("kill").args(["-TERM", &child.id().to_string()]).status().expect("kill");
    child.wait().expect("an end");
    scratch.ok(&["sweep", "s.toml"]);
    scratch.ok(&["sweep", "s.toml"]);
    assert_eq!(runs(&sweep), ["sagebwd"]);
    assert_eq!(scratch.metrics("s/sagebwd").len(), 400);
}

#[test]
fn lists_on_the_command_line_are_a_sweep() {
    let scratch = Scratch::new();
    let flags = ["--attn", "fpa,sagebwd", "--order-seed=1,2", "--steps", "4", "--name", "both"];
    let table = scratch.ok(&small(&flags));
    let names = runs(&scratch.path().join("runs/both"));
    assert_eq!(
        names,
        ["fpa_order-seed-1", "fpa_order-seed-2", "sagebwd_order-seed-1", "sagebwd_order-seed-2"]
    );
    assert!(table.contains("fpa") && table.contains("±"), "{table}");
    // The two fpa runs have the same weights and corpus, but different orders of the data.
    let first = |run: &str| scratch.metrics(&format!("both/{run}"))[0].loss;
    assert_ne!(first("fpa_order-seed-1"), first("fpa_order-seed-2"));
    // A second sweep with the same name compares only its own runs, and names the runs that it leaves out.
    let other = small(&["--attn", "fpa", "--order-seed", "1,3", "--steps", "4", "--name", "both"]);
    let left_out = "left out 3 runs in this folder that the sweep does not list: fpa_order-seed-2, sagebwd_order-seed-1, sagebwd_order-seed-2";
    let other = scratch.ok(&other);
    assert!(other.contains(left_out) && other.contains("`report runs/both` compares all"), "{other}");
    let refused = scratch.fails(&["--seed", "1,2", "--resume", "runs/both/fpa_order-seed-1"]);
    assert!(refused.contains("several runs") && refused.contains("hint:"), "{refused}");
    let wrong = scratch.fails(&["--attn", "fpa,sage"]);
    assert!(wrong.contains("invalid value 'sage'"), "{wrong}");
    // A folder that contains sweeps but no runs is an error, and the message names the folders of the sweeps.
    let several = scratch.fails(&["report", "runs"]);
    assert!(several.contains("no runs to report") && several.contains("runs/both"), "{several}");
    // If the folder also contains a run, this run is reported, and a warning names the sweep whose runs are omitted.
    scratch.ok(&small(&["--steps", "2", "--name", "alone"]));
    let some = scratch.ok(&["report", "runs"]);
    let left_out = "warning: the runs in runs/both are left out; `report runs/both` compares them";
    assert!(some.contains(left_out), "{some}");
    // A new sweep refuses to use a folder that contains something else.
    scratch.file("runs/mine/notes.txt", "mine");
    let taken = scratch.fails(&small(&["--seed", "1,2", "--steps", "2", "--name", "mine"]));
    assert!(taken.contains("does not contain a sweep"), "{taken}");
    assert!(scratch.fails(&small(&["--seed", "1,2", "--name", "cache"])).contains("not a name"));
}

#[test]
fn one_run_of_a_sweep_and_a_job_array() {
    let scratch = Scratch::new();
    file(&scratch, "s.toml", "steps = 2\n[grid]\nseed = [1, 2, 3]\n");
    let told = scratch.ok(&["sweep", "s.toml", "--slurm", "array.sh"]);
    assert!(told.contains("3 tasks"), "{told}");
    let script = std::fs::read_to_string(scratch.path().join("array.sh")).expect("a script");
    assert!(script.contains("--array=0-2") && script.contains("sweep s.toml --only"), "{script}");
    // A task of the job array runs one run. If the sweep is started afterwards, it runs only the other runs.
    let task = script.replace("\"$SLURM_ARRAY_TASK_ID\"", "1");
    scratch.file("task.sh", task);
    let status =
        Command::new("bash").arg("task.sh").current_dir(scratch.path()).stderr(Stdio::null()).status();
    assert!(status.expect("bash").success());
    assert_eq!(runs(&scratch.path().join("runs/s")), ["seed-2"]);
    scratch.ok(&["sweep", "s.toml"]);
    assert_eq!(runs(&scratch.path().join("runs/s")).len(), 3);
    assert!(scratch.fails(&["sweep", "s.toml", "--only", "3"]).contains("0 to 2"));
    assert!(scratch.fails(&["sweep", "nothing"]).contains("paper-mini"));
}

#[test]
fn runs_of_anywhere_are_reported() {
    let scratch = Scratch::new();
    for (attn, seed) in [("fpa", "1"), ("fpa", "2"), ("sagebwd", "1"), ("sagebwd", "2"), ("none", "1")] {
        let name = format!("{attn}{seed}");
        let flags = ["--attn", attn, "--seed", seed, "--steps", "12", "--eval-every", "4", "--name", &name];
        scratch.ok(&small(&flags));
    }
    // An unfinished run of an earlier version: its last metrics line is cut off, and there is no
    // `starts.json`.
    let cut = scratch.path().join("runs/sagebwd2");
    let metrics = std::fs::read_to_string(cut.join("metrics.jsonl")).expect("metrics");
    std::fs::write(cut.join("metrics.jsonl"), &metrics[..metrics.len() * 3 / 4]).expect("a file");
    std::fs::remove_file(cut.join("ending.json")).expect("an ending");
    std::fs::remove_file(cut.join("starts.json")).expect("starts");
    let folders = ["runs/fpa1", "runs/fpa2", "runs/sagebwd1", "runs/sagebwd2", "runs/none1"];
    let files = ["--html", "r.html", "--csv", "r.csv", "--markdown", "r.md", "--about", "A & B"];
    let table = scratch.ok(&[&["report"], &folders[..], &files].concat());
    assert!(table.contains("1 finished, 1 unfinished") && table.contains("one seed"), "{table}");
    let csv = std::fs::read_to_string(scratch.path().join("r.csv")).expect("CSV");
    assert_eq!(csv.lines().count(), 6);
    assert!(csv.contains("sagebwd2,unfinished,"), "{csv}");
    let page = std::fs::read_to_string(scratch.path().join("r.html")).expect("a page");
    assert!(page.contains("<title>A &amp; B</title>") && page.contains("--seed 1"), "{}", page.len());
    assert!(
        std::fs::read_to_string(scratch.path().join("r.md")).expect("Markdown").contains("| arm | seeds |")
    );
    // A report can have another baseline. It fails if no arm has the baseline's setting, if the folder contains no
    // runs, or if the runs do not differ in the key of `--by`.
    let table = scratch.ok(&["report", "runs", "--baseline", "attn=none"]);
    let none = table.lines().find(|line| line.starts_with("none")).expect("an arm");
    assert!(none.contains("baseline"), "{table}");
    assert!(scratch.fails(&["report", "runs", "--baseline", "attn=sla2"]).contains("no arm has"));
    assert!(scratch.fails(&["report", "."]).contains("no runs to report"));
    assert!(scratch.fails(&["report", "runs", "--by", "lr"]).contains("do not differ"));
}

/// A built-in sweep can be planned on every machine.
#[test]
fn sweeps_that_are_built_in_are_plans() {
    let scratch = Scratch::new();
    for (name, runs) in [
        ("tiny", 36),
        ("paper-mini", 48),
        ("products-mini", 30),
        ("attn-qat-mini", 42),
        ("layers-mini", 27),
        ("linear-mini", 36),
        ("window-mini", 40),
        ("optimizer-mini", 36),
        ("muon-mini", 60),
    ] {
        let plan = scratch.ok(&["sweep", name, "--dry-run", "--no-measure", "--device", "cpu"]);
        assert!(plan.contains(&format!("\n{runs} runs, ")), "{plan}");
        assert!(scratch.ok(&["sweep", name, "--print"]).contains("[[points]]"));
    }
    // The data of this sweep does not exist here.
    let plan = scratch.fails(&["sweep", "paper", "--dry-run", "--no-measure", "--device", "cpu"]);
    assert!(plan.contains("openwebtext"), "{plan}");
    scratch.file("openwebtext/a.txt", "Some text. ".repeat(100_000));
    let plan = scratch.ok(&["sweep", "paper", "--dry-run", "--no-measure", "--device", "cpu"]);
    for line in ["16 runs, 1,258,291,200,000 tokens", "37,500", "300,000"] {
        assert!(plan.contains(line), "{plan}");
    }
}

/// Speeds are measured even with learning rates that diverge.
#[test]
fn a_rate_that_diverges_can_be_planned() {
    let scratch = Scratch::new();
    file(&scratch, "s.toml", "steps = 100\nclip = 0.0\nlr = 10.0\n");
    let plan = scratch.ok(&["sweep", "s.toml", "--dry-run"]);
    assert!(plan.contains("1 run") && !plan.contains("cannot be trained"), "{plan}");
}

#[test]
fn a_dry_run_of_lists_is_a_table() {
    let scratch = Scratch::new();
    let plan = scratch.ok(&small(&["--seed", "1,2,3", "--attn", "fpa,sagebwd", "--steps", "4", "--dry-run"]));
    let rows: Vec<&str> = plan.lines().filter(|line| line.contains("seed-") && line.ends_with('-')).collect();
    assert_eq!(rows.len(), 6, "{plan}");
    assert!(
        plan.contains("seed") && plan.contains("1, 2, 3") && plan.contains("6 runs, 6,144 tokens"),
        "{plan}"
    );
    assert_eq!(plan.matches("parameters").count(), 1, "one whole plan\n{plan}");
    assert!(!scratch.path().join("runs").exists());
}
