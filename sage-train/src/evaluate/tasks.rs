//! Tasks of lm-evaluation-harness: the questions of its data sets as JSON lines, in the harness's words, without
//! examples before them (0-shot).

use std::path::Path;

use candle_sage::{Error, Result};
use serde_json::Value;

use super::choices::Example;
use crate::data::Tokenizer;

/// A task.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Task {
    /// HellaSwag: which sentence comes next
    #[value(name = "hellaswag")]
    HellaSwag,
    /// ARC-Easy or ARC-Challenge: science questions with three to five answers
    Arc,
    /// PIQA: which of two ways to do something works
    Piqa,
    /// LAMBADA: the last word of a passage; accuracy and perplexity
    Lambada,
}

/// A question in words.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Question {
    context: String,
    /// Each with the space in front of it.
    endings: Vec<String>,
    label: usize,
}

impl Task {
    /// The fields that a line must have.
    fn fields(self) -> &'static str {
        match self {
            Self::HellaSwag => "activity_label, ctx_a, ctx_b, endings, label",
            Self::Arc => "question, choices (text, label), answerKey",
            Self::Piqa => "goal, sol1, sol2, label",
            Self::Lambada => "text",
        }
    }

    /// The question of a line; `None` if the line is not one of this task.
    fn question(self, line: &Value) -> Option<Question> {
        let text = |key: &str| line[key].as_str();
        let asked = |question: &str| format!("Question: {question}\nAnswer:");
        // A label is a number, or a number in quotes.
        let label = || {
            let label = &line["label"];
            label.as_u64().map(|n| n as usize).or_else(|| label.as_str()?.parse().ok())
        };
        let list = |list: &Value| -> Option<Vec<String>> {
            list.as_array()?.iter().map(|item| item.as_str().map(str::to_owned)).collect()
        };
        let (context, endings, label) = match self {
            Self::HellaSwag => {
                let beginning =
                    format!("{}: {} {}", text("activity_label")?, text("ctx_a")?, capital(text("ctx_b")?));
                let endings = list(&line["endings"])?.iter().map(|ending| without_brackets(ending)).collect();
                (without_brackets(&beginning), endings, label()?)
            }
            Self::Arc => {
                let labels = list(&line["choices"]["label"])?;
                let key = text("answerKey")?;
                let label = labels.iter().position(|label| label == key)?;
                (asked(text("question")?), list(&line["choices"]["text"])?, label)
            }
            Self::Piqa => {
                (asked(text("goal")?), vec![text("sol1")?.to_owned(), text("sol2")?.to_owned()], label()?)
            }
            Self::Lambada => {
                let (context, word) = text("text")?.rsplit_once(' ')?;
                (context.to_owned(), vec![word.to_owned()], 0)
            }
        };
        let valid = label < endings.len()
            && !context.is_empty()
            && endings.iter().all(|ending: &String| !ending.is_empty());
        let endings = endings.into_iter().map(|ending| format!(" {ending}")).collect();
        valid.then_some(Question { context, endings, label })
    }

    /// Reads the examples of a file, in the tokens of any tokenizer.
    ///
    /// # Errors
    /// When the file cannot be read, or a line is not one of this task.
    pub fn read(self, path: &Path, tokenizer: &Tokenizer) -> Result<Vec<Example>> {
        let failed = |got: String| {
            Error::new(format!("{} is not a file of this task", path.display()))
                .got(got)
                .allowed(format!("JSON lines with {}", self.fields()))
                .hint("datasets.load_dataset(NAME, split=\"validation\").to_json(FILE) writes them")
        };
        let text = std::fs::read_to_string(path).map_err(|error| failed(error.to_string()))?;
        let mut examples = Vec::new();
        for (n, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
            let value: Value =
                serde_json::from_str(line).map_err(|error| failed(format!("line {}: {error}", n + 1)))?;
            let question =
                self.question(&value).ok_or_else(|| failed(format!("line {} lacks one of them", n + 1)))?;
            let example = tokens_of(&question, tokenizer)?;
            examples
                .push(example.ok_or_else(|| failed(format!("line {} has an ending without tokens", n + 1)))?);
        }
        if examples.is_empty() { Err(failed("no lines".into())) } else { Ok(examples) }
    }
}

