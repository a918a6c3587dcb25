//! A run's folder.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

use candle_sage::{Error, Result};
use clap::ValueEnum;

use crate::config::Config;
use crate::metrics::Point;
use crate::writing;

/// The folder of one run, and its open metrics file.
#[derive(Debug)]
pub(super) struct RunDir {
    path: PathBuf,
    metrics: File,
}

impl RunDir {
    /// Makes a folder that did not exist: the named one, or the next free number.
    pub(super) fn create(config: &Config) -> Result<Self> {
        let preset = config.settings.preset.and_then(|preset| preset.to_possible_value());
        let preset = preset.as_ref().map_or("", |value| value.get_name());
        let candidates: Box<dyn Iterator<Item = String>> = match &config.name {
            Some(name) => Box::new(std::iter::once(name.clone())),
            None => Box::new((1..10_000).map(|n| format!("{preset}-{}-{n:03}", config.attn))),
        };
        for name in candidates {
            let path = config.out.join(&name);
            match std::fs::create_dir(&path) {
                Ok(()) => {
                    let metrics = open(&path.join("metrics.jsonl"))?;
                    return Ok(Self { path, metrics });
                }
                Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {}
                Err(error) => return Err(writing(&path)(error)),
            }
        }
        Err(taken(&config.out.join(config.name.as_deref().unwrap_or(""))))
    }

    /// Checks that a named folder is free, before anything long begins.
    pub(super) fn check_free(config: &Config) -> Result<()> {
        match config.name.as_ref().map(|name| config.out.join(name)) {
            Some(path) if path.exists() => Err(taken(&path)),
            _ => Ok(()),
        }
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn log(&self) -> Result<File> {
        open(&self.path.join("log.txt"))
    }

    pub(super) fn write(&self, name: &str, text: &str) -> Result<()> {
        let path = self.path.join(name);
        std::fs::write(&path, text).map_err(writing(&path))
    }

    /// Adds a line to `metrics.jsonl`.
    pub(super) fn append_metrics(&mut self, point: &Point) -> Result<()> {
        let line = serde_json::to_string(point).expect("plain numbers");
        writeln!(self.metrics, "{line}").map_err(writing(&self.path.join("metrics.jsonl")))
    }
}

fn open(path: &Path) -> Result<File> {
    File::create_new(path).map_err(writing(path))
}

fn taken(path: &Path) -> Error {
    Error::new("the run's folder exists already")
        .got(path.display())
        .allowed("a new name")
        .hint("leave --name out for a numbered folder; no run is ever overwritten")
}
