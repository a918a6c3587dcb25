//! Finds wording that makes readers stop, in pages, comments, messages and help texts: phrases of [`RULES`], and
//! sentences of more than [`LONGEST`] words in pages and comments.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use regex::Regex;

/// In words.
const LONGEST: usize = 40;

struct Rule {
    /// A regular expression that ignores case.
    phrase: &'static str,
    /// Matches that are acceptable.
    except: &'static str,
    instead: &'static str,
}

const RULES: &[Rule] = &[
    Rule { phrase: r"\b(is|are|was|were) none\b", except: "^$", instead: "the noun: \"is not a setting\"" },
    Rule {
        phrase: r"\b(there )?(is|are|was|were) no [a-z]+",
        except: "^there |(longer|more|less|need|way|difference|effect|such|reason|evidence)$",
        instead: "\"without ..\", \"is not a ..\" or \"has no ..\"",
    },
    Rule {
        phrase: r"\b(pays?|paid|brings?|brought)\b",
        except: "^$",
        instead: "the metric, its unit and the baseline",
    },
    Rule {
        phrase: r"\b(kind to|owes?|(is|are) gone|born|(is|are) told|in words|looks? ahead|dealt out|at hand)\b",
        except: "^$",
        instead: "what the system does: exited, is sent, is stored, fixed",
    },
    Rule {
        phrase: r"\b(of (its|their) own|anew|goes on|go on|went on|in the place of|besides)\b",
        except: "^$",
        instead: "separate, again, continues, instead of",
    },
    Rule {
        phrase: r"\b(since then|older build|not (measured|run) again|formerly|once was)\b",
        except: "^$",
        instead: "delete the old figure, or measure it again",
    },
    Rule {
        phrase: r"\b(those|that) of (any|all|the other|others|it|them)\b",
        except: "^$",
        instead: "the noun itself",
    },
];

/// A message for each problem in the files that git tracks below `root`.
pub(crate) fn problems(root: &Path) -> Result<Vec<String>> {
    let listed =
        Command::new("git").arg("-C").arg(root).arg("ls-files").output().context("cannot run git")?;
    ensure!(listed.status.success(), "git ls-files: {}", String::from_utf8_lossy(&listed.stderr));
    let check = Check::new()?;
    let mut problems = Vec::new();
    for name in String::from_utf8(listed.stdout)?.lines().filter(|name| *name != file!()) {
        let Ok(text) = std::fs::read_to_string(root.join(name)) else { continue };
        for (at, paragraph) in paragraphs(name, &text) {
            let found = check.problems(&paragraph).into_iter();
            problems.extend(found.map(|problem| format!("{name}:{at}: {problem}")));
        }
    }
    Ok(problems)
}

/// A page's paragraphs, or a source file's comments and lines with strings, each with the number of its first line.
fn paragraphs(name: &str, text: &str) -> Vec<(usize, String)> {
    let extension = name.rsplit('.').next().unwrap_or_default();
    let (mut paragraphs, mut is_code, mut is_open) = (Vec::<(usize, String)>::new(), false, false);
    for (at, line) in (1..).zip(text.lines()) {
        let line = line.trim();
        let prose = match extension {
            "md" => line,
            "rs" | "cu" | "cuh" | "h" | "cc" | "def" => match line.split_once("//") {
                Some((_, comment)) => comment.trim_start_matches(['/', '!']),
                // Only strings have words that a user sees.
                None if line.contains('"') => line,
                None => "",
            },
            "toml" if line.contains('"') && !line.starts_with('#') => line,
            "py" | "toml" | "yml" | "sh" => line.strip_prefix('#').unwrap_or_default(),
            _ => "",
        };
        let is_command = prose.starts_with("   ");
        let prose = prose.trim_start();
        is_code ^= prose.starts_with("```");
        if is_code || is_command || prose.is_empty() || prose.starts_with("```") {
            is_open = false;
            continue;
        }
        let is_whole =
            prose.starts_with(['|', '#', '<']) || extension != "md" && !line.starts_with(['/', '#']);
        match paragraphs.last_mut() {
            Some((_, paragraph)) if is_open && !is_whole && !prose.starts_with("- ") => {
                *paragraph += &format!(" {prose}");
            }
            _ => paragraphs.push((at, prose.to_owned())),
        }
        is_open = !is_whole;
    }
    paragraphs
}

