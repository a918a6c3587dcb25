//! Documents from JSON lines.

use std::io::{BufRead, Read};
use std::path::Path;

use candle_sage::{Error, Result};
use serde::de::{DeserializeSeed, Deserializer, IgnoredAny, MapAccess, Visitor};

use super::{Bad, EachUntil, LONGEST, Piece, not_utf8, unreadable};

/// Reads JSON lines: each line is a document.
pub(super) fn json_lines(
    path: &Path,
    mut reader: impl BufRead,
    field: &str,
    bad: Bad<'_>,
    each: &mut EachUntil<'_>,
) -> Result<()> {
    let mut line = Vec::new();
    for number in 1.. {
        line.clear();
        let read =
            reader.by_ref().take(LONGEST + 1).read_until(b'\n', &mut line).map_err(unreadable(path))?;
        if read == 0 {
            break;
        }
        if read as u64 > LONGEST {
            bad.take(
                Error::new("a line is too long")
                    .got(format!("{}, line {number}", path.display()))
                    .allowed(format!("up to {} MiB", LONGEST >> 20))
                    .hint("every line is one document"),
            )?;
            while line.last().is_some_and(|byte| *byte != b'\n') {
                line.clear();
                reader.by_ref().take(LONGEST).read_until(b'\n', &mut line).map_err(unreadable(path))?;
            }
            continue;
        }
        let text = match std::str::from_utf8(&line) {
            Ok(text) => text,
            Err(error) => {
                bad.take(not_utf8(path, format!("line {number}, byte {}", error.valid_up_to()), &line))?;
                continue;
            }
        };
        let text = text.trim().trim_start_matches('\u{feff}');
        if text.is_empty() {
            continue;
        }
        let mut json = serde_json::Deserializer::from_str(text);
        let text = Field(field).deserialize(&mut json).and_then(|text| json.end().map(|()| text));
        match text {
            Ok(Some(text)) => {
                if each(Piece { text, ends: true })?.is_break() {
                    return Ok(());
                }
            }
            // A null is no document, as in a column of parquet.
            Ok(None) => {}
            Err(error) => bad.take(
                Error::new("a line is not a JSON object with text")
                    .got(format!("{}, line {number}: {error}", path.display()))
                    .allowed(format!("{{\"{field}\": \"...\"}}; other fields are passed over"))
                    .hint("every line is one document; --text-field names the field, and `data prepare --skip-bad` leaves bad lines out"),
            )?,
        }
    }
    Ok(())
}

/// Deserializes one field of a JSON object, and ignores the others.
struct Field<'a>(&'a str);

impl<'de> DeserializeSeed<'de> for Field<'_> {
    type Value = Option<String>;

    fn deserialize<D: Deserializer<'de>>(
        self,
        deserializer: D,
    ) -> std::result::Result<Self::Value, D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for Field<'_> {
    type Value = Option<String>;

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("a JSON object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> std::result::Result<Self::Value, A::Error> {
        let mut text = None;
        while let Some(key) = map.next_key::<std::borrow::Cow<'_, str>>()? {
            if key == self.0 {
                text = Some(map.next_value()?);
            } else {
                map.next_value::<IgnoredAny>()?;
            }
        }
        text.ok_or_else(|| serde::de::Error::custom(format!("missing field `{}`", self.0)))
    }
}
