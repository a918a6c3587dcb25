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
        let found = Field(field).deserialize(&mut json).and_then(|found| json.end().map(|()| found));
        match found {
            Ok(Some(text)) => {
                if each(Piece { text, ends: true })?.is_break() {
                    return Ok(());
                }
            }
            // A null is no document, as in a column of parquet.
            Ok(None) => {}
            Err(error) => {
                let error = error.to_string();
                let hint = if error.contains("messages") || error.contains("conversations") {
                    "chat data: make one text of each conversation first, e.g. with transformers' apply_chat_template"
                } else if text.starts_with('[') || error.contains("EOF while parsing an object") {
                    "a file of one JSON array or of objects over several lines: `jq -c '.[]' FILE > FILE.jsonl` makes lines"
                } else {
                    "every line is one document; --text-field names the field, and `data prepare --skip-bad` leaves bad lines out"
                };
                bad.take(
                    Error::new("a line is not a JSON object with text")
                        .got(format!("{}, line {number}: {error}", path.display()))
                        .allowed(format!("{{\"{field}\": \"...\"}}; other fields are passed over"))
                        .hint(hint),
                )?
            }
        }
    }
    Ok(())
}

/// The beginning of the error of an object without the field.
const MISSING: &str = "no key";

/// The keys that an error lists.
const LISTED: usize = 8;

/// Deserializes one field of a JSON object, and ignores the others. `a.b` is the field `b` of the object `a`, as in parquet,
/// unless there is a field of that name.
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
        let (mut text, mut others) = (None, Vec::new());
        while let Some(key) = map.next_key::<std::borrow::Cow<'_, str>>()? {
            let inside = self.0.strip_prefix(&*key).and_then(|rest| rest.strip_prefix('.'));
            if key == self.0 {
                text = Some(map.next_value()?);
            } else if let Some(inside) = inside.filter(|_| text.is_none()) {
                text = Some(map.next_value_seed(Field(inside))?);
            } else {
                map.next_value::<IgnoredAny>()?;
                // Only the keys that an error lists are kept: a line may have millions.
                if others.len() <= LISTED {
                    others.push(key.into_owned());
                }
            }
        }
        text.ok_or_else(|| {
            let more = if others.len() > LISTED { ", .." } else { "" };
            others.truncate(LISTED);
            serde::de::Error::custom(format!("{MISSING} `{}` among {}{more}", self.0, others.join(", ")))
        })
    }
}
