//! The folder of a run.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

use candle_sage::{Error, ErrorKind, Result};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::config::Config;
use crate::lock::Lock;
use crate::metrics::Point;
use crate::metrics::Probed;
use crate::ranks::Rank;
use crate::report::EventFile;
use crate::runs::{Lines, METRICS, PROBES, Run, STARTS, Start, Status, ending, optional, probes, to_line};
use crate::{notify, open_own, partial, writing};

const CSV: &str = "metrics.csv";

/// The folder of one run. Only rank 0 opens it for writing.
#[derive(Debug)]
pub(super) struct RunDir {
    path: PathBuf,
    /// Only on rank 0.
    opened: Option<OpenFolder>,
    writer: Option<Writer>,
    /// The lock of a run that starts without a checkpoint. The lock of a resumed run is in its
    /// [`crate::checkpoint::FoundCheckpoint`].
    _lock: Option<Lock>,
}

/// The folder that a run began in. During the run, the folder's path may stop existing or lead to another folder.
#[derive(Debug, Clone)]
pub(super) struct OpenFolder {
    path: PathBuf,
    /// Open, so that no other folder can get this folder's inode number, even if this folder is removed.
    #[cfg(unix)]
    handle: std::sync::Arc<File>,
}

impl OpenFolder {
    fn at(path: &Path) -> Result<Self> {
        Ok(Self {
            path: path.to_owned(),
            #[cfg(unix)]
            handle: std::sync::Arc::new(File::open(path).map_err(writing(path))?),
        })
    }

    /// Checks that the path still leads to the folder.
    pub(super) fn check(&self) -> Result<()> {
        if self.is_there() {
            return Ok(());
        }
        Err(Error::new("the run's folder was removed or renamed while the run was under way")
            .got(format!("nothing, or another folder, at {}", self.path.display()))
            .allowed("the folder that the run began in")
            .hint("a renamed folder keeps its checkpoints: --resume with its new name")
            .with_kind(ErrorKind::Failed))
    }

    #[cfg(unix)]
    fn is_there(&self) -> bool {
        use std::io::ErrorKind::{NotADirectory, NotFound};
        use std::os::unix::fs::MetadataExt;
        match (self.handle.metadata(), std::fs::metadata(&self.path)) {
            (Ok(own), Ok(now)) => (own.dev(), own.ino()) == (now.dev(), now.ino()),
            (_, Err(error)) => !matches!(error.kind(), NotFound | NotADirectory),
            // A temporary disk error does not mean that the folder was removed. The next write reports the error.
            (Err(_), Ok(_)) => true,
        }
    }

    /// Only checks that the path is a folder. On systems other than Unix, the run's open files prevent the renaming
    /// of its folder.
    #[cfg(not(unix))]
    fn is_there(&self) -> bool {
        self.path.is_dir()
    }
}

#[derive(Debug)]
struct Writer {
    metrics: File,
    csv: File,
    events: EventFile,
}

