//! The client of the Hugging Face Hub.

use std::ffi::OsString;
use std::path::{Component, Path, PathBuf};

use candle_sage::{Error, Result};
use hf_hub::api::sync::{Api, ApiBuilder, ApiRepo};
use hf_hub::{Cache, Repo};

use super::{Named, check_name};
use crate::data::TOKENIZER_CONFIG;
use crate::quantity::counted;
use crate::{AnyError, bar, notify, unpanicked};

/// Number of attempts to continue an interrupted download.
const RETRIES: usize = 3;

/// A client of the hub, with its cache.
#[derive(Debug)]
pub struct Hub {
    api: Api,
    cache: Cache,
}

/// Whether requests to the hub are disabled.
fn offline() -> bool {
    std::env::var("HF_HUB_OFFLINE").is_ok_and(|value| !["", "0"].contains(&value.as_str()))
}

impl Hub {
    /// A client with cache, server and token from the environment.
    ///
    /// # Errors
    /// When the cache's folder is unknown, or the client cannot be built.
    pub fn open() -> Result<Self> {
        // An empty variable counts as not set.
        let variable = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty());
        let text = |name: &str| variable(name).and_then(|value| value.into_string().ok());
        let cache = Cache::new(cache_folder(variable)?);
        let mut builder = ApiBuilder::from_cache(cache.clone()).with_retries(RETRIES).with_progress(false);
        if let Some(endpoint) = text("HF_ENDPOINT") {
            builder = builder.with_endpoint(endpoint);
        }
        // `hf auth login` writes the token to the hub's home folder, even if the cache is elsewhere.
        let login = || std::fs::read_to_string(home_folder(variable)?.join("token")).ok();
        let token = text("HF_TOKEN").or_else(login).map(|token| token.trim().to_owned());
        if let Some(token) = token.filter(|token| !token.is_empty()) {
            builder = builder.with_token(Some(token));
        }
        let api = unpanicked(|| builder.build()).map_err(failed("anything from the hub"))?;
        Ok(Self { api, cache })
    }

    /// The path of a model's `tokenizer.json`. `gpt2` stands for `openai-community/gpt2`.
    ///
    /// # Errors
    /// When the model has no `tokenizer.json`, or the file cannot be downloaded.
    pub fn tokenizer(&self, model: &str) -> Result<PathBuf> {
        let model = if model == "gpt2" { "openai-community/gpt2" } else { model };
        check_name(model)?;
        let repo = Repo::model(model.into());
        let cached = |file: &str| self.cache.repo(repo.clone()).get(file);
        if let Some(path) =
            cached("tokenizer.json").filter(|_| offline() || cached(TOKENIZER_CONFIG).is_some())
        {
            return Ok(path);
        }
        let path = self.get(&repo, "tokenizer.json")?;
        // `tokenizer_config.json` names the end-of-text token, but not every model has this file.
        if let Err(error) = self.get(&repo, TOKENIZER_CONFIG).map_err(|error| error.to_string())
            && !error.contains("404")
        {
            notify(&format!("warning: the end-of-text token is taken from tokenizer.json alone: {error}"));
        }
        Ok(path)
    }

    /// The sorted names of the data set's files that match `named.pattern`.
    ///
    /// # Errors
    /// When the hub does not know the data set, or no file matches.
    pub fn files(&self, named: &Named) -> Result<Vec<String>> {
        check_name(&named.dataset)?;
        let pattern = glob::Pattern::new(&named.pattern).map_err(|error| {
            Error::new("not a pattern")
                .got(format!("`{}`: {error}", named.pattern))
                .hint("hf:OWNER/NAME:data/*.parquet")
        })?;
        let all = self.listed(&named.dataset)?;
        let mut found: Vec<String> = all.iter().filter(|name| pattern.matches(name)).cloned().collect();
        if found.is_empty() {
            return Err(Error::new("no file of the data set matches")
                .got(format!("`{}` among {} files of {}", named.pattern, all.len(), named.dataset))
                .allowed(all.iter().take(5).cloned().collect::<Vec<_>>().join(", "))
                .hint(
                    "only the first files are listed; use hf:OWNER/NAME:PATTERN, e.g. \
                     hf:roneneldan/TinyStories:data/train-*.parquet",
                ));
        }
        found.iter().try_for_each(|file| check_file(file))?;
        found.sort();
        Ok(found)
    }

    /// The names of all files of a data set; without a connection, only the names of the files in the cache.
    fn listed(&self, dataset: &str) -> Result<Vec<String>> {
        let repo = self.api.repo(Repo::dataset(dataset.into()));
        let info = match offline() {
            true => Err("HF_HUB_OFFLINE is set".into()),
            false => unpanicked(|| repo.info()),
        };
        let error = match info {
            Ok(info) => return Ok(info.siblings.into_iter().map(|file| file.rfilename).collect()),
            Err(error) => error,
        };
        let cached = self.cached(dataset);
        if cached.is_empty() {
            return Err(failed(dataset)(error));
        }
        notify(&format!(
            "warning: the hub does not list {dataset} ({error}): using only the {} in the cache",
            counted(cached.len() as u64, "file")
        ));
        Ok(cached)
    }

    /// The cached files of a data set. Of several cached versions, only the newest counts.
    fn cached(&self, dataset: &str) -> Vec<String> {
        let repo = self.cache.path().join(Repo::dataset(dataset.into()).folder_name());
        let Ok(commit) = std::fs::read_to_string(repo.join("refs/main")) else { return Vec::new() };
        let snapshot = repo.join("snapshots").join(commit.trim());
        let pattern = format!("{}/**/*", glob::Pattern::escape(&snapshot.to_string_lossy()));
        let found = glob::glob(&pattern).into_iter().flatten().flatten().filter(|path| path.is_file());
        found.filter_map(|path| Some(path.strip_prefix(&snapshot).ok()?.to_str()?.to_owned())).collect()
    }

    /// The path of a data set's file, which is downloaded if it is not in the cache.
    ///
    /// # Errors
    /// When the file cannot be downloaded completely.
    pub fn dataset_file(&self, dataset: &str, file: &str) -> Result<PathBuf> {
        check_name(dataset)?;
        check_file(file)?;
        self.get(&Repo::dataset(dataset.into()), file)
    }

    fn get(&self, repo: &Repo, file: &str) -> Result<PathBuf> {
        let cached = self.cache.repo(repo.clone());
        if let Some(path) = cached.get(file) {
            return Ok(path);
        }
        let remote = self.api.repo(repo.clone());
        let what = format!("{} of {}", file, repo.url());
        let metadata = unpanicked(|| self.api.metadata(&remote.url(file)));
        let metadata = metadata.map_err(failed(&what))?;
        // The server sends the file's etag and the commit's hash, which become parts of paths.
        for part in [metadata.etag(), metadata.commit_hash()] {
            if part.is_empty() || !part.chars().all(|c| c.is_ascii_alphanumeric() || "-_\":".contains(c)) {
                return Err(failed(&what)(format!(
                    "the server sent an invalid etag or commit hash: `{part}`"
                )));
            }
        }
        // A partial download that is as long as the file or longer cannot be resumed, and is removed.
        let partial = cached.blob_path(metadata.etag()).with_extension("part");
        if partial.metadata().is_ok_and(|held| held.len() >= metadata.size() as u64) {
            let _ = std::fs::remove_file(&partial);
        }
        let path = unpanicked(|| download(&remote, file)).map_err(failed(&what))?;
        // The download requested the etag and the commit hash again, and did not check them. They are parts of the
        // file's path, so the path must be checked to be inside the cache.
        let inside = match (path.canonicalize(), self.cache.path().canonicalize()) {
            (Ok(path), Ok(cache)) => path.starts_with(cache),
            _ => false,
        };
        if !inside {
            return Err(failed(&what)(format!(
                "the downloaded file is outside the cache: {}",
                path.display()
            )));
        }
        let held = path.metadata().map(|held| held.len()).map_err(failed(&what))?;
        if held != metadata.size() as u64 {
            // The file is removed, so that the cache does not return an incomplete file.
            let _ = path.canonicalize().and_then(std::fs::remove_file);
            let _ = std::fs::remove_file(&path);
            return Err(failed(&what)(format!("{held} bytes of {}", metadata.size())));
        }
        Ok(path)
    }
}

