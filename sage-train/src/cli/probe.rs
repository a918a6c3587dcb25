//! The verb `probe`: measures the errors of low-bit attention, of FP8 matmuls and of SLA2.

use std::path::PathBuf;

use candle_sage::{Error, Granularity, KeyMean, Result, SageBwd, Scheme};

use super::model::needs_data;
use super::print;
use crate::checks::{above_zero, in_range};
use crate::config::check_own;
use crate::device::DeviceKind;
use crate::metrics::Probed;
use crate::probe::gradient::{Extent, gradient_errors};
use crate::probe::linear::linear_errors;
use crate::probe::selected::{SelectionOptions, probe_selections};
use crate::probe::{ProbeOptions, Shape, probe, sigma_table};
use crate::quantity::{Quantity, grouped};
use crate::ranks::Rank;
use crate::report::{
    gradient_csv, gradient_plot, gradient_table, layer_errors, linear_csv, linear_table, probe_csv,
    selections_csv, selections_table, sigma_errors,
};
use crate::runs::{Run, add_gradients, check_output, write_output};
use crate::settings::{Attn, SchemeSetting, Settings, SmoothingSetting, SourceSetting, Switch, Text};
use crate::trained::run_folder;

/// Arguments of `probe`.
#[derive(Debug, clap::Args)]
pub(super) struct Probe {
    /// Folder of a run, of a checkpoint (RUN/checkpoints/step-N), or of a model in Hugging Face's format (needs
    /// --data). For a run, the weights at its last validation are probed. Not with --sigma
    #[arg(required_unless_present = "sigma")]
    run: Option<PathBuf>,
    /// Text or shards that the sequences are taken from. In a folder that `sage-train data prepare` wrote, only
    /// the validation shards are used. May be repeated for a mixture [default: the run's validation data; with
    /// --gradient, the training data that would follow the model's last step]
    #[arg(long, value_name = "PATH", conflicts_with = "sigma")]
    data: Vec<SourceSetting>,
    /// JSON key or column that holds the text in --data [default: the run's]
    #[arg(long, value_name = "NAME", requires = "data")]
    text_field: Option<String>,
    /// Number of sequences; not with --gradient or --sigma
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u16).range(1..))]
    sequences: u16,
    /// SageBwd and Attn-QAT: operands whose mean over tokens is subtracted before quantizing [default: the run's]
    #[arg(long, value_enum)]
    smoothing: Option<SmoothingSetting>,
    /// SageBwd: tokens from which --smoothing computes the means of K and V: `all`, or `sample-N` for N evenly spaced
    /// tokens [default: the run's]
    #[arg(long)]
    key_mean: Option<Text<KeyMean>>,
    /// SageBwd: number of rows or columns of P, dS and dO that share a scale in the backward: one (`vector`), N
    /// (`group-N`), or all of a tile (`tile`) [default: the run's]
    #[arg(long)]
    granularity: Option<Text<Granularity>>,
    /// Attention to probe, except `fpa` and `none`, which have no error to measure [default: the run's, or sagebwd if
    /// the run's is unquantized; with --sigma: sagebwd]
    #[arg(long, value_enum)]
    attn: Option<Attn>,
    /// Tokens in a sequence [default: the run's; 1024 with --sigma]
    #[arg(long, value_name = "N")]
    context: Option<Quantity>,
    /// Also print a row for each head
    #[arg(long)]
    heads: bool,
    /// Also quantize each matmul (sagebwd) or each operand (attn-qat) alone, and measure the errors
    #[arg(long)]
    products: bool,
    /// SageBwd: use a scale for each token of Q and K, not one for each tile. This removes the error that outlier
    /// tokens cause in other tokens of their tile
    #[arg(long)]
    token_scales: bool,
    /// Factors by which queries and keys are multiplied. Prints one table for each factor
    #[arg(long, value_name = "FACTOR,..", value_delimiter = ',', default_value = "1")]
    qk_scale: Vec<f64>,
    /// Measure the error of SLA2 if it replaces dense attention in a model that was trained without SLA2. Compares
    /// several block selections, and several approximations of attention to unselected blocks, such as linear
    /// attention. SLA2's parameters are fitted on half of the sequences, and the error is measured on the other half
    #[arg(long, conflicts_with_all = ["sigma", "heads", "products", "token_scales", "qk_scale", "attn", "smoothing", "key_mean", "granularity"])]
    selections: bool,
    /// With --selections: number of past key blocks that each query block selects
    #[arg(long, value_name = "N", default_value_t = 4, requires = "selections")]
    blocks: usize,
    /// With --selections: tokens of a block [default: a sixteenth of the context, at least 16 and at most 128]
    #[arg(long, value_name = "N", requires = "selections")]
    block: Option<usize>,
    /// Compare the gradient of the whole model under low-bit schemes with the gradient under unquantized attention, on
    /// the same data. Prints the part of the error that averages out over tokens, and the part that remains (the bias).
    /// Also prints the number of tokens per step at which the gradient's noise is as large as the bias
    #[arg(long, conflicts_with_all = ["sigma", "selections", "heads", "products", "token_scales", "qk_scale", "sequences", "attn", "smoothing", "key_mean", "granularity"])]
    gradient: bool,
    /// Measure the errors of FP8 matmuls in the linear layers, except the LM head, against f32 matmuls: errors of the
    /// output, the input's gradient and the weight's gradient. All operands are in E4M3, except the output's gradient
    /// if the run has another format for it
    #[arg(long, conflicts_with_all = ["gradient", "sigma", "selections", "heads", "products", "token_scales", "qk_scale", "attn", "smoothing", "key_mean", "granularity"])]
    linear: bool,
    /// With --gradient: low-bit schemes, separated by semicolons. `:KEY=VALUE` changes a scheme's setting
    /// (`sage-train --help`, section Attention). Example: "sagebwd;sagebwd:products=scores;attn-qat" [default: the
    /// run's --attn and --attn-layers, or sagebwd if the run's attention is unquantized]
    #[arg(long, value_name = "SCHEME;..", value_delimiter = ';', requires = "gradient")]
    schemes: Vec<SchemeSetting>,
    /// With --gradient: number of micro-batches, a power of two, at least 16
    #[arg(long, value_name = "N", default_value_t = 32, requires = "gradient")]
    micro_batches: usize,
    /// With --gradient: sequences of a micro-batch [default: the run's]
    #[arg(long, value_name = "N", requires = "gradient")]
    micro_batch: Option<usize>,
    /// With --gradient: on a GPU, compute all sums in a fixed order. A varying order adds noise to the measured
    /// gradient error [default: the run's]
    #[arg(long, value_enum, requires = "gradient")]
    deterministic: Option<Switch>,
    /// With --gradient: also plot the error against the number of tokens that a gradient averages over, as SVG;
    /// `report RUN` has the plot too
    #[arg(long, value_name = "FILE", requires = "gradient")]
    svg: Option<PathBuf>,
    /// Probe random tensors instead of a model's tensors, once for each SIGMA. SIGMA is the standard deviation of the
    /// queries and keys. Example: 1,3,5,8,10
    #[arg(long, value_name = "SIGMA,..", value_delimiter = ',', conflicts_with_all = ["run", "heads", "products", "token_scales", "qk_scale", "sequences"])]
    sigma: Vec<f64>,
    /// With --sigma: number of heads
    #[arg(long = "sigma-heads", value_name = "N", default_value_t = 4, conflicts_with = "run", value_parser = clap::value_parser!(u16).range(1..))]
    sigma_heads: u16,
    /// With --sigma: width of a head
    #[arg(long, value_name = "D", default_value_t = 64, conflicts_with = "run")]
    head_dim: usize,
    /// With --gradient, --linear or --sigma: where to compute; other probes run on the CPU [default: cpu]
    #[arg(long, value_enum)]
    device: Option<DeviceKind>,
    /// Also write the results as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Also write the results as CSV
    #[arg(long, value_name = "FILE")]
    csv: Option<PathBuf>,
}

