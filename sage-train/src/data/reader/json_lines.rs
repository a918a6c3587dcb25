//! Reads documents from JSON lines.

use std::io::{BufRead, Read};
use std::path::Path;

use candle_sage::{Error, Result};
use serde::de::{DeserializeSeed, Deserializer, IgnoredAny, MapAccess, SeqAccess, Unexpected, Visitor};

use super::{BadDocuments, EachUntil, LONGEST, Piece, not_utf8, unreadable};

/// Reads JSON lines: each line is a document.
pub(super) fn json_lines(
    path: &Path,
    mut reader: impl BufRead,
    field: &str,
    bad: BadDocuments<'_>,
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
                    .hint("every line is one document: split it, or skip such lines with `data prepare --skip-bad`"),
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
        let found = Field { name: field, nested: false }
            .deserialize(&mut json)
            .and_then(|found| json.end().map(|()| found));
        let found = found.map_err(|error| error.to_string()).and_then(|found| found.or_missing(field));
        match found {
            Ok(FieldValue::Text(text)) => {
                if each(Piece { text, ends: true })?.is_break() {
                    return Ok(());
                }
            }
            // A null is not a document: neither here nor in a parquet column.
            Ok(_) => {}
            Err(error) => {
                let hint = if error.contains("messages") || error.contains("conversations") {
                    "this is chat data: turn each conversation into one text first, e.g. with transformers' \
                     apply_chat_template (special tokens in a text are encoded as text)"
                } else if text.starts_with('[') || error.contains("EOF while parsing an object") {
                    "for a file with one JSON array, or with objects over several lines, `jq -c '.[]' FILE > \
                     FILE.jsonl` makes JSON lines"
                } else if ["NaN", "Infinity"].iter().any(|number| text.contains(number)) {
                    "NaN and Infinity are not JSON, although Python writes them: replace them by null, or skip such \
                     lines with `data prepare --skip-bad`"
                } else {
                    "every line is one document; name the field with --text-field, or skip bad lines with `data \
                     prepare --skip-bad`"
                };
                bad.take(
                    Error::new("a line is not a JSON object with text")
                        .got(format!("{}, line {number}: {error}", path.display()))
                        .allowed(format!("{{\"{field}\": \"...\"}}; other fields are ignored"))
                        .hint(hint),
                )?
            }
        }
    }
    Ok(())
}

/// The beginning of the error message for an object without the field that should contain the text.
const MISSING: &str = "no key";

/// An error message lists at most this many of the object's keys.
const LISTED: usize = 8;

enum FieldValue {
    Text(String),
    Null,
    /// The field is missing. Contains some of the object's keys, for the error message.
    Missing(Vec<String>),
}

impl FieldValue {
    fn or_missing(self, field: &str) -> std::result::Result<Self, String> {
        let Self::Missing(mut keys) = self else { return Ok(self) };
        let more = if keys.len() > LISTED { ", .." } else { "" };
        keys.truncate(LISTED);
        Err(format!("{MISSING} `{field}` among the keys {}{more}", keys.join(", ")))
    }
}

/// Deserializes one field of a JSON object, and ignores the others. `a.b` is the field `b` of the object `a`, as in
/// Parquet, unless there is a field with the name `a.b`.
struct Field<'a> {
    name: &'a str,
    /// False for a whole line, which must be an object. True for a value inside the line, which may have any type.
    nested: bool,
}

impl Field<'_> {
    /// The result of deserializing a value that is not an object.
    fn other<E: serde::de::Error>(self, found: Unexpected<'_>) -> std::result::Result<FieldValue, E> {
        if self.nested { Ok(FieldValue::Missing(Vec::new())) } else { Err(E::invalid_type(found, &self)) }
    }
}

