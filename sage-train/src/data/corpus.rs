//! The built-in corpus: documents generated from a grammar. Each document is a pure function of (seed, number).
//!
//! The documents have structure that attention is needed for: names, things and places that recur, quoted
//! speech, ledgers with later questions about their entries, sums, and brackets that must close in order.

use std::collections::BTreeMap;
use std::fmt::Write;

use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde::Deserialize;

const GRAMMAR: &str = built_in!("grammar.toml");

/// A generator of documents.
#[derive(Debug)]
pub struct Corpus {
    grammar: Grammar,
    seed: u64,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Grammar {
    bind: BTreeMap<String, String>,
    words: BTreeMap<String, Vec<String>>,
    sentences: BTreeMap<String, Vec<String>>,
}

/// The words that a document uses for `{hero}` and other placeholders.
type Bound = BTreeMap<String, String>;

impl Corpus {
    /// The corpus of a seed.
    pub fn new(seed: u64) -> Self {
        let grammar = toml::from_str(GRAMMAR).expect("the built-in grammar is tested");
        Self { grammar, seed }
    }

    /// Documents 0, 1, 2, ... with at least `bytes` bytes in total.
    pub fn documents(&self, bytes: u64) -> Vec<String> {
        let mut held = 0;
        (0..)
            .map(|number| self.document(number))
            .take_while(|document| {
                let wanted = held < bytes;
                held += document.len() as u64;
                wanted
            })
            .collect()
    }

    /// Document `number`.
    pub fn document(&self, number: u64) -> String {
        let mut rng = ChaCha8Rng::seed_from_u64(self.seed);
        rng.set_stream(number);
        let bound = self.bind(&mut rng);
        let mut text = self.sentence("opening", &bound, &mut rng);
        let sections = rng.random_range(3..=6);
        for _ in 0..sections {
            text.push('\n');
            match rng.random_range(0..6) {
                0 | 1 => self.paragraph("story", 2..=4, &bound, &mut rng, &mut text),
                2 => self.paragraph("speech", 1..=3, &bound, &mut rng, &mut text),
                3 => self.ledger(&bound, &mut rng, &mut text),
                4 => arithmetic(&mut rng, &mut text),
                _ => brackets(&mut rng, &mut text),
            }
        }
        text.push('\n');
        text += &self.sentence("closing", &bound, &mut rng);
        text.push('\n');
        text
    }

    fn bind(&self, rng: &mut ChaCha8Rng) -> Bound {
        let mut bound = Bound::new();
        for (name, list) in &self.grammar.bind {
            // Each placeholder gets a different word: `hero` and `friend` are never the same.
            let free: Vec<&String> = self.grammar.words[list]
                .iter()
                .filter(|word| bound.values().all(|taken| taken != *word))
                .collect();
            let word = free.choose(rng).expect("lists are longer than the bindings").to_string();
            bound.insert(name.clone(), word);
        }
        let color = self.word("color", rng).to_string();
        let article = if color.starts_with(['a', 'i']) { "an" } else { "a" };
        bound.insert("color_thing".into(), format!("{article} {color} {}", bound["thing"]));
        bound
    }

    fn word(&self, list: &str, rng: &mut ChaCha8Rng) -> &str {
        self.grammar.words[list].choose(rng).expect("no list is empty")
    }

    /// A sentence of a kind, with its placeholders replaced.
    fn sentence(&self, kind: &str, bound: &Bound, rng: &mut ChaCha8Rng) -> String {
        let mut rest = self.grammar.sentences[kind].choose(rng).expect("no kind is empty").as_str();
        let mut out = String::new();
        while let Some((before, after)) = rest.split_once('{') {
            let (name, after) = after.split_once('}').expect("braces of the grammar close");
            out += before;
            out += match bound.get(name) {
                Some(word) => word,
                None => self.word(name, rng),
            };
            rest = after;
        }
        out + rest
    }

    fn paragraph(
        &self,
        kind: &str,
        count: std::ops::RangeInclusive<u32>,
        bound: &Bound,
        rng: &mut ChaCha8Rng,
        text: &mut String,
    ) {
        for n in 0..rng.random_range(count) {
            if n > 0 {
                text.push(' ');
            }
            *text += &self.sentence(kind, bound, rng);
        }
    }

