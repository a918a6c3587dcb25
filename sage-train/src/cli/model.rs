//! The verbs `sample`, `eval` and `export` for a trained model.

use std::path::{Path, PathBuf};

use candle_core::DType;
use candle_sage::{Error, Result, Scheme};
use clap::ValueEnum;

use super::attending::AttentionOverrides;
use super::data::recall_words;
use super::{print, tasks};
use crate::checks::in_range;
use crate::data::Dataset;
use crate::data::recall::QuestionContext;
use crate::device::DeviceKind;
use crate::evaluate::{
    Evaluation, Extent, PositionLoss, Recalled, Task, by_position, evaluate, recall, token_by_token,
};
use crate::model::{Llama, Stage};
use crate::quantity::{Quantity, counted};
use crate::ranks::Ranks;
use crate::sample::{GeneratedText, Sampling, Writer};
use crate::settings::{Attn, Settings, SourceSetting};
use crate::trained::{Trained, run_folder};
use crate::{hf, notify};

/// Arguments of `sample`.
#[derive(Debug, clap::Args)]
pub(super) struct Sample {
    /// Folder of a run, of one of its checkpoints, or of a model in Hugging Face's format. A Hugging Face model uses
    /// the attention that its attention.json names; without this file, its attention is unquantized. Its context is
    /// limited to 4096 tokens
    run: PathBuf,
    /// Text to continue; without it a new document begins
    #[arg(default_value = "")]
    prompt: String,
    /// Largest number of tokens to generate
    #[arg(long, value_name = "N", default_value_t = Quantity(160))]
    tokens: Quantity,
    /// Divisor of the logits; 0 always chooses the most likely token
    #[arg(long, value_name = "T", default_value_t = Sampling::default().temperature)]
    temperature: f64,
    /// Sample from the K most likely tokens; 0 for all tokens
    #[arg(long, value_name = "K", default_value_t = 0)]
    top_k: usize,
    /// Sample from the fewest most likely tokens that together have this probability; 1 for all tokens
    #[arg(long, value_name = "P", default_value_t = 1.0)]
    top_p: f64,
    /// Seed of the sampling
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// Do not put the beginning-of-document token before the prompt
    #[arg(long)]
    no_bos: bool,
    /// Encode special tokens in the prompt, such as `<|im_start|>`, as tokens. By default they are text
    #[arg(long)]
    special_tokens: bool,
    /// Attention for the prompt and the new tokens [default: for the prompt the run's attention, for new tokens
    /// unquantized attention]
    #[arg(long, value_enum)]
    attn: Option<Attn>,
    /// Where to compute [default: cuda if this build has it]
    #[arg(long, value_enum)]
    device: Option<DeviceKind>,
}

impl Sample {
    pub(super) fn run(&self) -> Result<()> {
        let sampling = Sampling {
            temperature: in_range("temperature", self.temperature, 0.0, 1e3)?,
            top_k: self.top_k,
            top_p: in_range("top-p", self.top_p, 1e-9, 1.0)?,
            seed: self.seed,
        };
        let tokens = in_range("tokens", self.tokens.0, 1, 1 << 24)? as usize;
        let place = self.device.unwrap_or_default();
        let settings = Settings::with(|s| s.attention.attn = self.attn);
        let trained = Trained::open(&self.run, place, settings, false)?;
        let Trained { config, tokenizer, device, .. } = &trained;
        let writer = Writer {
            model: &trained.model()?,
            following: self.attn.is_none().then_some(Scheme::Unquantized),
            tokenizer,
            begin: (!self.no_bos).then_some(trained.boundaries.begin),
            special_tokens: self.special_tokens,
            ends: &trained.boundaries.ends,
            context: config.model.context,
            device,
        };
        if !self.special_tokens && tokenizer.spells_special_token(&self.prompt) {
            notify(
                "warning: the prompt's special tokens are encoded as text; --special-tokens encodes them as \
                 tokens",
            );
        }
        let written = writer.write(&self.prompt, tokens, &sampling)?;
        print(&format!("{}{}\n", self.prompt, written.text))?;
        notify(&self.summary(&written, config.attn, &writer));
        Ok(())
    }