impl Probe {
    pub(super) fn run(&self) -> Result<()> {
        for (path, ending) in [(&self.json, "json"), (&self.csv, "csv"), (&self.svg, "svg")] {
            path.as_deref().map_or(Ok(()), |path| check_output(path, ending))?;
        }
        if self.attn == Some(Attn::EXACT) {
            return Err(Error::new("unquantized attention has no errors to measure: it is the reference")
                .got("--attn fpa")
                .allowed("a low-bit scheme")
                .hint(
                    "without --attn the probe uses the run's low-bit scheme; sagebwd if the run is unquantized, \
                     or with --sigma",
                ));
        }
        if self.attn.is_some_and(|attn| attn.to_string() == "none") {
            return Err(Error::new("a model without attention has no errors to measure")
                .got("--attn none")
                .allowed("a low-bit scheme")
                .hint(
                    "without --attn the probe uses the run's low-bit scheme; sagebwd if the run is unquantized, \
                     or with --sigma",
                ));
        }
        if self.device.is_some() && self.run.is_some() && !self.gradient && !self.linear {
            return Err(Error::new("this probe runs only on the CPU")
                .got("--device with a run")
                .allowed("--device with --gradient, --linear or --sigma")
                .hint("leave --device out"));
        }
        let typed = Settings::with(|s| {
            s.attention.attn = self.attn;
            s.attention.smoothing = self.smoothing;
            s.attention.key_mean = self.key_mean;
            s.attention.granularity = self.granularity;
            s.data.val_data = (!self.data.is_empty()).then(|| self.data.clone());
            s.data.text_field = self.text_field.clone();
            s.data.context = self.context;
        });
        let mut settings = typed.clone();
        if self.smoothing == Some(SmoothingSetting::None) && self.key_mean.is_none() {
            // Without smoothing, no mean is subtracted, so the run's `key-mean` does not apply.
            settings.attention.key_mean = Some(Text(KeyMean::All));
        }
        match &self.run {
            Some(run) => self.of_run(run, &settings, &typed),
            None => self.of_random(&typed),
        }
    }

