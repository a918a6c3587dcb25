//! Documents with questions about facts that were stated much earlier. Each document is a pure function of the seed and
//! the document's index.
//!
//! Every name of a document has a number, stated in notes such as `Note: Bara 42, Kelo 17.` The number follows the name
//! directly, so that a model need not first learn which words of a sentence belong together. A document is a sequence
//! of paragraphs:
//!
//! - a *beginning* states a name's number, and continues with a story that has the name in each of its sentences;
//! - a *return* is a story about an earlier name, and ends with its number ([`QuestionContext::AfterStory`]);
//! - *questions* are a note with several earlier names and their numbers, which are the answers. No story precedes the
//!   note ([`QuestionContext::Suddenly`]);
//! - a *roll* is a note that lists names with numbers, and then lists them again in another order. No other paragraph
//!   uses the names of rolls.
//!
//! For each question a number of paragraphs is drawn: uniformly in half of the cases, and log-uniformly in the other
//! half. The question is about a name whose number was last stated about that many paragraphs ago. Half of the names
//! are asked for often, in *questions* paragraphs, so that the distances are short: the model learns short distances
//! first. The other names are asked for seldom, in *return* paragraphs and as the last name of a *questions* paragraph,
//! so that some distances are long.

use rand::seq::{IndexedRandom, SliceRandom};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

const SYLLABLES: [&str; 16] =
    ["ba", "ce", "do", "fi", "gu", "ha", "ke", "lo", "mi", "nu", "ra", "se", "to", "vi", "wu", "ze"];

/// Number of names. Names are few, and have only two syllables, so that each name is one token of a tokenizer that is
/// trained on the documents.
const NAMES: usize = 256;

/// Number of names that appear only in *roll* paragraphs. Such a name has a new number in each roll that contains it.
/// Every other name has only one number in a document.
const ROLL_NAMES: usize = 64;

/// Number of names in a roll.
const ROLL: usize = 8;

/// Largest number of questions in a *questions* paragraph.
const QUESTIONS: usize = 8;

/// The range from which a name's number is drawn.
const NUMBERS: std::ops::Range<u32> = 10..100;

const STORIES: [&str; 12] = [
    "In the morning {} walked down to the river.",
    "Nobody had seen {} at the market that week.",
    "Then {} mended the roof before the rain came.",
    "The letters of {} lay unopened on the table.",
    "After dark {} lit a lamp and read for a while.",
    "Some said that {} had once lived by the sea.",
    "A dog followed {} over the bridge and back.",
    "The neighbours asked {} for bread and for news.",
    "When winter ended {} opened all the windows.",
    "For an hour {} listened to the old clock.",
    "Under the mill {} found a key without a lock.",
    "In the evening {} counted the boats again.",
];

/// The context in which a number is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum QuestionContext {
    /// After a story about the name whose number is asked for.
    AfterStory,
    /// Without such a story.
    Suddenly,
}

/// A number that is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Question {
    /// The context of the question.
    pub asked: QuestionContext,
    /// Index of the piece that stated the number.
    pub said: usize,
}

/// A piece of a document. A piece begins and ends where tokenizers split: at spaces, line ends and punctuation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Piece {
    /// The text.
    pub text: String,
    /// Set if the piece is the answer to a question.
    pub question: Option<Question>,
}

/// A generator of documents.
#[derive(Debug, Clone, Copy)]
pub struct Recall {
    /// Smallest number of words of a document.
    pub words: usize,
    /// Seed of the documents.
    pub seed: u64,
}

fn name(index: usize) -> String {
    let syllable = |n: usize| SYLLABLES[n % SYLLABLES.len()];
    let name = format!("{}{}", syllable(index / SYLLABLES.len()), syllable(index));
    let (first, rest) = name.split_at(1);
    first.to_uppercase() + rest
}

/// A name with its number.
struct StatedNumber {
    name: String,
    number: u32,
    /// Index of the [`Piece`] that last stated the number.
    said: usize,
    paragraph: usize,
    often: bool,
}

/// A document that is being generated.
struct Draft {
    pieces: Vec<Piece>,
    words: usize,
    /// Names that only rolls use.
    rolled: Vec<String>,
    /// Names that have no number yet.
    unused: Vec<String>,
    known: Vec<StatedNumber>,
    paragraphs: usize,
}

impl Draft {
    fn push(&mut self, text: String) {
        // A comma counts as part of the word before it.
        self.words += text.split_whitespace().filter(|word| *word != ",").count();
        self.pieces.push(Piece { text, question: None });
    }

    /// Adds the text `before`, the name and its number. Returns the index of the piece that contains the number.
    fn state(&mut self, before: &str, name: &str, number: u32, question: Option<Question>) -> usize {
        self.push(format!("{before} {name}"));
        let index = self.pieces.len();
        self.push(format!(" {number}"));
        self.pieces[index].question = question;
        index
    }

    /// Ends a note.
    fn stop(&mut self) {
        // The period does not count as a word.
        self.pieces.push(Piece { text: ".".into(), question: None });
    }

    fn story(&mut self, name: &str, words: usize, rng: &mut ChaCha8Rng) {
        let until = self.words + words;
        while self.words < until {
            let sentence = STORIES.choose(rng).expect("there are some").replace("{}", name);
            self.push(format!(" {sentence}"));
        }
    }

