//! The verb `sweep`, and the sweeps that `train` runs if a flag has a list of values.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::Duration;

use candle_sage::{Error, Result};
use clap::Args;
use toml::Table;

use super::from_files::fill_from_files;
use super::{lists, print};
use crate::checks::in_range;
use crate::config::{Config, check_name};
use crate::quantity::{counted, grouped};
use crate::report::{REPORT, ReportOptions, Study};
use crate::runs::{Run, crashed};
use crate::settings::Settings;
use crate::sweep::{Limits, MpsMode, SHIPPED, Spec, Sweep, estimate, script};
use crate::{notify, partial, train, writing};

/// The flags of a sweep. Every flag of a run is accepted, and overrides the file for all runs of the sweep.
#[derive(Debug, Args)]
pub(super) struct SweepArguments {
    /// A TOML file, or a built-in sweep. On two CPU cores: tiny (an hour), sla2-tiny (20 minutes). On one H100 in
    /// minutes: paper-mini, products-mini, attn-qat-mini, layers-mini, linear-mini, window-mini, optimizer-mini,
    /// muon-mini, and, with --data and --init-from, continuation-mini and sla2-prose. On a cluster: paper
    #[arg(value_name = "FILE")]
    file: String,
    /// Print the runs, their state and the estimated remaining time, and exit. For the estimate, each
    /// combination of model and batch size is trained for a few steps
    #[arg(long, help_heading = "Sweep")]
    dry_run: bool,
    /// With --dry-run: skip the estimate
    #[arg(long, help_heading = "Sweep", requires = "dry_run")]
    no_measure: bool,
    /// With --dry-run: price of a device per hour, to estimate the cost
    #[arg(long, value_name = "PRICE", help_heading = "Sweep", requires = "dry_run")]
    hour_price: Option<f64>,
    /// Print the sweep's file, as a template for other sweeps, and exit
    #[arg(long, help_heading = "Sweep", conflicts_with_all = ["dry_run", "slurm"])]
    print: bool,
    /// Number of concurrent runs on each device
    #[arg(long, value_name = "N", help_heading = "Sweep", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..))]
    jobs: u16,
    /// Whether concurrent runs share a GPU through MPS, NVIDIA's Multi-Process Service
    #[arg(long, value_enum, value_name = "HOW", help_heading = "Sweep", default_value_t)]
    mps: MpsMode,
    /// Save the running runs after this many minutes and exit; the same command resumes them
    #[arg(long, value_name = "MINUTES", help_heading = "Sweep")]
    minutes: Option<f64>,
    /// Run only the Nth run that --dry-run lists, counted from 0
    #[arg(long, value_name = "N", help_heading = "Sweep")]
    only: Option<usize>,
    /// Start failed and crashed runs again, but not diverged runs
    #[arg(long, help_heading = "Sweep")]
    retry: bool,
    /// Write a Slurm batch script with a task for each run, and exit
    #[arg(long, value_name = "FILE", help_heading = "Sweep", conflicts_with_all = ["dry_run", "only"])]
    slurm: Option<PathBuf>,
    #[command(flatten)]
    pub(super) settings: Settings,
}

impl SweepArguments {
    pub(super) fn run(self, lists: Table) -> Result<()> {
        let (spec, stem) = self.spec()?;
        if self.print {
            let shipped = SHIPPED.iter().find(|(name, _)| *name == self.file);
            let text = shipped
                .map_or_else(|| std::fs::read_to_string(&self.file).unwrap_or_default(), |s| s.1.into());
            return print(&text);
        }
        let mut settings = self.settings.clone();
        let name = settings.run.name.take().unwrap_or(stem);
        let sweep = plan(&spec, settings, &lists, |_| Ok(name.clone()))?;
        if let Some(only) = self.only.filter(|only| *only >= sweep.runs.len()) {
            return Err(Error::new("the sweep has no such run")
                .got(format!("--only {only}"))
                .allowed(format!("0 to {}", sweep.runs.len() - 1))
                .hint("--dry-run lists the runs"));
        }
        if let Some(path) = &self.slurm {
            return self.write_script(&sweep, path);
        }
        if self.dry_run {
            let measured = if self.no_measure { None } else { Some(estimate(&sweep, self.retry)?) };
            return print(&table(
                &spec,
                &sweep,
                measured.as_deref(),
                usize::from(self.jobs),
                self.hour_price,
            ));
        }
        let minutes = self.minutes.map(|minutes| in_range("minutes", minutes, 0.0, 1e6)).transpose()?;
        let limits = Limits {
            jobs: usize::from(self.jobs),
            time: minutes.map(|minutes| Duration::from_secs_f64(60.0 * minutes)),
            only: self.only,
            retry: self.retry,
            sharing: self.mps,
        };
        let commands = ResumeCommands { resume: "the same command".into(), retry_hint: "--retry".into() };
        execute(&spec, &sweep, &limits, &commands)
    }