    /// The message after the generated text.
    fn summary(&self, written: &GeneratedText, attn: Attn, writer: &Writer<'_>) -> String {
        let speed =
            written.tokens_per_second().map_or(String::new(), |speed| format!(", {speed:.1} tokens/s"));
        let numerics = if writer.model.past(1, writer.following).is_none() {
            "; this attention recomputes the whole sequence for each token"
        } else if [Attn::EXACT, Attn::NONE].contains(&attn) || self.attn.is_some() {
            ""
        } else {
            "; attention of new tokens is unquantized, unless --attn names a scheme"
        };
        let ended = if (written.tokens as u64) < self.tokens.0 { ", then the document ends" } else { "" };
        let begin = match writer.begin.map(|id| writer.tokenizer.entry(id)) {
            Some(Ok(token)) => format!("; the model saw `{token}` before the text (--no-bos leaves it out)"),
            _ => String::new(),
        };
        format!("{}{ended}{speed}{begin}{numerics}", counted(written.tokens as u64, "token"))
    }
}

/// Requires `--data` for a model that is not a run, because only a run records its data.
pub(super) fn needs_data(run: &Path, data: &[SourceSetting], what: &str, allowed: &str) -> Result<()> {
    let of_run = run_folder(run).join("config.toml").exists() || !run.join("config.json").exists();
    if of_run || !data.is_empty() {
        return Ok(());
    }
    Err(Error::new(format!("there is nothing to {what}"))
        .got(format!("{} is not a run, and only a run records its data", run.display()))
        .allowed(allowed)
        .hint("name text or shards of tokens with --data"))
}

/// Arguments of `eval`.
#[derive(Debug, clap::Args)]
pub(super) struct Eval {
    /// Folder of a run, of one of its checkpoints, or of a model in Hugging Face's format. A Hugging Face model uses
    /// the attention that its attention.json names; without this file, its attention is unquantized. Without --context,
    /// its context is limited to 4096 tokens
    run: PathBuf,
    /// Text or shards to evaluate on. In a folder that `sage-train data prepare` wrote, only the validation shards are
    /// used. May be repeated for a mixture [default: the run's validation data]
    #[arg(long, value_name = "PATH")]
    data: Vec<SourceSetting>,
    /// JSON key or column that holds the text in --data [default: the run's]
    #[arg(long, value_name = "NAME", requires = "data")]
    text_field: Option<String>,
    /// Largest number of tokens to evaluate [default: 1m = 1,048,576; 2k with --token-by-token]
    #[arg(long, value_name = "N")]
    tokens: Option<Quantity>,
    /// Evaluate all tokens of the data
    #[arg(long, conflicts_with_all = ["tokens", "hellaswag"])]
    all: bool,
    /// Print two losses: from one forward of each sequence, and from a separate forward for each token, on only the
    /// tokens before it. They can differ: in low-bit attention, a token shares scales and means with later tokens
    #[arg(long, conflicts_with = "hellaswag")]
    token_by_token: bool,
    /// Also print the loss by position: each sequence is divided into eight ranges of positions
    #[arg(long, conflicts_with_all = ["hellaswag", "token_by_token"])]
    by_position: bool,
    /// Measure how often the model recalls numbers that a document states and later asks for. The results are grouped
    /// by the number of tokens between the statement and the answer. Each generated test document has at least WORDS
    /// words. The model should have been trained on documents of `sage-train corpus --recall`
    #[arg(long, value_name = "WORDS", conflicts_with_all = ["hellaswag", "token_by_token", "by_position", "all", "data"])]
    recall: Option<usize>,
    /// Sequences in one forward [default: the run's]
    #[arg(long, value_name = "N")]
    micro_batch: Option<usize>,
    /// Tokens in a sequence [default: the run's]
    #[arg(long, value_name = "N")]
    context: Option<Quantity>,
    #[command(flatten)]
    attention: AttentionOverrides,
    /// Print, instead of the loss, the score on a task of lm-evaluation-harness: hellaswag, arc, piqa or lambada. FILE
    /// has the task's JSON lines, e.g. piqa=piqa.jsonl. May be repeated
    #[arg(long = "task", value_name = "TASK=FILE", value_parser = tasks::task, conflicts_with_all = ["hellaswag", "token_by_token", "by_position", "recall", "all", "data", "tokens"])]
    tasks: Vec<(Task, PathBuf)>,
    /// Print, instead of the loss, the score on HellaSwag from llm.c's file hellaswag_val.bin. The model must have
    /// GPT-2's tokenizer; for other models use --task hellaswag=FILE
    #[arg(long, value_name = "FILE")]
    hellaswag: Option<PathBuf>,
    /// Where to compute [default: cuda if this build has it]
    #[arg(long, value_enum)]
    device: Option<DeviceKind>,
}