    /// Appends a list of keys with numbers to `text`, and then questions about two of the keys with their answers.
    fn ledger(&self, bound: &Bound, rng: &mut ChaCha8Rng, text: &mut String) {
        let keys: Vec<&String> =
            self.grammar.words["object"].choose_multiple(rng, rng.clone().random_range(3..=5)).collect();
        let entries: Vec<(&String, u32)> =
            keys.into_iter().map(|key| (key, rng.random_range(10..100))).collect();
        let _ = write!(text, "The ledger of {}:", bound["hero"]);
        for (key, value) in &entries {
            let _ = write!(text, " {key} = {value};");
        }
        for (key, value) in entries.choose_multiple(rng, 2) {
            let _ = write!(text, " And the {key}? {value}.");
        }
    }
}

fn arithmetic(rng: &mut ChaCha8Rng, text: &mut String) {
    for n in 0..rng.random_range(2..=4) {
        if n > 0 {
            text.push(' ');
        }
        let (a, b) = (rng.random_range(1..50), rng.random_range(1..50));
        let _ = if rng.random_bool(0.5) {
            write!(text, "{a} + {b} = {};", a + b)
        } else {
            write!(text, "{} - {b} = {a};", a + b)
        };
    }
}

fn brackets(rng: &mut ChaCha8Rng, text: &mut String) {
    let mut open = Vec::new();
    for step in 0..24 {
        let deeper = open.is_empty() || (open.len() < 6 && step < 16 && rng.random_bool(0.55));
        if deeper && step < 16 {
            let (left, right) =
                *[('(', ')'), ('[', ']'), ('{', '}'), ('<', '>')].choose(rng).expect("four kinds");
            text.push(left);
            open.push(right);
        } else if let Some(right) = open.pop() {
            text.push(right);
        }
        text.push(' ');
    }
    text.truncate(text.trim_end().len());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn documents_are_a_function_of_seed_and_number() {
        let corpus = Corpus::new(1);
        assert_eq!(corpus.document(7), Corpus::new(1).document(7));
        assert_ne!(corpus.document(7), corpus.document(8));
        assert_ne!(corpus.document(7), Corpus::new(2).document(7));
        let few = corpus.documents(10_000);
        let many = corpus.documents(100_000);
        assert_eq!(many[..few.len()], few);
        let bytes: usize = many.iter().map(String::len).sum();
        assert!((100_000..105_000).contains(&bytes), "{bytes}");
    }

    #[test]
    fn every_placeholder_is_filled() {
        let corpus = Corpus::new(3);
        for (kind, sentences) in &corpus.grammar.sentences {
            for sentence in sentences {
                for name in sentence.split('{').skip(1).map(|s| s.split('}').next().unwrap_or("")) {
                    let known = name == "color_thing"
                        || corpus.grammar.bind.contains_key(name)
                        || corpus.grammar.words.contains_key(name);
                    assert!(known, "{{{name}}} in a {kind} sentence");
                }
            }
        }
    }

    #[test]
    fn structure_is_real() {
        let corpus = Corpus::new(5);
        let (mut ledgers, mut sums, mut nests) = (0, 0, 0);
        for number in 0..300 {
            for line in corpus.document(number).lines() {
                if let Some((entries, questions)) =
                    line.strip_prefix("The ledger of ").and_then(|l| l.split_once("; And"))
                {
                    for question in questions.split("And").filter(|q| q.contains('?')) {
                        let (key, value) =
                            question.trim().trim_start_matches("the ").split_once("? ").expect("an answer");
                        assert!(
                            entries.contains(&format!("{key} = {}", value.trim_end_matches('.'))),
                            "{line}"
                        );
                        ledgers += 1;
                    }
                }
                for sum in line.split(';').filter(|s| s.contains('+') && s.contains('=')) {
                    let n: Vec<i32> = sum.split_whitespace().filter_map(|w| w.parse().ok()).collect();
                    assert_eq!(n[0] + n[1], n[2], "{line}");
                    sums += 1;
                }
                if line.starts_with(['(', '[', '{', '<']) {
                    let mut open = Vec::new();
                    for c in line.chars().filter(|c| *c != ' ') {
                        match "([{<".find(c) {
                            Some(kind) => open.push(kind),
                            None => assert_eq!(open.pop(), ")]}>".find(c), "{line}"),
                        }
                    }
                    assert!(open.is_empty(), "{line}");
                    nests += 1;
                }
            }
        }
        assert!(ledgers > 100 && sums > 100 && nests > 50, "{ledgers} {sums} {nests}");
    }
}
