//! The folder of a run.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

use candle_sage::{Error, Result};
use clap::ValueEnum;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::config::Config;
use crate::lock::Lock;
use crate::metrics::Point;
use crate::metrics::Probed;
use crate::ranks::Rank;
use crate::report::EventFile;
use crate::runs::{METRICS, PROBES, json_lines};
use crate::{during, partial, tell, writing};

const CSV: &str = "metrics.csv";

/// The folder of one run. Only rank 0 writes to it; on the other ranks most methods that write do nothing.
#[derive(Debug)]
pub(super) struct RunDir {
    path: PathBuf,
    writer: Option<Writer>,
    /// The lock of a run that starts without a checkpoint. A resumed run has its lock in its checkpoint.
    _lock: Option<Lock>,
}

/// The open files of metrics.
#[derive(Debug)]
struct Writer {
    metrics: File,
    csv: File,
    events: EventFile,
}

impl RunDir {
    /// Makes a new folder, with the given name or the next free number.
    pub(super) fn create(config: &Config) -> Result<Self> {
        let preset = config.settings.run.preset.and_then(|preset| preset.to_possible_value());
        let preset = preset.as_ref().map_or("", |value| value.get_name());
        let candidates: Box<dyn Iterator<Item = String>> = match &config.name {
            Some(name) => Box::new(std::iter::once(name.clone())),
            None => Box::new((1..10_000).map(|n| format!("{preset}-{}-{n:03}", config.attn))),
        };
        std::fs::create_dir_all(&config.out).map_err(writing(&config.out))?;
        for name in candidates {
            let path = config.out.join(&name);
            match std::fs::create_dir(&path) {
                Ok(()) => {
                    let lock = Lock::run(&path)?;
                    return Self::open(path, Some(lock), &[]);
                }
                Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {}
                Err(error) => return Err(writing(&path)(error)),
            }
        }
        Err(taken(&config.out.join(config.name.as_deref().unwrap_or(""))))
    }

    /// Opens the folder of an existing run, truncates its metrics to `step` steps and returns them. `lock` is
    /// given if no checkpoint holds the lock.
    pub(super) fn reopen(path: &Path, step: u64, lock: Option<Lock>) -> Result<(Self, Vec<Point>)> {
        // Removes the unfinished files of a killed process. No process is writing them, since this one holds
        // the lock.
        for entry in std::fs::read_dir(path).map_err(writing(path))?.flatten() {
            if entry.path().is_file() && entry.file_name().to_string_lossy().ends_with(partial::PARTIAL) {
                std::fs::remove_file(entry.path()).map_err(writing(&entry.path()))?;
            }
        }
        let points = points_until(path, step)?;
        let probes = path.join(PROBES);
        if probes.exists() {
            let kept: Vec<Probed> = json_lines(&probes)?;
            let kept = kept.iter().filter(|probed| probed.step <= Some(step));
            let text: String = kept.map(|probed| json(probed) + "\n").collect();
            partial::file(&probes, |partial| std::fs::write(partial, text).map_err(writing(partial)))?;
        }
        Ok((Self::open(path.to_owned(), lock, &points)?, points))
    }

    /// Opens the folder of a run that another rank writes, with its metrics up to `step`.
    pub(super) fn look_on(path: PathBuf, step: u64) -> Result<(Self, Vec<Point>)> {
        let points = points_until(&path, step)?;
        Ok((Self { path, writer: None, _lock: None }, points))
    }

    fn open(path: PathBuf, lock: Option<Lock>, points: &[Point]) -> Result<Self> {
        let (metrics, csv) = begin_metrics(&path, points)?;
        let events = EventFile::create(&path, points.len() as u64 + 1)?;
        Ok(Self { path, writer: Some(Writer { metrics, csv, events }), _lock: lock })
    }

    /// Rewrites the metrics, after a value of an earlier step became known.
    pub(super) fn rewrite_metrics(&mut self, points: &[Point]) -> Result<()> {
        if let Some(writer) = &mut self.writer {
            (writer.metrics, writer.csv) = begin_metrics(&self.path, points)?;
        }
        Ok(())
    }

    /// Checks before anything long starts that a named folder does not exist.
    pub(super) fn check_free(config: &Config) -> Result<()> {
        match config.name.as_ref().map(|name| config.out.join(name)) {
            Some(path) if path.exists() => Err(taken(&path)),
            _ => Ok(()),
        }
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// The path of a rank's log. That of rank 0 is created here, those of the others with their first
    /// message.
    pub(super) fn log(&self, rank: Rank) -> Result<PathBuf> {
        if !rank.is_first() {
            return Ok(self.path.join(format!("log.rank-{}.txt", rank.index)));
        }
        let path = self.path.join("log.txt");
        File::options().create(true).append(true).open(&path).map_err(writing(&path))?;
        Ok(path)
    }

    /// Writes a file atomically.
    pub(super) fn write(&self, name: &str, text: &str) -> Result<()> {
        if self.writer.is_none() {
            return Ok(());
        }
        let write = |partial: &Path| std::fs::write(partial, text).map_err(writing(partial));
        partial::file(&self.path.join(name), write)
    }

    /// Removes a file if it exists.
    pub(super) fn remove(&self, name: &str) -> Result<()> {
        if self.writer.is_none() {
            return Ok(());
        }
        let path = self.path.join(name);
        match std::fs::remove_file(&path) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(writing(&path)(error)),
            _ => Ok(()),
        }
    }