/// The selection and the numerics of a model's attention, as printed.
fn attention_of(trained: &Trained) -> String {
    let config = &trained.config;
    let scheme = config.model.numerics();
    match &config.model.sla2 {
        Some(sla2) if trained.stage() == Stage::Sparse => {
            let nearest =
                if sla2.nearest > 0 { format!(" ({} nearest)", sla2.nearest) } else { String::new() };
            let tail = if sla2.tail.is_none() { ", no tail" } else { "" };
            format!(
                "{}: {} blocks of {}{nearest} and the diagonal{tail}; {scheme}",
                config.attn, sla2.blocks, sla2.block
            )
        }
        _ => scheme,
    }
}

impl Eval {
    pub(super) fn run(&self) -> Result<()> {
        let tokenizer = run_folder(&self.run).join("tokenizer.json").display().to_string();
        let usual = if self.all {
            1 << 40
        } else if self.token_by_token {
            2 << 10
        } else {
            1 << 20
        };
        let tokens = in_range("tokens", self.tokens.map_or(usual, |tokens| tokens.0), 1, 1 << 40)?;
        let recall = self.recall.map(recall_words).transpose()?;
        if self.hellaswag.is_none() && recall.is_none() && self.tasks.is_empty() {
            needs_data(&self.run, &self.data, "evaluate on", "--data, --task, --recall or --hellaswag")?;
        }
        let settings = Settings::with(|s| {
            s.attention = self.attention.settings();
            s.data.val_data = (!self.data.is_empty()).then(|| self.data.clone());
            s.data.text_field = self.text_field.clone();
            s.data.tokenizer = Some(tokenizer);
            s.data.context = self.context;
            s.batch.micro_batch = self.micro_batch;
        });
        let trained = Trained::open(&self.run, self.device.unwrap_or_default(), settings, false)?;
        self.attention.check(&trained.config)?;
        let Trained { config, tokenizer, device, .. } = &trained;
        let model = trained.model()?;
        if let Some(file) = &self.hellaswag {
            return tasks::hellaswag(file, &trained, &model);
        }
        if !self.tasks.is_empty() {
            return tasks::run(&self.tasks, &trained, &model);
        }
        if let Some(words) = recall {
            return recalled(&trained, &model, words, tokens);
        }
        config.data.warn_of_trained_on(&|line| notify(line));
        let data = Dataset::load_to_validate(&config.data, &|line| notify(line))?;
        let cut = config.data.cut(tokenizer);
        let scheme = attention_of(&trained);
        let bar = crate::bar(0, "{bar:30.cyan/blue} {human_pos}/{human_len} tokens, ETA {eta}");
        let mut seen = |done, all| {
            bar.set_length(all);
            bar.set_position(done);
        };
        let extent = Extent { tokens, batch: config.micro_batch };
        if self.token_by_token {
            let result = token_by_token(&model, &data.validation, cut, extent, device, &mut seen)?;
            bar.finish_and_clear();
            return print(&format!(
                "attention      {scheme}\ntokens         {}\nwhole          {:.4} nats a token\n\
                 token by token {:.4} nats a token, {:+.3} %\n",
                crate::quantity::grouped(result.tokens),
                result.whole,
                result.alone,
                100.0 * (result.alone / result.whole - 1.0)
            ));
        }
        let result =
            evaluate(&model, &data.validation, cut, tokenizer, extent, (device, &Ranks::alone()), &mut seen)?;
        bar.finish_and_clear();
        print(&evaluated(&scheme, &result))?;
        if !self.by_position {
            return Ok(());
        }
        let parts = by_position(&model, &data.validation, cut, extent, device, &mut |_, _| {})?;
        let mut table = String::from("positions           loss\n");
        for PositionLoss { positions, loss } in parts {
            let range = format!("{} to {}", positions.start, positions.end - 1);
            table += &format!("{range:<15}{loss:>9.4}\n");
        }
        print(&table)
    }
}

