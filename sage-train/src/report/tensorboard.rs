//! Event files for TensorBoard: the scalars of each step, as TFRecords of `Event` messages. The protobuf encoding is
//! implemented here, because the messages have only four kinds of fields.

use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use candle_sage::Result;

use crate::{open_own, writing};

/// An open event file.
#[derive(Debug)]
pub struct EventFile {
    file: File,
    path: std::path::PathBuf,
}

/// Wire types of protobuf.
const VARINT: u8 = 0;
const DOUBLE: u8 = 1;
const BYTES: u8 = 2;
const FLOAT: u8 = 5;

fn varint(mut n: u64, out: &mut Vec<u8>) {
    while n >= 0x80 {
        out.push(n as u8 | 0x80);
        n >>= 7;
    }
    out.push(n as u8);
}

fn field(number: u8, wire: u8, out: &mut Vec<u8>) {
    out.push(number << 3 | wire);
}

fn bytes(number: u8, content: &[u8], out: &mut Vec<u8>) {
    field(number, BYTES, out);
    varint(content.len() as u64, out);
    out.extend(content);
}

/// The message `Event` with the fields `wall_time` (field number 1) and `step` (2), and `content` as field `number`.
fn event(seconds: f64, step: u64, number: u8, content: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    field(1, DOUBLE, &mut out);
    out.extend(seconds.to_le_bytes());
    field(2, VARINT, &mut out);
    varint(step, &mut out);
    bytes(number, content, &mut out);
    out
}

/// The message `Summary` with a field `value` (field number 1) for each scalar. Each `value` contains the fields `tag`
/// (1) and `simple_value` (2).
fn summary(scalars: &[(&str, f64)]) -> Vec<u8> {
    let mut out = Vec::new();
    for (tag, value) in scalars {
        let mut one = Vec::new();
        bytes(1, tag.as_bytes(), &mut one);
        field(2, FLOAT, &mut one);
        one.extend((*value as f32).to_le_bytes());
        bytes(1, &one, &mut out);
    }
    out
}

/// TFRecord's masked CRC-32C: rotated and offset, so that the CRC of data that contains CRCs stays well
/// distributed.
fn masked_crc(bytes: &[u8]) -> u32 {
    crc32c::crc32c(bytes).rotate_right(15).wrapping_add(0xa282_ead8)
}

fn record(content: &[u8]) -> Vec<u8> {
    let len = (content.len() as u64).to_le_bytes();
    let mut out = len.to_vec();
    out.extend(masked_crc(&len).to_le_bytes());
    out.extend(content);
    out.extend(masked_crc(content).to_le_bytes());
    out
}

impl EventFile {
    /// Creates an event file in a folder. `first_step` is the first step that will be written.
    ///
    /// # Errors
    /// When the file cannot be created.
    pub fn create(folder: &Path, first_step: u64) -> Result<Self> {
        let now = now();
        let path = folder.join(format!("events.out.tfevents.{:010}.{}.sage-train", now as u64, first_step));
        let file = open_own(&path, File::options().write(true).create(true).truncate(true))?;
        let mut events = Self { file, path };
        events.write(&event(now, 0, 3, b"brain.Event:2"))?;
        // `SessionLog { status = START }` makes TensorBoard discard, in earlier files, events of step >= `first_step`.
        events.write(&event(now, first_step, 7, &[1 << 3 | VARINT, 1]))?;
        Ok(events)
    }

    /// Adds the scalars of a step.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn scalars(&mut self, step: u64, scalars: &[(&str, f64)]) -> Result<()> {
        self.write(&event(now(), step, 5, &summary(scalars)))
    }

    fn write(&mut self, event: &[u8]) -> Result<()> {
        self.file.write_all(&record(event)).map_err(writing(&self.path))
    }
}

fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_is_what_tensorboard_writes() {
        // `SerializeToString()` of tf.train.Event(wall_time=1.5, step=300, summary=..), whose only value has
        // the tag "loss" and the simple_value 2.5.
        let wanted = b"\x09\x00\x00\x00\x00\x00\x00\xf8\x3f\x10\xac\x02\x2a\x0d\x0a\x0b\x0a\x04loss\x15\x00\x00\x20\x40";
        assert_eq!(event(1.5, 300, 5, &summary(&[("loss", 2.5)])), wanted);
        // The same event as framed by TensorBoard's RecordWriter: length, CRC of the length, content, CRC of the
        // content.
        let mut wrapped = b"\x1b\0\0\0\0\0\0\0\x1a\x0d\x9e\x13".to_vec();
        wrapped.extend(wanted);
        wrapped.extend(b"\x68\x99\x7c\x51");
        assert_eq!(record(wanted), wrapped);
    }
}
