//! Tests of studies of made-up runs.

use super::*;
use crate::config::{Branch, Config};
use crate::metrics::{GradientErrors, Part, Point, Squares, Sums};
use crate::report::statistics::Verdict;
use crate::runs::{RunEnd, Start, Status};

/// A finished run with these settings and one validation loss for each step.
fn run(settings: &str, losses: &[f64]) -> Run {
    let settings = format!("{settings}\nsteps = {}", losses.len());
    let config = Config::resolve(toml::from_str(&settings).expect("settings")).expect("a run");
    let point = |(n, loss): (usize, &f64)| Point {
        step: n as u64 + 1,
        tokens: 1000 * (n as u64 + 1),
        val_loss: Some(*loss),
        tokens_per_second: 100.0,
        ..Point::default()
    };
    Run {
        folder: "runs/x".into(),
        config,
        points: losses.iter().enumerate().map(point).collect(),
        probes: Vec::new(),
        gradients: Vec::new(),
        starts: Vec::new(),
        ending: Some(RunEnd { status: Status::Finished, reason: None }),
    }
}

fn study(runs: Vec<Run>) -> Study {
    Study::new(runs, &ReportOptions { milestone: Some(2.5), ..ReportOptions::default() }).expect("a study")
}

#[test]
fn seeds_are_pairs_and_arms_are_compared_within_their_panel() {
    let mut runs = Vec::new();
    for (norm, base) in [("on", 2.0), ("off", 3.0)] {
        for (seed, chance) in [(1, 0.0), (2, 0.5), (3, -0.4)] {
            // The losses differ far more between seeds than between arms.
            for (attn, cost) in [("sagebwd", 0.01), ("fpa", 0.0)] {
                let settings = format!("attn = \"{attn}\"\nqk-norm = \"{norm}\"\nseed = {seed}");
                runs.push(run(&settings, &[9.0, base + chance + cost]));
            }
        }
    }
    let study = study(runs);
    let labels: Vec<&str> = study.panels.iter().map(|panel| panel.label.as_str()).collect();
    assert_eq!(labels, ["qk-norm on", "qk-norm off"]);
    for (panel, base) in study.panels.iter().zip([2.0, 3.0]) {
        let [exact, sage] = panel.arms.as_slice() else { panic!("two arms") };
        assert_eq!((exact.label.as_str(), sage.label.as_str()), ("fpa", "sagebwd"));
        assert!((exact.loss.expect("losses").value - base - 0.1 / 3.0).abs() < 1e-9);
        let difference = sage.difference.expect("a baseline");
        assert!(
            difference.paired && (difference.mean.value - 100.0 * 0.01 / (base + 0.1 / 3.0)).abs() < 1e-9
        );
        assert!(difference.mean.half.expect("three seeds") < 1e-9);
    }
}

#[test]
fn without_common_seeds_means_are_compared_and_the_unfinished_do_not_count() {
    let mut cut = run("attn = \"fpa\"\nseed = 3", &[1.0, 0.5]);
    cut.points.pop();
    cut.ending = None;
    let runs = vec![
        run("attn = \"fpa\"\nseed = 1", &[3.0, 2.0]),
        run("attn = \"fpa\"\nseed = 2", &[3.0, 2.2]),
        cut,
        run("attn = \"sagebwd\"\nseed = 5\nsmoothing = \"none\"", &[4.0, 2.4]),
        run("attn = \"sagebwd\"\nseed = 6\nsmoothing = \"k\"", &[4.0, 2.0]),
    ];
    let study = study(runs);
    let arms = &study.panels[0].arms;
    let labels: Vec<&str> = arms.iter().map(|arm| arm.label.as_str()).collect();
    assert_eq!(labels, ["fpa", "sagebwd, smoothing none", "sagebwd, smoothing k"]);
    assert_eq!(arms[0].loss.expect("two are finished").count, 2);
    let difference = arms[1].difference.expect("means");
    assert!(!difference.paired && difference.verdict == Verdict::OneSeed);
    assert!(study.to_text().contains("one seed: no interval, no pairs"));
}

