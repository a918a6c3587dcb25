//! The checks of a checkpoint before it is read.

use std::path::Path;

use candle_sage::{Error, Result};
use sha2::{Digest, Sha256};

use super::{FOLDER, MANIFEST, MARKER, Manifest, RankFile, VERSIONS, digest, name, steps};
use crate::hex;
use crate::ranks::Rank;

/// Reads a checkpoint's `checkpoint.json`. Checks that its hash is in the marker file, that its version is one of
/// [`VERSIONS`], and that the folder's name contains its step. The hashes of the files of weights and moments are
/// checked too: each rank checks a share of these files.
///
/// # Errors
/// When the checkpoint is damaged or incomplete, its step differs from its folder's name, or its version is unknown.
pub(super) fn verified(run: &Path, path: &Path, rank: Rank) -> Result<(Manifest, Vec<RankFile>)> {
    let refuse = |file: &str, got: String, allowed: &str| {
        let others: Vec<String> =
            steps(&run.join(FOLDER)).into_iter().map(name).filter(|other| !path.ends_with(other)).collect();
        let hint = match others.last() {
            Some(other) => {
                format!("move the checkpoint away: then --resume {} continues from {other}", run.display())
            }
            None => {
                "the run has no other checkpoint: restore the files from a copy, or begin a new run".into()
            }
        };
        Err(Error::new(format!("the checkpoint {} cannot be used", path.display()))
            .got(format!("{file}: {got}"))
            .allowed(allowed)
            .hint(hint))
    };
    let read = |file: &str| std::fs::read(path.join(file)).map_err(|error| error.to_string());
    let text = match read(MANIFEST) {
        Ok(text) => text,
        Err(error) => return refuse(MANIFEST, error, "a whole checkpoint"),
    };
    match read(MARKER) {
        Err(error) => return refuse(MARKER, error, "the marker file, which is written last"),
        Ok(marker) if marker != hex(&Sha256::digest(&text)).as_bytes() => {
            return refuse(
                MANIFEST,
                "changed since it was written".into(),
                &format!("the {MANIFEST} whose hash is in {MARKER}"),
            );
        }
        Ok(_) => {}
    }
    let manifest: Manifest = match serde_json::from_slice(&text) {
        Ok(manifest) => manifest,
        Err(error) => {
            return refuse(MANIFEST, error.to_string(), "a file written by this version of sage-train");
        }
    };
    if !VERSIONS.contains(&manifest.version) {
        let allowed = format!("version {} or {}", VERSIONS[0], VERSIONS[1]);
        return refuse(MANIFEST, format!("version {}", manifest.version), &allowed);
    }
    if !path.ends_with(name(manifest.step)) {
        return refuse(
            MANIFEST,
            format!("belongs to {}", name(manifest.step)),
            "the step in the folder's name",
        );
    }
    let Some(files) = manifest.files() else {
        return refuse(
            MANIFEST,
            "an invalid list of files".into(),
            "a file written by this version of sage-train",
        );
    };
    for file in files.iter().skip(rank.index).step_by(rank.of) {
        let (bytes, sha256) = match digest(&path.join(&file.name)) {
            Ok(digest) => digest,
            Err(error) => return refuse(&file.name, error.to_string(), "a whole checkpoint"),
        };
        if (bytes, &sha256) != (file.bytes, &file.sha256) {
            let got = format!("{bytes} bytes with SHA-256 {sha256:.12}");
            let allowed = format!("{} bytes with SHA-256 {:.12}", file.bytes, file.sha256);
            return refuse(&file.name, got, &allowed);
        }
    }
    Ok((manifest, files))
}