impl<'de> DeserializeSeed<'de> for Field<'_> {
    type Value = FieldValue;

    fn deserialize<D: Deserializer<'de>>(
        self,
        deserializer: D,
    ) -> std::result::Result<Self::Value, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Field<'_> {
    type Value = FieldValue;

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("a JSON object")
    }

    /// A null instead of an object: if `a` is null, the field `a.b` counts as null.
    fn visit_unit<E: serde::de::Error>(self) -> std::result::Result<Self::Value, E> {
        if self.nested { Ok(FieldValue::Null) } else { self.other(Unexpected::Unit) }
    }

    fn visit_bool<E: serde::de::Error>(self, value: bool) -> std::result::Result<Self::Value, E> {
        self.other(Unexpected::Bool(value))
    }

    fn visit_i64<E: serde::de::Error>(self, value: i64) -> std::result::Result<Self::Value, E> {
        self.other(Unexpected::Signed(value))
    }

    fn visit_u64<E: serde::de::Error>(self, value: u64) -> std::result::Result<Self::Value, E> {
        self.other(Unexpected::Unsigned(value))
    }

    fn visit_f64<E: serde::de::Error>(self, value: f64) -> std::result::Result<Self::Value, E> {
        self.other(Unexpected::Float(value))
    }

    fn visit_str<E: serde::de::Error>(self, value: &str) -> std::result::Result<Self::Value, E> {
        self.other(Unexpected::Str(value))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> std::result::Result<Self::Value, A::Error> {
        if !self.nested {
            return self.other(Unexpected::Seq);
        }
        while list.next_element::<IgnoredAny>()?.is_some() {}
        self.other(Unexpected::Seq)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> std::result::Result<Self::Value, A::Error> {
        let (mut named, mut nested, mut others) = (None, None, Vec::new());
        while let Some(key) = map.next_key::<std::borrow::Cow<'_, str>>()? {
            if key == self.name {
                named = Some(map.next_value::<Option<String>>()?.map_or(FieldValue::Null, FieldValue::Text));
                continue;
            }
            match self.name.strip_prefix(&*key).and_then(|rest| rest.strip_prefix('.')) {
                Some(inside) => match map.next_value_seed(Field { name: inside, nested: true })? {
                    FieldValue::Missing(keys) if keys.is_empty() => others.push(key.into_owned()),
                    FieldValue::Missing(keys) => {
                        others.extend(keys.iter().map(|inner| format!("{key}.{inner}")))
                    }
                    found => nested = Some(found),
                },
                None => {
                    map.next_value::<IgnoredAny>()?;
                    others.push(key.into_owned());
                }
            }
            // A line may have millions of keys. The error message needs `LISTED` keys; one more shows that the line has
            // others.
            others.truncate(LISTED + 1);
        }
        Ok(named.or(nested).unwrap_or(FieldValue::Missing(others)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_field_is_found_in_any_order() -> Result<()> {
        let texts = |lines: &str, field: &str| {
            let mut found = Vec::new();
            let mut each = |piece: Piece| {
                found.push(piece.text);
                Ok(std::ops::ControlFlow::Continue(()))
            };
            json_lines(Path::new("a"), lines.as_bytes(), field, BadDocuments::Refused, &mut each)
                .map(|()| found)
        };
        // A field with the whole name is preferred to a nested field.
        for line in [
            r#"{"a.b": "x", "a": {"b": "y"}}"#,
            r#"{"a": {"b": "y"}, "a.b": "x"}"#,
            r#"{"a": {}, "a.b": "x"}"#,
            r#"{"a.b": "x", "a": "y"}"#,
            r#"{"a": "y", "a.b": "x"}"#,
            r#"{"a": [1, {"b": "y"}], "a.b": "x"}"#,
            r#"{"a": 1.5, "a.b": "x"}"#,
        ] {
            assert_eq!(texts(line, "a.b")?, ["x"], "{line}");
        }
        assert_eq!(texts(r#"{"a": {"b": "y"}}"#, "a.b")?, ["y"]);
        // A null is skipped at every depth.
        for line in [r#"{"a": null}"#, r#"{"a": {"b": null}}"#, r#"{"a.b": null}"#] {
            assert!(texts(line, "a.b")?.is_empty(), "{line}");
        }
        let error = texts(r#"{"a": {"c": 1}, "d": 2}"#, "a.b").expect_err("no text").to_string();
        assert!(error.contains("no key `a.b` among the keys a.c, d"), "{error}");
        let error = texts(r#"{"a": "y"}"#, "a.b").expect_err("no text").to_string();
        assert!(error.contains("no key `a.b` among the keys a"), "{error}");
        let error = texts(r#"{"a": "y", "score": NaN}"#, "a").expect_err("NaN").to_string();
        assert!(error.contains("replace them by null"), "{error}");
        for line in ["null", "1", "\"x\"", "[]", "true"] {
            let error = texts(line, "a.b").expect_err(line).to_string();
            assert!(error.contains("expected a JSON object"), "{line}: {error}");
        }
        Ok(())
    }
}
