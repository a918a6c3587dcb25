//! Measures how often a model recalls facts of [`crate::data::recall`]'s documents, for each range of distances (in
//! tokens) between a fact and the answer to the question about it.

use std::ops::Range;

use candle_core::{D, DType, Device, Tensor};
use candle_sage::Result;

use crate::data::Tokenizer;
use crate::data::recall::{QuestionContext, Recall};
use crate::model::Llama;
use crate::on_device;

/// The number of the first evaluated document. All training documents have smaller numbers.
const FIRST: u64 = 1 << 40;

/// The exclusive ends of the ranges [`Recalled::distances`].
const ENDS: [usize; 9] = [32, 64, 128, 256, 512, 1024, 2048, 4096, usize::MAX];

/// Answers in a range of distances.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Recalled {
    /// The context of the question.
    pub asked: QuestionContext,
    /// Tokens from the fact to the answer.
    pub distances: Range<usize>,
    /// Number of questions.
    pub questions: usize,
    /// Answers in which each token is the model's most likely token.
    pub right: usize,
}

/// An answer. `tokens` is its place in the tokenized document.
struct Answer {
    asked: QuestionContext,
    distance: usize,
    tokens: Range<usize>,
}

/// The first tokens of document `number`, at most `context`, and the answers that are completely within these tokens.
fn tokenize(
    recall: Recall,
    number: u64,
    tokenizer: &Tokenizer,
    context: usize,
) -> Result<(Vec<u32>, Vec<Answer>)> {
    let (mut ids, mut answers, mut ends) = (Vec::new(), Vec::new(), Vec::new());
    for piece in recall.document(number) {
        let start = ids.len();
        ids.extend(tokenizer.encode(&piece.text)?);
        ends.push(ids.len());
        if let Some(question) = piece.question.filter(|_| ids.len() <= context) {
            let distance = start - ends[question.said];
            answers.push(Answer { asked: question.asked, distance, tokens: start..ids.len() });
        }
    }
    ids.truncate(context);
    Ok((ids, answers))
}

/// Asks a model the questions in `documents` documents. Each document has at least `words` words, and the model reads
/// its first `context` tokens. An answer is correct if each token in it is the model's most likely token after the
/// document's preceding tokens.
///
/// # Errors
/// When an id is not in the vocabulary, or the device fails.
pub fn recall(
    model: &Llama,
    tokenizer: &Tokenizer,
    (context, device): (usize, &Device),
    words: usize,
    documents: u64,
    seen: &mut dyn FnMut(u64, u64),
) -> Result<Vec<Recalled>> {
    let mut rows: Vec<Recalled> = [QuestionContext::AfterStory, QuestionContext::Suddenly]
        .into_iter()
        .flat_map(|asked| {
            let starts = std::iter::once(0).chain(ENDS);
            starts.zip(ENDS).map(move |(start, end)| Recalled {
                asked,
                distances: start..end,
                questions: 0,
                right: 0,
            })
        })
        .collect();
    let task = Recall { words, seed: 0 };
    for number in 0..documents {
        let (ids, answers) = tokenize(task, FIRST + number, tokenizer, context)?;
        let right = likeliest(model, &ids, &answers, device)
            .map_err(on_device("cannot answer the questions of --recall"))?;
        for (answer, right) in answers.iter().zip(right) {
            let row = rows
                .iter_mut()
                .find(|row| row.asked == answer.asked && row.distances.contains(&answer.distance));
            let row = row.expect("the ranges hold every distance");
            row.questions += 1;
            row.right += usize::from(right);
        }
        seen(number + 1, documents);
    }
    Ok(rows)
}

/// For each answer: whether the model ranks each of its tokens first, given all tokens before that token.
fn likeliest(
    model: &Llama,
    ids: &[u32],
    answers: &[Answer],
    device: &Device,
) -> candle_core::Result<Vec<bool>> {
    if answers.is_empty() {
        return Ok(Vec::new());
    }
    // A token is predicted at the position before it.
    let places: Vec<u32> =
        answers.iter().flat_map(|answer| answer.tokens.clone()).map(|at| at as u32 - 1).collect();
    let hidden = model.hidden(&Tensor::new(ids, device)?.unsqueeze(0)?)?;
    let hidden = hidden.index_select(&Tensor::new(places, device)?, 0)?;
    let logits = model.logits(&hidden)?.to_dtype(DType::F32)?;
    let mut predicted = logits.argmax(D::Minus1)?.to_vec1::<u32>()?.into_iter();
    Ok(answers
        .iter()
        .map(|answer| {
            let said: Vec<u32> = predicted.by_ref().take(answer.tokens.len()).collect();
            said == ids[answer.tokens.clone()]
        })
        .collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::recall::text;

    /// Tokenizing a text in pieces gives the tokens of the whole text. The tokens of an answer also occur earlier: this
    /// earlier occurrence ends `distance` tokens before the answer begins.
    #[test]
    fn answers_are_found_among_the_tokens() -> Result<()> {
        let task = Recall { words: 600, seed: 0 };
        let texts: Vec<String> = (0..40).map(|number| text(&task.document(number))).collect();
        let tokenizer = Tokenizer::train(texts.iter().map(String::as_str), 600)?;
        for (number, whole) in texts.iter().enumerate() {
            let (ids, answers) = tokenize(task, number as u64, &tokenizer, usize::MAX)?;
            assert_eq!(ids, tokenizer.encode(whole)?);
            for answer in &answers {
                let end = answer.tokens.start - answer.distance;
                let said = end - answer.tokens.len()..end;
                assert_eq!(ids[said], ids[answer.tokens.clone()]);
            }
            let (cut, fewer) = tokenize(task, number as u64, &tokenizer, 200)?;
            assert_eq!(cut, ids[..200]);
            assert!(fewer.iter().all(|answer| answer.tokens.end <= 200));
        }
        Ok(())
    }
}