#[test]
fn repetitions_of_a_seed_are_one_and_other_data_is_no_pair() {
    let of =
        |attn: &str, seed: u64, loss: f64| run(&format!("attn = \"{attn}\"\nseed = {seed}"), &[9.0, loss]);
    let mut runs = vec![of("fpa", 1, 2.0), of("fpa", 1, 2.2), of("sagebwd", 1, 2.1), of("sagebwd", 1, 2.1)];
    let study = study(runs.clone());
    let arms = &study.panels[0].arms;
    assert_eq!((arms[0].loss.expect("a loss").count, arms[0].outcomes().as_str()), (1, "2 runs of 1 seed"));
    let difference = arms[1].difference.expect("a pair");
    assert!(difference.verdict == Verdict::OneSeed && difference.mean.value.abs() < 1e-9);
    // The last run (`sagebwd`, seed 3) has other data than the `fpa` run with seed 3.
    runs.extend([2, 3].map(|seed| of("fpa", seed, 2.0)));
    runs.extend([2, 3].map(|seed| of("sagebwd", seed, 2.0)));
    for (n, run) in runs.iter_mut().enumerate() {
        run.starts = vec![start(if n == 7 { "b" } else { "a" })];
    }
    let study = self::study(runs);
    assert_eq!(study.panels[0].arms[1].difference.expect("pairs").mean.count, 2);
    assert!(
        study.to_text().contains("warning: 1 run with a seed of the baseline had other data"),
        "{}",
        study.to_text()
    );
}

fn start(data_fingerprint: &str) -> Start {
    Start {
        command: Vec::new(),
        version: String::new(),
        commit: None,
        host: String::new(),
        hardware: String::new(),
        time: 0,
        step: 0,
        data: String::new(),
        data_fingerprint: data_fingerprint.into(),
        tokenizer: None,
        unigram_entropy: 5.0,
        parameters: 1,
        ranks: 1,
        context_parallel: 1,
        micro_batch: None,
        initial_weights: None,
        branch: None,
    }
}

#[test]
fn a_milestone_is_reached_between_validations() {
    let one = run("seed = 1", &[4.0, 3.0, 2.0]);
    assert_eq!(reached(&one, 2.5), Some(2500.0));
    assert_eq!(reached(&one, 4.0), None, "when is not known");
    assert_eq!(reached(&one, 1.0), None);
    let study = study(vec![one, run("seed = 2", &[4.0, 2.0, 2.0])]);
    let arm = &study.panels[0].arms[0];
    assert_eq!(arm.reached.expect("both").value, (2500.0 + 1750.0) / 2.0);
    assert!(study.to_text().contains("tokens to 2.5"));
    // The first validation loss is already below the milestone, so the tokens needed to reach it are not known.
    let early = [run("seed = 1", &[2.4, 2.0]), run("seed = 2", &[2.3, 2.0])];
    let text = self::study(early.to_vec()).to_text();
    assert!(text.contains("before 1K"), "{text}");
    // The mean number of tokens to the milestone leaves out a diverged run, even if the run reached the milestone.
    let mut lost = run("seed = 3", &[4.0, 2.0, 9.0]);
    lost.ending = Some(RunEnd { status: Status::Diverged, reason: None });
    assert_eq!(reached(&lost, 2.5), None);
    let arm = self::study(vec![run("seed = 1", &[4.0, 3.0, 2.0]), lost]).panels.remove(0).arms.remove(0);
    assert_eq!((arm.reached.expect("one").count, arm.outcomes().as_str()), (1, "1 finished, 1 diverged"));
}