    /// Appends an entry to a file that holds a list in JSON. A file that is not such a list is replaced.
    pub(super) fn add_json<T: Serialize>(&self, name: &str, entry: T) -> Result<()> {
        if self.writer.is_none() {
            return Ok(());
        }
        let path = self.path.join(name);
        let text = std::fs::read(&path).unwrap_or_default();
        let mut list: Vec<serde_json::Value> = serde_json::from_slice(&text).unwrap_or_default();
        list.push(serde_json::to_value(entry).expect("plain values"));
        write_json(&path, &list)
    }

    /// The entries that [`RunDir::add_json`] wrote; empty if there is no such file.
    pub(super) fn read_json<T: DeserializeOwned>(&self, name: &str) -> Vec<T> {
        let text = std::fs::read(self.path.join(name)).unwrap_or_default();
        serde_json::from_slice(&text).unwrap_or_default()
    }

    /// Waits until the metrics are on the disk, because a run cannot resume from a checkpoint without them.
    pub(super) fn sync(&self) -> Result<()> {
        let Some(writer) = &self.writer else { return Ok(()) };
        writer.metrics.sync_data().map_err(writing(&self.path.join(METRICS)))
    }

    /// Appends a probe.
    pub(super) fn append_probe(&self, probed: &Probed) -> Result<()> {
        let path = self.path.join(PROBES);
        let file = File::options().create(true).append(true).open(&path);
        file.and_then(|mut file| writeln!(file, "{}", json(probed))).map_err(writing(&path))
    }

    /// Appends a step to the metrics.
    pub(super) fn append_metrics(&mut self, point: &Point) -> Result<()> {
        let Some(writer) = &mut self.writer else { return Ok(()) };
        writeln!(writer.metrics, "{}", json(point)).map_err(writing(&self.path.join(METRICS)))?;
        writeln!(writer.csv, "{}", point.csv()).map_err(writing(&self.path.join(CSV)))?;
        let numbers = point.numbers();
        let scalars: Vec<(&str, f64)> =
            numbers[1..].iter().filter_map(|&(name, n)| Some((name, n?))).collect();
        writer.events.scalars(point.step, &scalars)
    }
}

/// The metrics of a run's first `step` steps.
fn points_until(path: &Path, step: u64) -> Result<Vec<Point>> {
    if step == 0 {
        return Ok(Vec::new());
    }
    let file = path.join(METRICS);
    let text = std::fs::read(&file).map_err(during(format!("cannot read {}", file.display())))?;
    // The points end at the first line that is incomplete, which a process that was cut off leaves.
    let first_of = |points: &mut dyn Iterator<Item = Option<Point>>| -> Vec<Point> {
        let whole = points.map_while(|point| point).zip(1..=step);
        whole.map_while(|(point, n)| (point.step == n).then_some(point)).collect()
    };
    let lines = text.split(|&byte| byte == b'\n');
    let mut points = first_of(&mut lines.map(|line| serde_json::from_slice(line).ok()));
    if points.len() as u64 != step {
        // A line is damaged; the CSV file holds the same numbers.
        let csv = std::fs::read_to_string(path.join(CSV)).unwrap_or_default();
        let mut lines = csv.lines();
        let head = lines.next().unwrap_or_default();
        let others = first_of(&mut lines.map(|line| Point::from_csv(head, line)));
        if others.len() as u64 == step {
            tell(&format!("{} is damaged, and made again from {CSV}", file.display()));
            points = others;
        }
    }
    if points.len() as u64 != step {
        return Err(Error::new("the run's metrics end before its checkpoint")
            .got(format!("{}: {} whole steps from the first on", file.display(), points.len()))
            .allowed(format!("at least {step}"))
            .hint(format!(
                "is the file damaged? {CSV} is no help either; a copy of one of them is, or a new run"
            )));
    }
    Ok(points)
}

/// Writes a JSON file atomically.
pub(super) fn write_json<T: Serialize>(path: &Path, value: &T) -> Result<()> {
    let text = serde_json::to_string_pretty(value).expect("plain values") + "\n";
    partial::file(path, |partial| std::fs::write(partial, &text).map_err(writing(partial)))
}

fn json<T: Serialize>(value: &T) -> String {
    serde_json::to_string(value).expect("plain numbers")
}

/// Writes the metrics files anew with these points, and opens them for appending.
fn begin_metrics(folder: &Path, points: &[Point]) -> Result<(File, File)> {
    let lines = |head: Option<String>, line: fn(&Point) -> String| {
        head.into_iter().chain(points.iter().map(line)).map(|line| line + "\n").collect::<String>()
    };
    Ok((
        begin(&folder.join(METRICS), &lines(None, json::<Point>))?,
        begin(&folder.join(CSV), &lines(Some(Point::csv_head()), Point::csv))?,
    ))
}

/// Writes a file with this text, and opens it for appending.
fn begin(path: &Path, text: &str) -> Result<File> {
    partial::file(path, |partial| std::fs::write(partial, text).map_err(writing(partial)))?;
    File::options().append(true).open(path).map_err(writing(path))
}

fn taken(path: &Path) -> Error {
    Error::new("the run's folder exists already")
        .got(path.display())
        .allowed("a new name, or --resume to go on with a run")
        .hint("leave --name out for a numbered folder; no run is ever overwritten")
}