/// The compiled rules.
struct Check {
    rules: Vec<(Regex, Regex, &'static str)>,
    /// Matches code, links and addresses, which are not checked.
    code: Regex,
    end_of_sentence: Regex,
}

impl Check {
    fn new() -> Result<Self> {
        let ignoring_case = |pattern: &str| Regex::new(&format!("(?i){pattern}"));
        let compile =
            |rule: &Rule| Ok((ignoring_case(rule.phrase)?, ignoring_case(rule.except)?, rule.instead));
        Ok(Self {
            rules: RULES.iter().map(compile).collect::<Result<_>>()?,
            code: Regex::new(r"`[^`]*`|\]\([^)]*\)|https?://\S+")?,
            end_of_sentence: Regex::new(r"[.!?:;]\s")?,
        })
    }

    fn problems(&self, paragraph: &str) -> Vec<String> {
        let plain = self.code.replace_all(paragraph, "x");
        let phrases = self.rules.iter().flat_map(|(phrase, except, instead)| {
            let found =
                phrase.find_iter(&plain).map(|found| found.as_str()).filter(|found| !except.is_match(found));
            found.map(move |found| format!("\"{found}\"\n  hint:    {instead}"))
        });
        let is_row = paragraph.starts_with('|');
        let sentences = self.end_of_sentence.split(if is_row { "" } else { &plain }).filter_map(|sentence| {
            let words = sentence.split_whitespace().filter(|word| word.contains(char::is_alphabetic)).count();
            let start = sentence.chars().take(60).collect::<String>();
            (words > LONGEST)
                .then(|| format!("a sentence of {words} words: {start}..\n  allowed: {LONGEST} words"))
        });
        phrases.chain(sentences).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(name: &str, text: &str) -> Vec<(usize, String)> {
        let check = Check::new().expect("rules");
        let paragraphs = paragraphs(name, text).into_iter();
        let first_line = |problem: String| problem.lines().next().unwrap_or_default().to_owned();
        let found = |(at, text): (usize, String)| {
            check.problems(&text).into_iter().map(move |problem| (at, first_line(problem)))
        };
        paragraphs.flat_map(found).collect()
    }

    #[test]
    fn phrases_are_found_in_pages_comments_and_messages_but_not_in_code() {
        let expected = |at| vec![(at, "\"is no setting\"".to_owned())];
        assert_eq!(found("a.md", "# Title\n\nA key that\nis no setting\n"), expected(3));
        assert_eq!(found("a.rs", "let x = 1;\n// A key\n// is no setting.\n"), expected(2));
        assert_eq!(found("a.rs", "Error::new(\"the key is no setting\")"), expected(1));
        assert_eq!(found("a.sh", "true\n# is no setting\n"), expected(2));
        for (name, text) in [
            ("a.md", "```\nis no setting\n```\n`is no setting`, [x](is no setting)"),
            ("a.rs", "/// ```\n/// is no setting\n/// ```\n/// There is no setting."),
            ("a.rs", "is_no_setting(is no setting)"),
            ("a.toml", "#   a command is no setting"),
            ("a.csv", "is no setting"),
        ] {
            assert_eq!(found(name, text), [], "{name}: {text}");
        }
    }

    #[test]
    fn long_sentences_are_found_across_lines_but_not_in_rows() {
        let half = "word ".repeat(LONGEST / 2) + "word";
        assert_eq!(found("a.md", &format!("Short.\n{half}\n{half}."))[0].0, 1);
        assert_eq!(found("a.md", &format!("A \"quoted\" {half}\n{half}."))[0].0, 1);
        assert_eq!(found("a.md", &format!("{half}.\n{half}.")), []);
        assert_eq!(found("a.md", &format!("| {half} | {half} |")), []);
        assert_eq!(found("a.rs", &format!("a(); // {half}\nb(); // {half}")), []);
    }
}