/// A question in tokens; `None` if an ending has none. The tokens of an ending are what the whole text has beyond
/// those of the context, because a word and the space before it are one token.
fn tokens_of(question: &Question, tokenizer: &Tokenizer) -> Result<Option<Example>> {
    // Spaces at the context's end belong to the ending, as in the harness.
    let context = question.context.trim_end();
    let spaces = &question.context[context.len()..];
    let before = tokenizer.encode(context)?;
    let tokens = |ending: &String| -> Result<Vec<u32>> {
        let whole = tokenizer.encode(&format!("{context}{spaces}{ending}"))?;
        Ok(whole.get(before.len()..).unwrap_or_default().to_vec())
    };
    let endings = question.endings.iter().map(tokens).collect::<Result<Vec<_>>>()?;
    // The harness counts characters without the space in front.
    let lengths = question.endings.iter().map(|ending| ending.chars().count() - 1).collect();
    let whole = !before.is_empty() && endings.iter().all(|ending| !ending.is_empty());
    Ok(whole.then_some(Example { context: before, endings, lengths, label: question.label }))
}

/// A text with a capital first letter and small others, as Python's `capitalize` makes it.
fn capital(text: &str) -> String {
    let mut letters = text.chars();
    letters.next().map_or_else(String::new, |first| {
        first.to_uppercase().chain(letters.flat_map(char::to_lowercase)).collect()
    })
}

/// A text of HellaSwag without what its sources have in square brackets.
fn without_brackets(text: &str) -> String {
    let text = text.trim().replace(" [title]", ". ");
    let (mut out, mut rest) = (String::new(), text.as_str());
    while let Some((before, after)) = rest.split_once('[') {
        let Some((_, behind)) = after.split_once(']') else { break };
        out += before;
        rest = behind;
    }
    (out + rest).replace("  ", " ")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn questions_have_the_words_of_the_harness() {
        let question = |task: Task, line: Value| task.question(&line).expect("a question");
        let swag = json!({"activity_label": "Roof shingle removal", "ctx_a": "A man is sitting on a roof.", "ctx_b": "he [title] He Looks  up [step] there",
                          "endings": ["is using wrap.", "starts pulling [substeps] up."], "label": "1"});
        let found = question(Task::HellaSwag, swag);
        // `ctx_b` is capitalized before brackets are removed, so that its names lose their capitals.
        assert_eq!(found.context, "Roof shingle removal: A man is sitting on a roof. He. he looks up there");
        assert_eq!(
            (found.endings, found.label),
            (vec![" is using wrap.".to_owned(), " starts pulling up.".to_owned()], 1)
        );
        let arc = json!({"question": "Which is cold?", "choices": {"text": ["ice", "fire"], "label": ["A", "B"]}, "answerKey": "B"});
        let found = question(Task::Arc, arc);
        assert_eq!((found.context.as_str(), found.label), ("Question: Which is cold?\nAnswer:", 1));
        let piqa = question(
            Task::Piqa,
            json!({"goal": "Boil an egg", "sol1": "in water", "sol2": "in sand", "label": 0}),
        );
        assert_eq!(
            (piqa.context.as_str(), piqa.endings[1].as_str()),
            ("Question: Boil an egg\nAnswer:", " in sand")
        );
        let lambada = question(Task::Lambada, json!({"text": "the dog ran after the cat"}));
        assert_eq!(
            (lambada.context.as_str(), lambada.endings.as_slice()),
            ("the dog ran after the", &[" cat".to_owned()][..])
        );
        for (task, line) in [
            (Task::Piqa, json!({"goal": "a", "sol1": "b", "sol2": "c", "label": 2})),
            (
                Task::Arc,
                json!({"question": "a", "choices": {"text": ["b"], "label": ["A"]}, "answerKey": "C"}),
            ),
            (Task::Lambada, json!({"text": "word"})),
            (Task::HellaSwag, json!({"endings": []})),
        ] {
            assert_eq!(task.question(&line), None);
        }
    }

    #[test]
    fn an_ending_begins_with_its_space() -> Result<()> {
        let text = "the quick brown fox and the dog ".repeat(50);
        let tokenizer = Tokenizer::train(std::iter::once(text.as_str()), 300)?;
        let question = Question { context: "the quick ".into(), endings: vec![" fox".into()], label: 0 };
        let example = tokens_of(&question, &tokenizer)?.expect("tokens");
        assert_eq!(tokenizer.decode(&example.context)?, "the quick");
        assert_eq!((tokenizer.decode(&example.endings[0])?, example.lengths), ("  fox".into(), vec![3]));
        Ok(())
    }
}