/// The folder of the cache, from the environment variables of the hub's official library.
fn cache_folder(variable: impl Fn(&str) -> Option<OsString>) -> Result<PathBuf> {
    let folder = variable("HF_HUB_CACHE").map(PathBuf::from);
    let folder = folder.or_else(|| home_folder(&variable).map(|home| home.join("hub")));
    folder.ok_or_else(|| {
        Error::new("no folder for files of the Hugging Face Hub")
            .got("none of HF_HUB_CACHE, HF_HOME and HOME is set")
            .allowed("one of them, set to a writable folder")
            .hint("HF_HOME=/path/to/a/folder sage-train ..")
    })
}

/// The hub's home folder, which contains the default cache and the token of a login.
fn home_folder(variable: impl Fn(&str) -> Option<OsString>) -> Option<PathBuf> {
    let user = || variable("HOME").or_else(|| variable("USERPROFILE"));
    let folder = variable("HF_HOME").map(PathBuf::from);
    folder.or_else(|| user().map(|user| Path::new(&user).join(".cache/huggingface")))
}

fn download(repo: &ApiRepo, file: &str) -> std::result::Result<PathBuf, String> {
    let bar = bar(0, "{msg} {bar:30.cyan/blue} {bytes}/{total_bytes} {bytes_per_sec}, ETA {eta}");
    repo.download_with_progress(file, bar).map_err(|error| error.to_string())
}

