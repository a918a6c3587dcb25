//! What ranks say to each other: JSON behind its length. Nothing that is too long or makes no sense is taken.

use std::io::{Error, ErrorKind, Read, Result, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

/// The longest message.
const MOST: usize = 16 << 20;

/// The longest that says who somebody is.
const MOST_HELLO: usize = 4 << 10;

/// How long it may take.
const HELLO_TIME: Duration = Duration::from_secs(5);

/// One message.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase", deny_unknown_fields)]
pub(super) enum Message {
    /// The first one, both ways.
    Hello {
        /// Of the program.
        version: String,
        /// The one that speaks.
        rank: usize,
        /// Of how many.
        of: usize,
        /// Its machine.
        host: String,
    },
    /// To rank 0: what a rank says about a topic.
    Said {
        /// The topic.
        topic: String,
        /// What it says.
        text: String,
    },
    /// From rank 0: what all said.
    All {
        /// The topic.
        topic: String,
        /// By rank.
        texts: Vec<String>,
    },
    /// A sign of life.
    Beat {
        /// The step that a rank is at, from 1.
        step: u64,
        /// Grows with everything that is done.
        ticks: u64,
        /// `step 3 of 300`.
        doing: String,
        /// It may take long.
        aside: bool,
    },
    /// A rank stops because of an error of its own.
    Failed {
        /// The error.
        why: String,
    },
    /// From rank 0: all stop.
    Over {
        /// Why.
        why: String,
        /// What to exit with.
        code: i32,
    },
    /// A rank has nothing more to say.
    Bye,
}

/// Sends one.
///
/// # Errors
/// When the connection is gone.
pub(super) fn send(to: &mut impl Write, message: &Message) -> Result<()> {
    let text = serde_json::to_vec(message)?;
    let mut bytes = (text.len() as u32).to_le_bytes().to_vec();
    bytes.extend(text);
    to.write_all(&bytes)
}

/// Receives one.
///
/// # Errors
/// When the connection is gone, or what comes is no message.
pub(super) fn receive(from: &mut impl Read) -> Result<Message> {
    receive_of(from, MOST)
}

/// Receives the first one of whoever comes: a short one, and in time.
///
/// # Errors
/// As [`receive`], and when it does not come within [`HELLO_TIME`].
pub(super) fn receive_hello(from: &mut TcpStream) -> Result<Message> {
    receive_of(&mut Until { stream: from, end: Instant::now() + HELLO_TIME }, MOST_HELLO)
}

/// Reads from a stream until a time.
struct Until<'a> {
    stream: &'a mut TcpStream,
    end: Instant,
}

impl Read for Until<'_> {
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
    let len = u32::from_le_bytes(len) as usize;
    if len > most {
        return Err(Error::new(ErrorKind::InvalidData, format!("a message of {len} bytes")));
    }
    // Not allocated before it comes.
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
        let said = Message::Said { topic: "data".into(), text: "a\nb".into() };
        let mut bytes = Vec::new();
        send(&mut bytes, &said).expect("room");
        send(&mut bytes, &Message::Bye).expect("room");
        let mut from = bytes.as_slice();
        assert_eq!(receive(&mut from).expect("a message"), said);
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
