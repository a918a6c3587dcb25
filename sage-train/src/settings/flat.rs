//! Reads settings from keys that are not grouped in TOML tables, such as `lr = 1e-3`. Each key sets a field in one of
//! the structs of [`Settings`].
//!
//! A derived `#[serde(flatten)]` would buffer the values, and errors would not name the line of the file.

use std::marker::PhantomData;
use std::sync::LazyLock;

use serde::Deserialize;
use serde::de::value::MapDeserializer;
use serde::de::{DeserializeSeed, Deserializer, Error, IntoDeserializer, MapAccess, Visitor};

use super::layer::Layer;
use super::{Settings, tables};

/// The keys of all settings, and for each key the name of its TOML table.
static KEYS: LazyLock<(Vec<&'static str>, Vec<&'static str>)> =
    LazyLock::new(|| tables::flags().into_iter().map(|(key, table, _)| (&*key.leak(), table)).unzip());

impl<'de> Deserialize<'de> for Settings {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(Flat)
    }
}

struct Flat;

impl<'de> Visitor<'de> for Flat {
    type Value = Settings;

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("struct Settings")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Settings, A::Error> {
        let mut all = Settings::default();
        while let Some((key, table)) = map.next_key_seed(Key)? {
            match table {
                "attention" => set(&mut all.attention, key, &mut map)?,
                "batch" => set(&mut all.batch, key, &mut map)?,
                "data" => set(&mut all.data, key, &mut map)?,
                "linear" => set(&mut all.linear, key, &mut map)?,
                "model" => set(&mut all.model, key, &mut map)?,
                "optimizer" => set(&mut all.optimizer, key, &mut map)?,
                "run" => set(&mut all.run, key, &mut map)?,
                _ => set(&mut all.sla2, key, &mut map)?,
            }
        }
        Ok(all)
    }
}

/// Reads the key of a setting. Returns the key and the name of the setting's table.
struct Key;

impl<'de> DeserializeSeed<'de> for Key {
    type Value = (&'static str, &'static str);

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_identifier(self)
    }
}

impl Visitor<'_> for Key {
    type Value = (&'static str, &'static str);

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("field identifier")
    }

    fn visit_str<E: Error>(self, key: &str) -> Result<Self::Value, E> {
        let (keys, tables) = &*KEYS;
        let known = keys.iter().zip(tables).find(|(known, _)| **known == key);
        known.map(|(key, table)| (*key, *table)).ok_or_else(|| E::unknown_field(key, keys))
    }
}

/// Sets the field `key` of a table to the next value of `map`.
fn set<'de, T, A>(table: &mut T, key: &'static str, map: &mut A) -> Result<(), A::Error>
where
    T: Layer + Default + Deserialize<'de>,
    A: MapAccess<'de>,
{
    let one = map.next_value_seed(OneKey(key, PhantomData::<T>))?;
    *table = one.or(std::mem::take(table));
    Ok(())
}

/// Reads the value of one key, and returns a table of type `T` in which only this key is set.
struct OneKey<T>(&'static str, PhantomData<T>);

impl<'de, T: Deserialize<'de>> DeserializeSeed<'de> for OneKey<T> {
    type Value = T;

    fn deserialize<D: Deserializer<'de>>(self, value: D) -> Result<T, D::Error> {
        T::deserialize(MapDeserializer::new(std::iter::once((self.0, Value(value)))))
    }
}

/// Adapts a deserializer, so that it can be a value of a [`MapDeserializer`].
struct Value<D>(D);

impl<'de, D: Deserializer<'de>> IntoDeserializer<'de, D::Error> for Value<D> {
    type Deserializer = D;

    fn into_deserializer(self) -> D {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `[[1]]` is a wrong value of every key. An error about an unknown field means that `visit_map` chose a struct
    /// without this field.
    #[test]
    fn every_key_is_set_in_its_table() {
        let (keys, _) = &*KEYS;
        for key in keys {
            let error = toml::from_str::<Settings>(&format!("{key} = [[1]]")).expect_err("no such value");
            assert!(!error.to_string().contains("unknown field"), "{key}: {error}");
        }
    }
}