/// If no estimate of a gradient's squared norm is above zero, the report is written without the chart of gradients.
#[test]
fn a_hidden_gradient_is_not_drawn() {
    let squares = |exact| Squares { exact, low: exact, error: 1.0 };
    let sums = |of_sum| Sums { count: 2, of_sum: squares(of_sum), of_each: squares(32.0) };
    let figures = |of_sum: f64| -> Vec<&str> {
        let whole = sums(of_sum);
        let part =
            Part { name: "all".into(), curve: vec![(1, squares(16.0))], whole, blocks: vec![whole; 8] };
        let mut one = run("seed = 1", &[4.0, 3.0]);
        one.gradients =
            vec![GradientErrors { scheme: "a".into(), step: Some(1), tokens: 100, parts: vec![part] }];
        let study = study(vec![one]);
        assert!(study.to_html().is_ok());
        study.panels[0].figures().expect("figures").iter().map(|figure| figure.name).collect()
    };
    assert!(figures(40.0).contains(&"gradients"));
    assert!(!figures(30.0).contains(&"gradients"));
}

/// The labels of the arms of a study with one panel, and whether each arm except the first has a difference.
fn compared(runs: Vec<Run>, options: &ReportOptions) -> Vec<String> {
    let study = Study::new(runs, options).expect("a study");
    assert_eq!(study.panels.len(), 1, "{}", study.to_text());
    assert!(study.panels[0].arms[1..].iter().all(|arm| arm.difference.is_some()), "{}", study.to_text());
    study.panels[0].arms.iter().map(|arm| arm.label.clone()).collect()
}

#[test]
fn settings_that_follow_from_another_setting_do_not_split_arms() {
    for (key, values) in [("optimizer", ["adamw", "muon"]), ("schedule", ["cosine", "wsd"])] {
        let runs = values.iter().flat_map(|value| {
            [1, 2].map(|seed| {
                run(&format!("{key} = \"{value}\"\nseed = {seed}"), &[9.0, 2.0 + f64::from(seed)])
            })
        });
        let labels = values.map(|value| format!("{key} {value}"));
        assert_eq!(compared(runs.collect(), &ReportOptions::default()), labels);
    }
    let runs = ["window = 16", ""].iter().flat_map(|own| {
        [1, 2].map(|seed| run(&format!("{own}\nattn = \"fpa\"\nseed = {seed}"), &[9.0, 2.0]))
    });
    assert_eq!(compared(runs.collect(), &ReportOptions::default()), ["window 16", "window none"]);
}

/// The settings of the baseline distinguish arms, in any spelling of their numbers, also next to a branched run.
#[test]
fn a_baseline_is_compared_by_value() {
    let of = |lr: &str, seed| run(&format!("lr = {lr}\nseed = {seed}"), &[9.0, 2.0]);
    let mut runs = vec![of("0.008", 1), of("0.008", 2), of("0.004", 1), of("0.004", 2)];
    let baseline = toml::from_str("lr = \"4e-3\"").expect("a table");
    let options = ReportOptions { baseline, ..ReportOptions::default() };
    assert_eq!(compared(runs.clone(), &options), ["lr 0.004", "lr 0.008"]);
    let mut branched = of("0.016", 1);
    branched.config.branch = Some(Branch { run: "a".into(), step: 1, before: BTreeMap::new() });
    runs.push(branched);
    let labels = compared(runs, &options);
    assert!(labels[0] == "lr 0.004" && labels[2].contains("branched-from"), "{labels:?}");
}

#[test]
fn data_that_changed_between_runs_is_a_warning() {
    let runs = |fingerprint: &str| {
        ["fpa", "sagebwd"].map(|attn| {
            let seed = if fingerprint == "a" { 1 } else { 2 };
            let mut run = run(&format!("data = \"a.txt\"\nattn = \"{attn}\"\nseed = {seed}"), &[9.0, 2.0]);
            run.starts = vec![start(fingerprint)];
            run
        })
    };
    let warned = |runs: Vec<Run>| study(runs).to_text().contains("different data, which changed");
    assert!(warned([runs("a"), runs("b")].concat()) && !warned([runs("a"), runs("a")].concat()));
}
