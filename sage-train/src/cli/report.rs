//! The verb `report`: compares runs.

use std::path::{Path, PathBuf};

use candle_sage::{Error, Result};
use clap::Args;
use toml::Table;

use super::print;
use crate::checks::above_zero;
use crate::report::{GENERATOR, REPORT, ReportOptions, Study};
use crate::runs::{Run, check_output, write_output};
use crate::{notify, writing};

/// Arguments of `report`.
#[derive(Debug, Args)]
pub(super) struct ReportArguments {
    /// Folder of a run, or folder that contains runs, such as a sweep. Runs may be unfinished and from any machine
    #[arg(value_name = "RUN|SWEEP", required = true)]
    folders: Vec<PathBuf>,
    /// HTML file to write [default: report.html in the given folder, or in the current folder if several are given]
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    /// Also write the tables as Markdown
    #[arg(long, value_name = "FILE")]
    markdown: Option<PathBuf>,
    /// Also write a CSV file with a line for each run
    #[arg(long, value_name = "FILE")]
    csv: Option<PathBuf>,
    /// Settings that identify the baseline, such as `attn=sagebwd,smoothing=k` [default: the sweep's baseline, else
    /// `attn=fpa`, else the first of the compared variants]
    #[arg(long, value_name = "KEY=VALUE", value_delimiter = ',')]
    baseline: Vec<String>,
    /// Settings whose values distinguish the compared variants (arms), such as `lr` or `attn,lr`. Runs that differ in
    /// another setting, except a seed, are in separate tables [default: the keys of --baseline and attention's
    /// settings; the file of a sweep can add keys. If runs agree in all of these, the first setting in which they
    /// differ]
    #[arg(long, value_name = "KEY", value_delimiter = ',')]
    by: Vec<String>,
    /// Margin in percent of the baseline's loss: a variant matches the baseline if the 90 % confidence interval of the
    /// variant's difference in loss is within the margin
    #[arg(long, value_name = "PERCENT", default_value_t = ReportOptions::default().margin)]
    margin: f64,
    /// Also compare how many tokens each run needs to reach this validation loss
    #[arg(long, value_name = "LOSS")]
    milestone: Option<f64>,
    /// Also write every chart as an SVG file into this folder
    #[arg(long, value_name = "DIR")]
    figures: Option<PathBuf>,
    /// Title of the report [default: the sweep's title, or "Comparison of runs"]
    #[arg(long, value_name = "TEXT")]
    about: Option<String>,
}

impl ReportArguments {
    pub(super) fn run(&self) -> Result<()> {
        let mut baseline = Table::new();
        // A text without `=` continues the list before it, as in `products=forward,s`.
        let mut pairs: Vec<String> = Vec::new();
        for text in &self.baseline {
            match pairs.last_mut().filter(|_| !text.contains('=')) {
                Some(before) => *before += &format!(",{text}"),
                None => pairs.push(text.clone()),
            }
        }
        for pair in &pairs {
            let (key, value) = pair.split_once('=').ok_or_else(|| {
                Error::new("not a setting with its value")
                    .got(format!("--baseline {pair}"))
                    .allowed("KEY=VALUE,KEY=VALUE")
                    .hint("e.g. --baseline attn=fpa")
            })?;
            baseline.insert(key.into(), value.into());
        }
        if !(self.margin > 0.0 && self.margin.is_finite()) {
            return Err(Error::new("margin is out of range")
                .got(self.margin)
                .allowed("a percentage above 0")
                .hint("with 0.5, differences below half a percent of the loss do not matter"));
        }
        let milestone = self.milestone.map(|loss| above_zero("milestone", loss)).transpose()?;
        for (path, ending) in [(&self.html, "html"), (&self.markdown, "md"), (&self.csv, "csv")] {
            path.as_deref().map_or(Ok(()), |path| check_output(path, ending))?;
        }
        let page = self.page()?;
        let found = Run::find(&self.folders)?;
        // A sweep defines a title, a baseline and arms. Flags override all three.
        let of_sweep = match &self.folders[..] {
            [folder] => ReportOptions::of(folder)?,
            _ => ReportOptions::default(),
        };
        if baseline.is_empty() {
            baseline = of_sweep.baseline;
            // With `--by`, other settings do not distinguish arms.
            baseline.retain(|key, _| self.by.is_empty() || self.by.iter().any(|own| own == key));
        }
        let options = ReportOptions {
            about: self.about.clone().or(of_sweep.about),
            baseline,
            by: self.by.clone(),
            margin: self.margin,
            milestone,
            points: of_sweep.points,
        };
        let study = Study::new(found.runs, &options)?.with_warnings(found.warnings);
        match &self.html {
            Some(path) => write_output(path, "html", &study.to_html()?)?,
            None => study.write_html(&page)?,
        }
        let tables = [(&self.markdown, "md", study.to_markdown()), (&self.csv, "csv", study.to_csv())];
        for (path, ending, text) in tables {
            path.as_deref().map_or(Ok(()), |path| write_output(path, ending, &text))?;
        }
        if let Some(folder) = &self.figures {
            std::fs::create_dir_all(folder).map_err(writing(folder))?;
            for (name, svg) in study.figures()? {
                let path = folder.join(format!("{name}.svg"));
                std::fs::write(&path, svg).map_err(writing(&path))?;
            }
        }
        print(&study.to_text())?;
        notify(&format!("report: {}", page.display()));
        Ok(())
    }

    /// The path of the HTML page. For several folders the page is in the current folder, where it may replace an
    /// earlier report but no other file.
    fn page(&self) -> Result<PathBuf> {
        match (&self.html, &self.folders[..]) {
            (Some(path), _) => Ok(path.clone()),
            (None, [folder]) => Ok(folder.join(REPORT)),
            (None, _) => {
                let text = std::fs::read_to_string(REPORT).unwrap_or_default();
                if Path::new(REPORT).exists() && !text.contains(GENERATOR) {
                    return Err(Error::new("the page would replace a file that is not a report")
                        .got(format!("{REPORT} in the current folder"))
                        .allowed("a new file, or an earlier report")
                        .hint("name another file with --html FILE"));
                }
                Ok(REPORT.into())
            }
        }
    }
}