    fn of_run(&self, run: &std::path::Path, settings: &Settings, typed: &Settings) -> Result<()> {
        needs_data(run, &self.data, "probe on", "--data PATH")?;
        // The text of `--data` is tokenized with the run's `tokenizer.json`. Without `--data`, the tokenizer is loaded
        // or trained as in the run, and compared with this file, to detect changed data.
        let tokenizer = run_folder(run).join("tokenizer.json").display().to_string();
        let tokenizer = (!self.data.is_empty()).then_some(tokenizer);
        let mut settings = settings.clone();
        settings.data.tokenizer = tokenizer;
        if self.selections {
            return self.of_selections(run, settings);
        }
        if self.gradient {
            return self.of_gradient(run, settings);
        }
        if self.linear {
            return self.of_linear(run, settings);
        }
        let mut all: Vec<Probed> = Vec::new();
        self.qk_scale.iter().try_for_each(|scale| above_zero("qk-scale", *scale).map(drop))?;
        for &qk_scale in &self.qk_scale {
            let options = ProbeOptions {
                sequences: usize::from(self.sequences),
                heads: self.heads,
                products: self.products,
                qk_scale,
                token_scales: self.token_scales,
            };
            let probed = probe(run, options, settings.clone(), typed)?;
            let mut title = format!(
                "{} against unquantized attention, {} sequences of {}, {}",
                run.display(),
                probed.sequences,
                probed.context,
                probed.scheme
            );
            if qk_scale != 1.0 {
                title += &format!(", Q and K times {qk_scale}");
            }
            if self.token_scales {
                title += ", a scale for each token of Q and K";
            }
            print(&(layer_errors(&title, &probed) + "\n"))?;
            all.push(probed);
        }
        self.write(&all, || probe_csv(&all))
    }

    fn of_selections(&self, run: &std::path::Path, settings: Settings) -> Result<()> {
        let selecting = SelectionOptions {
            sequences: usize::from(self.sequences),
            blocks: self.blocks,
            block: self.block,
        };
        let found = probe_selections(run, selecting, settings)?;
        let title = format!(
            "{}: {} blocks of {} of {} tokens, {:.1} % sparse, against dense attention, {} sequences",
            run.display(),
            self.blocks,
            found.block,
            found.context,
            100.0 * found.sparsity,
            found.measured
        );
        print(&selections_table(&title, &found))?;
        self.write(&found, || selections_csv(&found))
    }