    fn spec(&self) -> Result<(Spec, String)> {
        let path = Path::new(&self.file);
        if let Some((name, text)) = SHIPPED.iter().find(|(name, _)| *name == self.file) {
            return Ok((Spec::parse(text, name)?, (*name).into()));
        }
        if !path.exists() {
            let names: Vec<&str> = SHIPPED.iter().map(|(name, _)| *name).collect();
            return Err(Error::new("the file of the sweep does not exist")
                .got(path.display())
                .allowed(format!("a TOML file, or a built-in sweep: {}", names.join(", ")))
                .hint("sage-train sweep tiny --print shows an example of a file"));
        }
        let stem = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        Ok((Spec::read(path)?, stem))
    }

    fn write_script(&self, sweep: &Sweep, path: &Path) -> Result<()> {
        partial::check_free(path, "file", "--slurm")?;
        let words = std::env::args_os().skip(1);
        let mut words: Vec<String> = words.map(|word| word.to_string_lossy().into_owned()).collect();
        if let Some(at) = words.iter().position(|word| word == "--slurm" || word.starts_with("--slurm=")) {
            words.drain(at..at + if words[at] == "--slurm" { 2 } else { 1 });
        }
        let gpus = sweep.runs.iter().any(|run| run.config.device == crate::device::DeviceKind::Cuda);
        let name = sweep.folder.file_name().unwrap_or_default().to_string_lossy();
        let text = script(&name, sweep.runs.len(), &sweep.folder, gpus, &words);
        // Slurm opens its output files in this folder before the first task starts.
        std::fs::create_dir_all(sweep.plan_folder()).map_err(writing(&sweep.folder))?;
        std::fs::write(path, text).map_err(writing(path))?;
        print(&format!("{}: {} tasks; sbatch {}\n", path.display(), sweep.runs.len(), path.display()))
    }
}

/// Plans a sweep. `name` derives the name of the sweep's folder from the configuration of the first run.
pub(super) fn plan(
    spec: &Spec,
    over: Settings,
    lists: &Table,
    name: impl FnOnce(&Config) -> Result<String>,
) -> Result<Sweep> {
    lists::check(lists)?;
    let typed = without(over, lists);
    let runs = spec.runs(&typed, lists)?;
    let configs: Vec<Config> =
        runs.into_iter().map(|run| Config::resolve(fill_from_files(run)?)).collect::<Result<_>>()?;
    let first = configs.first().expect("lists are not empty");
    if configs.iter().any(|config| config.name.is_some()) {
        return Err(Error::new("runs of a sweep cannot be named")
            .got("`name` in the file of settings")
            .allowed("names derived from the settings that differ")
            .hint("--name on the command line names the sweep"));
    }
    if let Some(other) = configs.iter().find(|config| config.out != first.out) {
        return Err(Error::new("all runs of a sweep need the same folder")
            .got(format!("out = {} and {}", first.out.display(), other.out.display()))
            .allowed("one --out for all of them")
            .hint("put `out` into [settings]"));
    }
    let name = name(first)?;
    check_name(&name)?;
    let folder = first.out.join(name);
    configs.iter().try_for_each(|config| train::check(config, &train::Origin::New))?;
    let count = configs.len();
    let sweep = Sweep::plan(folder, configs)?;
    sweep.check_weights()?;
    if sweep.runs.len() < count {
        let same = count - sweep.runs.len();
        notify(&format!(
            "{same} of {count} combinations are skipped: each is the same run as another one, because the setting \
             that differs has no effect"
        ));
    }
    if let Some((key, value)) = spec.baseline.iter().find(|(key, value)| sweep.lacks_value(key, value)) {
        notify(&format!(
            "warning: no run has the setting of the baseline, {key} = {value}: another arm will be the baseline"
        ));
    }
    Ok(sweep)
}

fn without(settings: Settings, lists: &Table) -> Settings {
    let Ok(mut table) = Table::try_from(&settings) else { return settings };
    table.retain(|key, _| !lists.contains_key(key));
    table.try_into().unwrap_or(settings)
}

/// The commands that continue a sweep, as printed in messages.
pub(super) struct ResumeCommands {
    pub(super) resume: String,
    /// The command that continues the sweep and starts its failed runs again.
    pub(super) retry_hint: String,
}

/// Executes the unfinished runs, and reports the results. Returns an error if runs failed or a signal interrupted runs.
pub(super) fn execute(spec: &Spec, sweep: &Sweep, limits: &Limits, commands: &ResumeCommands) -> Result<()> {
    notify(&format!("{}: {}", sweep.folder.display(), counted(sweep.runs.len() as u64, "run")));
    std::fs::create_dir_all(&sweep.folder).map_err(writing(&sweep.folder))?;
    let options = options(spec);
    options.save(&sweep.folder)?;
    let tally = crate::sweep::run(sweep, limits)?;
    if limits.only.is_none()
        && let Err(error) = report(options, sweep)
    {
        // A failed report is only a warning, because `sage-train report` can write the report later.
        notify(&format!("warning: {error}"));
    }
    tally.check(&commands.resume)?;
    if tally.open > 0 {
        notify(&format!("{} left: continue with {}", counted(tally.open as u64, "run"), commands.resume));
    }
    if tally.elsewhere > 0 {
        notify(&format!("another process is working on {}", counted(tally.elsewhere as u64, "run")));
    }
    if tally.failed > 0 {
        return Err(Error::failed(format!("{} of {} runs failed", tally.failed, sweep.runs.len()))
            .got(format!(
                "the reasons are in ending.json of each run in {0}, or in {0}/plan if its process died",
                sweep.folder.display()
            ))
            .allowed("runs that finish, or diverge")
            .hint(format!(
                "{} runs them again, from their checkpoints if they have one",
                commands.retry_hint
            )));
    }
    Ok(())
}