impl RunDir {
    /// Makes a new folder, with the given name or the next free number.
    pub(super) fn create(config: &Config) -> Result<Self> {
        let preset = config.settings.run.preset.map_or_else(String::new, |preset| preset.name());
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

    /// Opens the folder of an existing run, truncates its metrics to `step` steps and returns them. `lock` is `None`
    /// if the [`crate::checkpoint::FoundCheckpoint`] of the resumed run holds the lock.
    pub(super) fn reopen(path: &Path, step: u64, lock: Option<Lock>) -> Result<(Self, Vec<Point>)> {
        // Removes the unfinished files of a killed process. No process is writing them, because this process holds the
        // lock.
        for entry in std::fs::read_dir(path).map_err(writing(path))?.flatten() {
            if entry.path().is_file() && entry.file_name().to_string_lossy().ends_with(partial::PARTIAL) {
                std::fs::remove_file(entry.path()).map_err(writing(&entry.path()))?;
            }
        }
        let points = points_until(path, step)?;
        if path.join(PROBES).exists() {
            let kept = probes(path)?.into_iter().filter(|probed| probed.step <= Some(step));
            let text: String = kept.map(|probed| to_line(&probed) + "\n").collect();
            partial::file(&path.join(PROBES), |partial| {
                std::fs::write(partial, &text).map_err(writing(partial))
            })?;
        }
        Ok((Self::open(path.to_owned(), lock, &points)?, points))
    }

    /// Makes a new folder, with the records of another run's first `step` steps.
    pub(super) fn branch(config: &Config, from: &Path, step: u64) -> Result<(Self, Vec<Point>)> {
        let points = points_until(from, step)?;
        let mut folder = Self::create(config)?;
        folder.rewrite_metrics(&points)?;
        let probed = probes(from)?.into_iter().filter(|probed| probed.step <= Some(step));
        probed.collect::<Vec<_>>().iter().try_for_each(|probed| folder.append_probe(probed))?;
        let starts: Vec<Start> = optional(&from.join(STARTS))?.unwrap_or_default();
        let mut before = starts.into_iter().filter(|start| start.step <= step);
        before.try_for_each(|start| folder.add_json(STARTS, start))?;
        Ok((folder, points))
    }

    /// Opens a run's folder for a rank that does not write to it. Also returns the metrics up to `step`.
    pub(super) fn open_read_only(path: PathBuf, step: u64) -> Result<(Self, Vec<Point>)> {
        let points = points_until(&path, step)?;
        Ok((Self { path, opened: None, writer: None, _lock: None }, points))
    }

    fn open(path: PathBuf, lock: Option<Lock>, points: &[Point]) -> Result<Self> {
        let (metrics, csv) = begin_metrics(&path, points)?;
        let events = EventFile::create(&path, points.len() as u64 + 1)?;
        let opened = Some(OpenFolder::at(&path)?);
        Ok(Self { path, opened, writer: Some(Writer { metrics, csv, events }), _lock: lock })
    }

    /// Replaces the contents of the metrics files by `points`.
    pub(super) fn rewrite_metrics(&mut self, points: &[Point]) -> Result<()> {
        self.check_there()?;
        if let Some(writer) = &mut self.writer {
            (writer.metrics, writer.csv) = begin_metrics(&self.path, points)?;
        }
        Ok(())
    }

    /// Checks, before any long work starts, that the folder of a run with `--name` does not exist.
    pub(super) fn check_free(config: &Config) -> Result<()> {
        match config.name.as_ref().map(|name| config.out.join(name)) {
            Some(path) if path.exists() => Err(taken(&path)),
            _ => Ok(()),
        }
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn check_there(&self) -> Result<()> {
        self.opened.as_ref().map_or(Ok(()), OpenFolder::check)
    }

    pub(super) fn opened(&self) -> Option<OpenFolder> {
        self.opened.clone()
    }

    /// The path of a rank's log. For rank 0, also creates the file. The file of another rank is created with its first
    /// message.
    pub(super) fn log(&self, rank: Rank) -> Result<PathBuf> {
        if !rank.is_first() {
            return Ok(self.path.join(format!("log.rank-{}.txt", rank.index)));
        }
        let path = self.path.join("log.txt");
        open_own(&path, File::options().create(true).append(true))?;
        Ok(path)
    }

    /// Writes a file atomically.
    pub(super) fn write(&self, name: &str, text: &str) -> Result<()> {
        if self.writer.is_none() {
            return Ok(());
        }
        self.check_there()?;
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

    /// Appends an entry to a file that contains a JSON list. A file that is not such a list is an error.
    pub(super) fn add_json<T: Serialize>(&self, name: &str, entry: T) -> Result<()> {
        if self.writer.is_none() {
            return Ok(());
        }
        self.check_there()?;
        let path = self.path.join(name);
        let mut list: Vec<serde_json::Value> = optional(&path)?.unwrap_or_default();
        list.push(serde_json::to_value(entry).expect("plain values"));
        write_json(&path, &list)
    }

    /// The entries that [`RunDir::add_json`] wrote to the file `name`; empty if the file does not exist.
    pub(super) fn read_json<T: DeserializeOwned>(&self, name: &str) -> Result<Vec<T>> {
        Ok(optional(&self.path.join(name))?.unwrap_or_default())
    }

    /// Waits until the metrics are on the disk, because resuming from a checkpoint requires them.
    pub(super) fn sync(&self) -> Result<()> {
        self.check_there()?;
        let Some(writer) = &self.writer else { return Ok(()) };
        writer.metrics.sync_data().map_err(writing(&self.path.join(METRICS)))
    }

    pub(super) fn append_probe(&self, probed: &Probed) -> Result<()> {
        self.check_there()?;
        let path = self.path.join(PROBES);
        let mut file = open_own(&path, File::options().create(true).append(true))?;
        // Writes the whole line at once, so that no line is incomplete.
        file.write_all((to_line(probed) + "\n").as_bytes()).map_err(writing(&path))
    }

    pub(super) fn append_metrics(&mut self, point: &Point) -> Result<()> {
        self.check_there()?;
        let Some(writer) = &mut self.writer else { return Ok(()) };
        let line = to_line(point) + "\n";
        writer.metrics.write_all(line.as_bytes()).map_err(writing(&self.path.join(METRICS)))?;
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
    // The consecutive steps from 1 on.
    let first_of = |points: &mut dyn Iterator<Item = Point>| -> Vec<Point> {
        points.zip(1..=step).map_while(|(point, n)| (point.step == n).then_some(point)).collect()
    };
    // The steps after the checkpoint are trained again, so damaged metrics of these steps do not matter.
    let mut points = first_of(&mut Lines::read(&file)?.values.into_iter());
    if points.len() as u64 != step {
        // A line of the metrics is damaged or missing; the CSV file contains the same metrics.
        let csv = std::fs::read_to_string(path.join(CSV)).unwrap_or_default();
        let mut lines = csv.lines();
        let head = lines.next().unwrap_or_default();
        let others = first_of(&mut lines.map_while(|line| Point::from_csv(head, line)));
        if others.len() as u64 == step {
            notify(&format!("{} is damaged, and was restored from {CSV}", file.display()));
            points = others;
        }
    }
    if points.len() as u64 != step {
        return Err(Error::new("the run's metrics end before its checkpoint")
            .got(format!("{}: {} consecutive steps from step 1", file.display(), points.len()))
            .allowed(format!("at least {step}"))
            .hint(format!(
                "{CSV} is incomplete too: restore one of the files from a copy, or begin a new run"
            )));
    }
    Ok(points)
}

pub(super) fn write_json<T: Serialize>(path: &Path, value: &T) -> Result<()> {
    let text = serde_json::to_string_pretty(value).expect("plain values") + "\n";
    partial::file(path, |partial| std::fs::write(partial, &text).map_err(writing(partial)))
}

/// Writes the metrics files again with these points, and opens them for appending.
fn begin_metrics(folder: &Path, points: &[Point]) -> Result<(File, File)> {
    let lines = |head: Option<String>, line: fn(&Point) -> String| {
        head.into_iter().chain(points.iter().map(line)).map(|line| line + "\n").collect::<String>()
    };
    Ok((
        begin(&folder.join(METRICS), &lines(None, to_line::<Point>))?,
        begin(&folder.join(CSV), &lines(Some(Point::csv_head()), Point::csv))?,
    ))
}

/// Writes a file with this text, and opens it for appending.
fn begin(path: &Path, text: &str) -> Result<File> {
    partial::file(path, |partial| std::fs::write(partial, text).map_err(writing(partial)))?;
    open_own(path, File::options().append(true))
}

fn taken(path: &Path) -> Error {
    // A run whose end cannot be read counts as unfinished: this changes only the hint.
    let finished = ending(path).ok().flatten().is_some_and(|ending| ending.status == Status::Finished);
    Error::new("the run's folder exists already")
        .got(path.display())
        .allowed("a new name, or --resume to continue with a run")
        .hint(match Run::is(path) && !finished {
            true => format!("the run in it is not finished: --resume {} continues with it", path.display()),
            false => {
                "choose another name; no run is ever overwritten, and a new run without --name gets a number"
                    .into()
            }
        })
}