    fn of_gradient(&self, run: &std::path::Path, mut settings: Settings) -> Result<()> {
        settings.batch.micro_batch = self.micro_batch;
        settings.run.deterministic = self.deterministic;
        let schemes: Vec<Scheme> = self.schemes.iter().map(|SchemeSetting(scheme)| *scheme).collect();
        if schemes.contains(&Scheme::Unquantized) {
            return Err(Error::new("unquantized attention has no errors to measure: it is the reference")
                .got("fpa among --schemes")
                .allowed("low-bit schemes")
                .hint("leave fpa out: it is always computed as the reference"));
        }
        let extent = Extent { schemes, micro_batches: self.micro_batches };
        let all = gradient_errors(run, self.device.unwrap_or(DeviceKind::Cpu), settings, &extent)?;
        for errors in &all {
            let step = errors.step.map_or(String::new(), |step| format!(" after step {step}"));
            let title = format!(
                "{}{step}, {} against unquantized attention: {} micro-batches of {} tokens",
                run.display(),
                errors.scheme,
                self.micro_batches,
                grouped(errors.tokens)
            );
            print(&(gradient_table(&title, errors) + "\n"))?;
        }
        self.write(&all, || gradient_csv(&all))?;
        if self.data.is_empty() && Run::is(run_folder(run)) {
            add_gradients(run_folder(run), &all)?;
        }
        self.svg.as_deref().map_or(Ok(()), |path| write_output(path, "svg", &gradient_plot(&all)?))
    }

    fn of_linear(&self, run: &std::path::Path, settings: Settings) -> Result<()> {
        let place = self.device.unwrap_or(DeviceKind::Cpu);
        let errors = linear_errors(run, place, settings, usize::from(self.sequences))?;
        let step = errors.step.map_or(String::new(), |step| format!(" after step {step}"));
        let title = format!(
            "{}{step}: linear layers in FP8 (gradients in {}) against exact matmuls, {} sequences of {}",
            run.display(),
            errors.gradient.to_uppercase(),
            errors.sequences,
            errors.context
        );
        print(&linear_table(&title, &errors))?;
        self.write(&errors, || linear_csv(&errors))
    }

    fn of_random(&self, settings: &Settings) -> Result<()> {
        let sigmas = self
            .sigma
            .iter()
            .map(|sigma| in_range("sigma", *sigma, 1e-3, 1e3))
            .collect::<Result<Vec<_>>>()?;
        let attn = self.attn.unwrap_or_else(|| SageBwd::default().into());
        let Some(scheme) = attn.scheme(settings) else {
            return Err(Error::new("this attention has no errors to measure")
                .got(format!("--attn {attn}"))
                .allowed("a low-bit scheme")
                .hint("--attn sagebwd, or attn-qat"));
        };
        check_own(settings, attn, Some(scheme), None)?;
        scheme.validate()?;
        let shape = Shape {
            tokens: in_range("context", self.context.map_or(1024, |n| n.0), 1, 1 << 14)? as usize,
            heads: usize::from(self.sigma_heads),
            head_dim: self.head_dim,
            seed: 0,
        };
        let device = self.device.unwrap_or(DeviceKind::Cpu);
        let rows = sigma_table(scheme, &sigmas, shape, &device.open(Rank::ALONE)?)?;
        let title = format!(
            "{scheme}, {} tokens, causal, {} heads of {}, V and dO of sigma 1, on {}, against f64",
            shape.tokens, shape.heads, shape.head_dim, device
        );
        print(&sigma_errors(&title, &rows))?;
        self.write(&rows, || {
            let mut text = String::from("sigma,quantity,cosine,relative_l2\n");
            for row in &rows {
                for (name, error) in crate::metrics::RESULTS.iter().zip(row.errors) {
                    text += &format!("{},{name},{},{}\n", row.sigma, error.cosine, error.relative_l2);
                }
            }
            text
        })
    }

    fn write(&self, all: &impl serde::Serialize, csv: impl FnOnce() -> String) -> Result<()> {
        if let Some(path) = &self.json {
            write_output(path, "json", &serde_json::to_string_pretty(all).expect("plain numbers"))?;
        }
        self.csv.as_deref().map_or(Ok(()), |path| write_output(path, "csv", &csv()))
    }
}
