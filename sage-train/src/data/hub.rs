//! Files of the Hugging Face Hub. They are kept in the cache of the hub's official library (`HF_HOME`), so that no file
//! is downloaded twice. `HF_ENDPOINT` names another server; `HF_TOKEN` or a stored login gives access to gated data.

#[cfg(feature = "hub")]
mod client;
#[cfg(not(feature = "hub"))]
#[path = "hub/no_client.rs"]
mod client;

use candle_sage::{Error, Result};
pub use client::Hub;
use serde::Deserialize;

const RECIPES: [(&str, &str); 3] = [
    ("tinystories", built_in!("recipes/tinystories.toml")),
    ("openwebtext", built_in!("recipes/openwebtext.toml")),
    ("fineweb-edu", built_in!("recipes/fineweb-edu.toml")),
];

/// A data set with a short name.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct Recipe {
    /// Description of the data set.
    pub about: String,
    /// Name on the hub.
    pub dataset: String,
    /// Pattern of the data set's files.
    pub files: String,
    /// Column of the text.
    pub text_field: String,
    /// Size as text.
    pub size: String,
    /// Licence.
    pub licence: String,
}

/// All recipes with their names.
pub fn recipes() -> impl Iterator<Item = (&'static str, Recipe)> {
    RECIPES.into_iter().map(|(name, text)| (name, toml::from_str(text).expect("recipes are tested")))
}

/// The recipe whose name is most similar to `name`, if one is similar.
pub(super) fn nearest(name: &str) -> Option<&'static str> {
    let near = recipes().map(|(recipe, _)| (strsim::jaro_winkler(name, recipe), recipe));
    near.filter(|(near, _)| *near > 0.8).max_by(|a, b| a.0.total_cmp(&b.0)).map(|(_, recipe)| recipe)
}

/// The data set that `hf:OWNER/NAME`, `hf:OWNER/NAME:PATTERN` or the name of a recipe stands for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Named {
    /// Name of the data set on the hub.
    pub dataset: String,
    /// Pattern of the data set's files.
    pub pattern: String,
    /// Column that contains the text; `None` for a name that begins with `hf:`.
    pub text_field: Option<String>,
}

impl Named {
    /// Parses a name; `None` if it is a path.
    ///
    /// # Errors
    /// When the text begins with `hf:` but is not a valid name.
    pub fn parse(text: &str) -> Result<Option<Self>> {
        if let Some((_, recipe)) = recipes().find(|(name, _)| *name == text) {
            let Recipe { dataset, files, text_field, .. } = recipe;
            return Ok(Some(Self { dataset, pattern: files, text_field: Some(text_field) }));
        }
        let Some(rest) = text.strip_prefix("hf:") else { return Ok(None) };
        let (dataset, pattern) = rest.split_once(':').unwrap_or((rest, "**/*.parquet"));
        check_name(dataset)?;
        Ok(Some(Self { dataset: dataset.into(), pattern: pattern.into(), text_field: None }))
    }
}

/// Checks the name of a model or data set, OWNER/NAME. Names become parts of paths, so only letters, digits, `-`, `_`
/// and `.` are allowed.
fn check_name(name: &str) -> Result<()> {
    let part = |part: &str| {
        !part.is_empty()
            && !part.starts_with('.')
            && part.chars().all(|c| c.is_ascii_alphanumeric() || ['-', '_', '.'].contains(&c))
    };
    let parts: Vec<&str> = name.split('/').collect();
    if parts.len() == 2 && parts.into_iter().all(part) && !name.contains("..") {
        return Ok(());
    }
    Err(Error::new("not a valid name for the Hugging Face Hub")
        .got(format!("`{name}`"))
        .allowed("OWNER/NAME of letters, digits, `-`, `_` and `.`")
        .hint(
            "a data set: hf:roneneldan/TinyStories, or a name that `sage-train data recipes` lists; a tokenizer: \
             openai-community/gpt2",
        ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_names() -> Result<()> {
        assert_eq!(Named::parse("books/*.txt")?, None);
        let stories = Named::parse("tinystories")?.expect("a recipe");
        assert_eq!(stories.dataset, "roneneldan/TinyStories");
        let named = Named::parse("hf:a-b/c.d:x/*.jsonl.gz")?.expect("a name");
        assert_eq!((named.dataset.as_str(), named.pattern.as_str()), ("a-b/c.d", "x/*.jsonl.gz"));
        for bad in ["hf:", "hf:a", "hf:a/b/c", "hf:../x", "hf:a/..", "hf:a/b?x", "hf:/etc/passwd", "hf:a/.b"]
        {
            assert!(Named::parse(bad).is_err(), "{bad}");
        }
        Ok(())
    }

    #[test]
    fn recipes_are_whole() -> Result<()> {
        for (name, recipe) in recipes() {
            check_name(&recipe.dataset)?;
            assert!(glob::Pattern::new(&recipe.files).is_ok(), "{name}");
        }
        Ok(())
    }
}
