//! Tasks of lm-evaluation-harness: reads the questions of its data sets from JSON lines, and makes the harness's 0-shot
//! prompts.

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

/// A question as text.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Question {
    context: String,
    /// The possible continuations of `context`. Each begins with a space.
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

    /// The question of a line; `None` if the line lacks a field of this task.
    fn question(self, line: &Value) -> Option<Question> {
        let text = |key: &str| line[key].as_str();
        let asked = |question: &str| format!("Question: {question}\nAnswer:");
        // A label is a number, or a number in quotes. The labels of test splits, -1 or "", become `usize::MAX`.
        let label = || {
            let label = &line["label"];
            let number = label.as_i64().or_else(|| label.as_str().map(|text| text.parse().unwrap_or(-1)));
            number.map(|number| usize::try_from(number).unwrap_or(usize::MAX))
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
                let label = labels.iter().position(|label| label == key).unwrap_or(usize::MAX);
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
        let endings = endings.into_iter().map(|ending: String| format!(" {ending}")).collect();
        Some(Question { context, endings, label })
    }

    /// Makes an [`Example`] from a line, or says what is wrong with the line.
    fn example(self, line: &str, tokenizer: &Tokenizer) -> Result<std::result::Result<Example, String>> {
        let value: Value = match serde_json::from_str(line) {
            Ok(value) => value,
            Err(error) => return Ok(Err(error.to_string())),
        };
        let Some(question) = self.question(&value) else { return Ok(Err("a field is missing".into())) };
        if question.label >= question.endings.len() {
            return Ok(Err("no ending is labelled as correct, as in a test split without answers".into()));
        }
        if question.endings.iter().any(|ending| ending.trim().is_empty()) {
            return Ok(Err("an ending is empty".into()));
        }
        let example = tokens_of(&question, tokenizer)?;
        Ok(match (example.context.is_empty(), example.endings.iter().any(Vec::is_empty)) {
            (true, _) => Err("the text before the endings has no tokens".into()),
            (_, true) => Err("an ending has no tokens".into()),
            _ => Ok(example),
        })
    }

    /// Reads and tokenizes the examples of a file.
    ///
    /// # Errors
    /// When the file cannot be read, or a line does not belong to this task.
    pub fn read(self, path: &Path, tokenizer: &Tokenizer) -> Result<Vec<Example>> {
        let failed = |got: String| {
            Error::new(format!("cannot use {} for its --task", path.display()))
                .got(got)
                .allowed(format!("JSON lines with {}", self.fields()))
                .hint("datasets.load_dataset(NAME, split=\"validation\").to_json(FILE) writes such lines in Python")
        };
        let text = std::fs::read_to_string(path).map_err(|error| failed(error.to_string()))?;
        let mut examples = Vec::new();
        for (n, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
            let example = self.example(line, tokenizer)?;
            examples.push(example.map_err(|why| failed(format!("line {}: {why}", n + 1)))?);
        }
        if examples.is_empty() { Err(failed("no lines".into())) } else { Ok(examples) }
    }
}

/// A question in tokens. An ending is encoded together with the context, because a word and the space before it are
/// one token. The ending's tokens are those after the context's tokens.
fn tokens_of(question: &Question, tokenizer: &Tokenizer) -> Result<Example> {
    // Spaces at the context's end belong to the ending, as in lm-evaluation-harness.
    let context = question.context.trim_end();
    let spaces = &question.context[context.len()..];
    let before = tokenizer.encode(context)?;
    let tokens = |ending: &String| -> Result<Vec<u32>> {
        let whole = tokenizer.encode(&format!("{context}{spaces}{ending}"))?;
        Ok(whole.get(before.len()..).unwrap_or_default().to_vec())
    };
    let endings = question.endings.iter().map(tokens).collect::<Result<Vec<_>>>()?;
    // As in lm-evaluation-harness, an ending's length excludes the space that the ending begins with.
    let lengths = question.endings.iter().map(|ending| ending.chars().count() - 1).collect();
    Ok(Example { context: before, endings, lengths, label: question.label })
}

/// A text with an upper-case first letter and lower-case others, as from Python's `capitalize`.
fn capital(text: &str) -> String {
    let mut letters = text.chars();
    letters.next().map_or_else(String::new, |first| {
        first.to_uppercase().chain(letters.flat_map(char::to_lowercase)).collect()
    })
}

/// A text of HellaSwag without the tags in square brackets.
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
    fn questions_have_the_text_of_the_harness() {
        let question = |task: Task, line: Value| task.question(&line).expect("a question");
        let swag = json!({"activity_label": "Roof shingle removal", "ctx_a": "A man is sitting on a roof.", "ctx_b": "he [title] He Looks  up [step] there",
                          "endings": ["is using wrap.", "starts pulling [substeps] up."], "label": "1"});
        let found = question(Task::HellaSwag, swag);
        // After its first letter, `ctx_b` becomes lower-case. Then `[title]` becomes a period, and `[step]` is removed.
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
    }

    #[test]
    fn an_error_in_a_line_names_the_problem() -> Result<()> {
        let text = "the quick brown fox and the dog ".repeat(50);
        let tokenizer = Tokenizer::train(std::iter::once(text.as_str()), 300)?;
        let piqa = |label: Value| json!({"goal": "a", "sol1": "b", "sol2": "c", "label": label});
        let arc = json!({"question": "a", "choices": {"text": ["b"], "label": ["A"]}, "answerKey": "C"});
        for (task, line, why) in [
            (Task::Piqa, piqa(json!(2)), "no ending is labelled"),
            (Task::Piqa, piqa(json!(-1)), "no ending is labelled"),
            (Task::Piqa, piqa(json!("")), "no ending is labelled"),
            (Task::Piqa, piqa(json!(null)), "a field is missing"),
            (Task::Arc, arc, "no ending is labelled"),
            (Task::Lambada, json!({"text": "word"}), "a field is missing"),
            (Task::Lambada, json!({"text": " word"}), "has no tokens"),
            (Task::HellaSwag, json!({"endings": []}), "a field is missing"),
            (Task::Piqa, json!({"goal": "a", "sol1": "", "sol2": "c", "label": 0}), "an ending is empty"),
            (Task::Lambada, json!({"text": "the dog ran "}), "an ending is empty"),
        ] {
            let found = task.example(&line.to_string(), &tokenizer)?.expect_err("a bad line");
            assert!(found.contains(why), "{task:?} {line}: {found}");
        }
        Ok(())
    }

    #[test]
    fn an_ending_begins_with_its_space() -> Result<()> {
        let text = "the quick brown fox and the dog ".repeat(50);
        let tokenizer = Tokenizer::train(std::iter::once(text.as_str()), 300)?;
        let question = Question { context: "the quick ".into(), endings: vec![" fox".into()], label: 0 };
        let example = tokens_of(&question, &tokenizer)?;
        assert_eq!(tokenizer.decode(&example.context)?, "the quick");
        assert_eq!((tokenizer.decode(&example.endings[0])?, example.lengths), ("  fox".into(), vec![3]));
        Ok(())
    }
}