    /// Draws a distance in paragraphs, uniformly or log-uniformly. Returns the index of a name whose number was last
    /// stated about this distance ago. Considers only names whose field `often` equals the argument.
    fn draw(&self, often: bool, rng: &mut ChaCha8Rng) -> Option<usize> {
        let (most, part) = (self.paragraphs.max(2) as f64, rng.random::<f64>());
        let wanted = if rng.random_bool(0.5) { most * part } else { most.powf(part) } as usize;
        let distance = |n: &usize| self.paragraphs - self.known[*n].paragraph;
        (0..self.known.len())
            .filter(|n| self.known[*n].often == often && distance(n) > 0)
            .min_by_key(|n| distance(n).abs_diff(wanted))
    }

    /// Asks for the number of `known[n]`: adds the text `before`, the name and, as the answer, the number.
    fn ask(&mut self, n: usize, before: &str, asked: QuestionContext) {
        let StatedNumber { name, number, said, .. } = &self.known[n];
        let (name, number, said) = (name.clone(), *number, *said);
        let said = self.state(before, &name, number, Some(Question { asked, said }));
        (self.known[n].said, self.known[n].paragraph) = (said, self.paragraphs);
    }
}

impl Recall {
    /// Number of words in the story of a *return* paragraph. The story of a *beginning* paragraph has half as many.
    fn story_words(self) -> usize {
        (self.words / 40).max(8)
    }

    /// Document `number`.
    pub fn document(self, number: u64) -> Vec<Piece> {
        let mut rng = ChaCha8Rng::seed_from_u64(self.seed);
        rng.set_stream(number);
        let mut unused: Vec<String> = (0..NAMES).map(name).collect();
        unused.shuffle(&mut rng);
        let rolled = unused.split_off(NAMES - ROLL_NAMES);
        let mut draft =
            Draft { pieces: Vec::new(), words: 0, rolled, unused, known: Vec::new(), paragraphs: 0 };
        while draft.words < self.words {
            if self.paragraph(&mut draft, &mut rng).is_none() {
                break;
            }
            draft.paragraphs += 1;
            draft.push("\n".into());
        }
        draft.pieces
    }

    /// Adds a paragraph; `None` when all names are used up.
    fn paragraph(self, draft: &mut Draft, rng: &mut ChaCha8Rng) -> Option<()> {
        let kind = rng.random_range(0..12);
        match (kind, draft.draw(kind >= 2, rng)) {
            (0..2, Some(n)) => {
                let name = draft.known[n].name.clone();
                draft.push(format!("{name} again."));
                draft.story(&name, self.story_words(), rng);
                draft.ask(n, " So note:", QuestionContext::AfterStory);
                draft.stop();
            }
            (2..6, Some(first)) => {
                draft.ask(first, "Note:", QuestionContext::Suddenly);
                for question in 1..QUESTIONS {
                    if let Some(n) = draft.draw(question + 1 < QUESTIONS, rng) {
                        draft.ask(n, ",", QuestionContext::Suddenly);
                    }
                }
                draft.stop();
            }
            (6..8, _) => {
                let names: Vec<String> = draft.rolled.choose_multiple(rng, ROLL).cloned().collect();
                let mut roll: Vec<(String, u32)> =
                    names.into_iter().map(|name| (name, rng.random_range(NUMBERS))).collect();
                for round in 0..2 {
                    for (n, (name, number)) in roll.iter().enumerate() {
                        let before = if round + n == 0 { "Note:" } else { "," };
                        draft.state(before, name, *number, None);
                    }
                    roll.shuffle(rng);
                }
                draft.stop();
            }
            _ => {
                let (name, number) = (draft.unused.pop()?, rng.random_range(NUMBERS));
                let said = draft.state("Note:", &name, number, None);
                draft.stop();
                draft.story(&name, self.story_words() / 2, rng);
                let often = draft.known.len().is_multiple_of(2);
                draft.known.push(StatedNumber { name, number, said, paragraph: draft.paragraphs, often });
            }
        }
        Some(())
    }
}

/// The text of a document.
pub fn text(pieces: &[Piece]) -> String {
    pieces.iter().map(|piece| piece.text.as_str()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_answer_was_stated_and_distances_are_spread() {
        let recall = Recall { words: 4000, seed: 3 };
        let mut far = [0; 2];
        for number in 0..50 {
            let pieces = recall.document(number);
            assert_eq!(pieces, recall.document(number));
            assert!(text(&pieces).split_whitespace().count() >= 4000);
            let name = |index: usize| {
                let last = pieces[index - 1].text.split(' ').next_back().expect("a name");
                last.to_owned()
            };
            let mut said = std::collections::BTreeSet::new();
            for (index, piece) in pieces.iter().enumerate() {
                let Some(question) = piece.question else { continue };
                assert!(question.said < index && said.insert(question.said), "asked once, and later");
                assert_eq!(pieces[question.said].text, piece.text);
                assert_eq!(name(question.said), name(index));
                far[usize::from(index - question.said > pieces.len() / 4)] += 1;
            }
        }
        assert!(far.iter().all(|&count| count > 300), "{far:?}");
        assert_ne!(recall.document(1), recall.document(2));
    }

    #[test]
    fn names_differ() {
        let names: std::collections::BTreeSet<_> = (0..NAMES).map(name).collect();
        assert_eq!(names.len(), NAMES);
    }
}
