//! The messages of the control channel: JSON, preceded by its length. Messages that are too long or malformed
//! are refused.

use std::io::{Error, ErrorKind, Read, Result, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::mesh::Rank;

/// Longest message, in bytes.
const MOST: usize = 16 << 20;

/// Version of the program, which all ranks must have.
pub(super) const VERSION: &str = env!("CARGO_PKG_VERSION");

/// Longest message, in bytes, of a sender that has not proven that it knows the secret.
pub(super) const MOST_HELLO: usize = 4 << 10;

/// How a rank introduces itself.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Hello {
    /// Version of the program.
    pub(super) version: String,
    /// Index of the sender.
    pub(super) rank: usize,
    /// Number of ranks in the sender's run.
    pub(super) of: usize,
    /// Name of the sender's machine.
    pub(super) host: String,
    /// The sender's challenge to the receiver; empty if the receiver need not prove anything.
    pub(super) nonce: String,
    /// The sender's proof that it knows the run's secret: see [`super::secret::Secret::sign`].
    pub(super) proof: String,
}

impl Hello {
    /// A greeting whose proof is still empty.
    pub(super) fn new(rank: Rank, host: &str, nonce: String) -> Self {
        let Rank { index, of } = rank;
        Self { version: VERSION.into(), rank: index, of, host: host.into(), nonce, proof: String::new() }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase", deny_unknown_fields)]
pub(super) enum Message {
    /// The first message from the listening side.
    Challenge {
        /// Random digits. From these digits and the run's secret, the connecting side computes [`Hello::proof`].
        nonce: String,
    },
    /// The greeting: the first message from the connecting side, and rank 0's answer to it.
    Hello(Hello),
    /// To rank 0: a text that rank 0 sends to the other ranks in [`Message::All`].
    Text { topic: String, text: String },
    /// From rank 0: the texts that all ranks sent as [`Message::Text`] with this topic.
    All {
        topic: String,
        /// The texts, by rank.
        texts: Vec<String>,
    },
    /// A heartbeat.
    Beat {
        /// The sender's current step, from 1; 0 before the first step.
        step: u64,
        /// Number of batches that the sender has completed, in training and validation.
        ticks: u64,
        /// What the sender is doing, such as `step 3 of 300`.
        doing: String,
        /// Whether this activity may be without progress for longer than other activities.
        aside: bool,
    },
    /// The sender stops because of an error.
    Failed { why: String },
    /// From rank 0: all ranks stop.
    Over { why: String, code: i32 },
    /// The sender has left the run.
    Bye,
}

pub(super) fn send(to: &mut impl Write, message: &Message) -> Result<()> {
    let text = serde_json::to_vec(message)?;
    let mut bytes = (text.len() as u32).to_le_bytes().to_vec();
    bytes.extend(text);
    to.write_all(&bytes)
}

/// Receives a message.
///
/// # Errors
/// When the connection is closed, or the bytes are not a message.
pub(super) fn receive(from: &mut impl Read) -> Result<Message> {
    receive_of(from, MOST)
}

/// The JSON text of the first message in `bytes`, and the bytes after the message.
///
/// # Errors
/// When the bytes are not a message, or the message is incomplete.
pub fn first_message(mut bytes: &[u8]) -> Result<(String, &[u8])> {
    let message = receive(&mut bytes)?;
    Ok((serde_json::to_string(&message)?, bytes))
}

/// Receives a message from a sender that has not proven that it knows the run's secret. The message's length and the
/// time until it has arrived are limited.
///
/// # Errors
/// As [`receive`], and when the message does not arrive in time.
pub(super) fn receive_within(from: &mut TcpStream, time: Duration) -> Result<Message> {
    receive_of(&mut DeadlineReader { stream: from, end: Instant::now() + time }, MOST_HELLO)
}

/// The length of a message, from the bytes that precede it.
///
/// # Errors
/// When the length is more than `most` bytes.
pub(super) fn length(bytes: [u8; 4], most: usize) -> Result<usize> {
    let len = u32::from_le_bytes(bytes) as usize;
    match len > most {
        true => Err(Error::new(ErrorKind::InvalidData, format!("a message of {len} bytes is too long"))),
        false => Ok(len),
    }
}

/// Reads from a connection until a deadline.
struct DeadlineReader<'a> {
    stream: &'a mut TcpStream,
    end: Instant,
}

impl Read for DeadlineReader<'_> {
    fn read(&mut self, into: &mut [u8]) -> Result<usize> {
        let left = self.end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(ErrorKind::TimedOut.into());
        }
        self.stream.set_read_timeout(Some(left))?;
        self.stream.read(into)
    }
}

fn receive_of(from: &mut impl Read, most: usize) -> Result<Message> {
    let mut len = [0; 4];
    from.read_exact(&mut len)?;
    let len = length(len, most)?;
    // Memory grows with the bytes that arrive, instead of being allocated from the announced length.
    let mut text = Vec::new();
    if from.take(len as u64).read_to_end(&mut text)? < len {
        return Err(ErrorKind::UnexpectedEof.into());
    }
    Ok(serde_json::from_slice(&text)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_come_as_they_were_sent_and_nothing_else_does() {
        let message = Message::Text { topic: "data".into(), text: "a\nb".into() };
        let mut bytes = Vec::new();
        send(&mut bytes, &message).expect("room");
        send(&mut bytes, &Message::Bye).expect("room");
        let mut from = bytes.as_slice();
        assert_eq!(receive(&mut from).expect("a message"), message);
        assert_eq!(receive(&mut from).expect("a message"), Message::Bye);
        assert!(receive(&mut from).is_err());
        for cut in 0..bytes.len() - 8 {
            assert!(receive(&mut &bytes[..cut.min(20)]).is_err());
        }
        for broken in [&b"GET / HTTP/1.1\r\n\r\n"[..], &[255; 64], &[0; 64], b"\x02\0\0\0{}"] {
            assert!(receive(&mut &broken[..]).is_err());
        }
    }
}
