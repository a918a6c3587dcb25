//! Multiple-choice tasks: parses the flags, and prints the scores of a model.

use std::path::{Path, PathBuf};

use candle_sage::{Error, Result};
use clap::ValueEnum;

use super::print;
use crate::evaluate::{Choices, Example, Task, choose, read_examples};
use crate::model::Llama;
use crate::notify;
use crate::quantity::counted;
use crate::trained::Trained;

/// Parses a task and its file: `TASK=FILE`.
pub(super) fn task(text: &str) -> Result<(Task, PathBuf)> {
    let known =
        text.split_once('=').and_then(|(task, path)| Some((Task::from_str(task, false).ok()?, path.into())));
    known.ok_or_else(|| {
        let names = Task::value_variants().iter().filter_map(ValueEnum::to_possible_value);
        let names: Vec<String> = names.map(|value| value.get_name().to_owned()).collect();
        Error::new("--task needs a task and its file")
            .got(format!("`{text}`"))
            .allowed(format!("TASK=FILE, with one of the tasks {}", names.join(", ")))
            .hint("--task piqa=piqa.jsonl")
    })
}

pub(super) fn run(tasks: &[(Task, PathBuf)], trained: &Trained, model: &Llama) -> Result<()> {
    tasks.iter().try_for_each(|(task, file)| {
        let examples = task.read(file, &trained.tokenizer)?;
        let choices = choices_of(&examples, file, trained, model)?;
        scores(*task, &choices, &examples)
    })
}

/// Lets a model choose an ending for each example, with a progress bar. Warns of truncated prompts.
fn choices_of(examples: &[Example], file: &Path, trained: &Trained, model: &Llama) -> Result<Choices> {
    let bar = crate::bar(examples.len() as u64, "{bar:30.cyan/blue} {pos}/{len} examples, ETA {eta}");
    let context = trained.config.model.context;
    let choices = choose(model, examples, context, &trained.device, &mut |choices| {
        bar.set_position(choices.examples as u64);
    })?;
    bar.finish_and_clear();
    if choices.cut > 0 {
        notify(&format!(
            "warning: {} of {}: the prompt lost its first tokens, because it did not fit the context of {context}",
            counted(choices.cut as u64, "example"),
            file.display(),
        ));
    }
    Ok(choices)
}

/// The number of correct choices, and its percentage with one standard error.
fn share(right: usize, of: usize) -> String {
    let part = right as f64 / of as f64;
    let deviation = (part * (1.0 - part) / of as f64).sqrt();
    format!("{right} of {of} = {:.2} % +- {:.2}", 100.0 * part, 100.0 * deviation)
}

fn scores(task: Task, choices: &Choices, examples: &[Example]) -> Result<()> {
    let share = |right: usize| share(right, choices.examples);
    let name = task.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned());
    if task == Task::Lambada {
        let perplexity = (choices.loss / choices.examples as f64).exp();
        return print(&format!(
            "{name:<14} last word {} (acc), perplexity {perplexity:.3}\n",
            share(choices.written)
        ));
    }
    let chance: f64 = examples.iter().map(|example| 1.0 / example.endings.len() as f64).sum::<f64>()
        / examples.len() as f64;
    print(&format!(
        "{name:<14} {} (acc), by length {} (acc_norm), chance {:.1} %\n",
        share(choices.right),
        share(choices.by_length),
        100.0 * chance
    ))
}

/// Prints how many endings of llm.c's HellaSwag file a model chooses correctly.
pub(super) fn hellaswag(file: &Path, trained: &Trained, model: &Llama) -> Result<()> {
    let tokenizer = &trained.tokenizer;
    // The file contains GPT-2's token ids, and does not name its tokenizer.
    if (tokenizer.vocab_size(), tokenizer.end_of_text()) != (50_257, 50_256) {
        return Err(Error::new("the HellaSwag file has GPT-2's tokens, but the model has another tokenizer")
            .got(format!("{} entries, end of text {}", tokenizer.vocab_size(), tokenizer.end_of_text()))
            .allowed("GPT-2's tokenizer: 50257 entries, end of text 50256")
            .hint("--task hellaswag=FILE reads JSON lines, for any tokenizer"));
    }
    let choices = choices_of(&read_examples(file)?, file, trained, model)?;
    print(&format!(
        "HellaSwag      {} by loss per token, {} by total loss (acc), chance 25 %\n",
        share(choices.by_length, choices.examples),
        share(choices.right, choices.examples)
    ))
}