fn evaluated(scheme: &str, result: &Evaluation) -> String {
    let rest = if result.tokens < result.of {
        format!(" of {} (--all evaluates all)", crate::quantity::grouped(result.of))
    } else {
        String::new()
    };
    format!(
        "attention      {scheme}\ntokens         {}{rest}\nloss           {:.4} nats a token\nperplexity     {:.3}\n\
         bits a byte    {:.4}\n",
        crate::quantity::grouped(result.tokens),
        result.loss,
        result.loss.exp(),
        result.bits_per_byte
    )
}

/// A document states a number for a name, and asks for it later. Prints how often a model recalls the number, for each
/// range of distances in tokens from statement to answer. A question is called announced if a story about the name
/// comes directly before it.
fn recalled(trained: &Trained, model: &Llama, words: usize, tokens: u64) -> Result<()> {
    let Trained { config, tokenizer, device, .. } = trained;
    let context = config.model.context;
    let documents = tokens.div_ceil(context as u64);
    let bar = crate::bar(documents, "{bar:30.cyan/blue} {pos}/{len} documents, ETA {eta}");
    let rows =
        recall(model, tokenizer, (context, device), words, documents, &mut |done, _| bar.set_position(done))?;
    bar.finish_and_clear();
    let mut table = String::from("question     distance in tokens   asked   right\n");
    for Recalled { asked, distances, questions, right } in rows.into_iter().filter(|row| row.questions > 0) {
        let asked = match asked {
            QuestionContext::AfterStory => "announced",
            QuestionContext::Suddenly => "unannounced",
        };
        let range = match distances.end {
            usize::MAX => format!("{} and more", distances.start),
            end => format!("{} to {}", distances.start, end - 1),
        };
        let share = 100.0 * right as f64 / questions as f64;
        table += &format!("{asked:<12} {range:<18} {questions:>7} {share:>5.1} %\n");
    }
    print(&table)
}

/// Types of exported weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Exported {
    /// bf16, as in published models
    Bf16,
    /// f32, as trained
    F32,
}

/// Arguments of `export`.
#[derive(Debug, clap::Args)]
pub(super) struct Export {
    /// Folder of a run, or of a checkpoint (RUN/checkpoints/step-N). For a run, the weights at its last validation are
    /// exported
    run: PathBuf,
    /// Folder to create
    #[arg(long, value_name = "DIR")]
    to: PathBuf,
    /// Type of the weights
    #[arg(long, value_enum, default_value_t = Exported::F32)]
    dtype: Exported,
}

impl Export {
    pub(super) fn run(&self) -> Result<()> {
        if !run_folder(&self.run).join("config.toml").exists() {
            return Err(Error::new("not a run that can be exported")
                .got(self.run.display())
                .allowed("the folder of a run or of one of its checkpoints")
                .hint("sage-train export runs/tiny-sagebwd-001 --to hf"));
        }
        let trained = Trained::open(&self.run, DeviceKind::Cpu, Settings::default(), false)?;
        let dtype = if self.dtype == Exported::Bf16 { DType::BF16 } else { DType::F32 };
        let Trained { config, parameters, tokenizer, .. } = &trained;
        let mut model = config.model.clone();
        // A run that ended in its dense stage is exported as a dense model.
        model.sla2 = model.sla2.filter(|_| trained.stage() == Stage::Sparse);
        let kind = hf::ModelType::of(&model)?;
        hf::export(hf::Model { config: &model, parameters, tokenizer }, &self.to, dtype)?;
        if kind == hf::ModelType::Qwen2 && !tokenizer.splits_as_qwen2()? {
            notify(
                "warning: transformers' AutoTokenizer replaces the pre-tokenizer of every Qwen2 model, which changes \
                 the tokens: load this tokenizer with PreTrainedTokenizerFast.from_pretrained",
            );
        }
        print(&format!(
            "{}: {} for transformers{}\n",
            self.to.display(),
            kind.name(),
            match model.sla2 {
                Some(_) =>
                    ", which computes dense attention because it does not support SLA2; --init-from, eval and sample \
                     support it",
                None => "",
            }
        ))
    }
}