fn failed<E: Into<AnyError>>(what: &str) -> impl FnOnce(E) -> Error {
    let what = format!("cannot fetch {what}");
    move |error| {
        Error::failed(what)
            .caused_by(error)
            .hint("check the name and the network, and run the command again: downloaded data is kept. HF_TOKEN gives \
                   access to gated data")
    }
}

/// Checks that the path of a data set's file stays inside the data set's folder.
fn check_file(file: &str) -> Result<()> {
    let normal = |path: &Path| path.components().all(|part| matches!(part, Component::Normal(_)));
    if !file.is_empty() && !file.contains(['\\', '\0', '?', '#']) && normal(Path::new(file)) {
        return Ok(());
    }
    Err(Error::new("the hub lists a file with an unsafe path")
        .got(format!("`{file}`"))
        .allowed("paths inside the data set's folder, without `\\`, `?` and `#`")
        .hint("do not use this data set, and report it to the hub"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cache_is_where_the_environment_says() -> Result<()> {
        let of = |set: &[(&str, &str)]| {
            cache_folder(|name| set.iter().find(|(key, _)| *key == name).map(|(_, value)| value.into()))
        };
        assert_eq!(of(&[("HOME", "/h"), ("HF_HOME", "/f"), ("HF_HUB_CACHE", "/c")])?, Path::new("/c"));
        assert_eq!(of(&[("HOME", "/h"), ("HF_HOME", "/f")])?, Path::new("/f/hub"));
        assert_eq!(of(&[("HOME", "/h")])?, Path::new("/h/.cache/huggingface/hub"));
        assert!(of(&[]).expect_err("none").to_string().contains("HF_HOME"));
        Ok(())
    }

    #[test]
    fn files_stay_in_their_folder() -> Result<()> {
        for bad in ["", "../x", "/x", "a/../b", "a\\b", "a\0", "a?b"] {
            assert!(check_file(bad).is_err(), "{bad}");
        }
        check_file("data/train-00000-of-00004.parquet")
    }
}