/// The report options of a sweep. The settings in its `[[points]]` distinguish arms.
fn options(spec: &Spec) -> ReportOptions {
    let points: BTreeSet<&String> = spec.points.iter().flat_map(Table::keys).collect();
    ReportOptions {
        baseline: spec.baseline.clone(),
        about: spec.about.clone(),
        points: points.into_iter().cloned().collect(),
        ..ReportOptions::default()
    }
}

/// Reports those runs of the sweep that have been started.
fn report(options: ReportOptions, sweep: &Sweep) -> Result<()> {
    let folders = sweep.run_folders();
    if folders.is_empty() {
        return Ok(());
    }
    let mut found = Run::find(&folders)?;
    found.warnings.extend(crashed(&sweep.folder));
    let others = sweep.runs_of_other_plans();
    if !others.is_empty() {
        let folder = sweep.folder.display();
        let (count, names) = (counted(others.len() as u64, "run"), others.join(", "));
        found.warnings.push(format!(
            "left out {count} in this folder that the sweep does not list: {names}; `report {folder}` compares all runs"
        ));
    }
    let study = Study::new(found.runs.clone(), &options).or_else(|error| {
        notify(&format!("warning: {error}"));
        Study::new(found.runs.clone(), &ReportOptions { baseline: Table::new(), ..options })
    })?;
    let study = study.with_warnings(found.warnings);
    print(&study.to_text())?;
    let page = sweep.folder.join(REPORT);
    study.write_html(&page)?;
    notify(&format!("report: {}", page.display()));
    Ok(())
}

/// The plan as a table: each run, its state, and its remaining time.
pub(super) fn table(
    spec: &Spec,
    sweep: &Sweep,
    estimates: Option<&[crate::sweep::Estimate]>,
    jobs: usize,
    hour_price: Option<f64>,
) -> String {
    let mut out = spec.about.as_ref().map_or(String::new(), |about| format!("{about}\n"));
    let axes = sweep.axes();
    let width = axes.iter().map(|(key, _)| key.len()).max().unwrap_or(0);
    for (key, values) in axes {
        out += &format!("{key:<width$}  {}\n", values.join(", "));
    }
    let states = sweep.states();
    let width = sweep.runs.iter().map(|run| run.name.len()).max().unwrap_or(4).max(4);
    out += &format!(
        "\n{:>4}  {:<width$}  {:>10}  {:>16}  {:<11}  time\n",
        "", "run", "steps", "tokens", "state"
    );
    let (mut seconds, mut longest, mut tokens) = (0.0, 0f64, 0);
    for (n, (run, state)) in sweep.runs.iter().zip(&states).enumerate() {
        let estimate = estimates.map(|all| &all[n]);
        let time = estimate.map_or(0.0, crate::sweep::Estimate::seconds);
        (seconds, longest) = (seconds + time, longest.max(time));
        let own = run.config.tokens();
        tokens += own;
        out += &format!(
            "{n:>4}  {:<width$}  {:>10}  {:>16}  {:<11}  {}\n",
            run.name,
            grouped(run.config.steps),
            grouped(own),
            state.to_string(),
            if time > 0.0 { duration(time) } else { "-".into() },
        );
    }
    out += &format!("\n{}, {} tokens\n", counted(sweep.runs.len() as u64, "run"), grouped(tokens));
    if estimates.is_some() {
        let devices = match sweep.runs.iter().any(|run| run.config.device == crate::device::DeviceKind::Cuda)
        {
            true => crate::device::gpus().len().max(1),
            false => 1,
        };
        let wall = (seconds / devices as f64).max(longest);
        out += &format!(
            "{} on one device; {} on the {} of this machine, one run per device; start-up and validation not \
             included{}\n",
            duration(seconds),
            duration(wall),
            counted(devices as u64, "device"),
            if jobs > 1 {
                "; concurrent runs take less where one run does not keep the device busy"
            } else {
                ""
            },
        );
        if let Some(price) = hour_price {
            out += &format!("{:.2} at {price} an hour\n", seconds / 3600.0 * price);
        }
    }
    out
}

/// A duration in its two largest units.
fn duration(seconds: f64) -> String {
    let s = seconds.round() as u64;
    match s {
        0..60 => format!("{s} s"),
        60..3600 => format!("{} min {} s", s / 60, s % 60),
        3600..86400 => format!("{} h {} min", s / 3600, s / 60 % 60),
        _ => format!("{} days {} h", s / 86400, s / 3600 % 24),
    }
}
