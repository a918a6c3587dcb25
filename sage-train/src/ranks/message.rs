//! What ranks say to each other: JSON behind its length. Nothing that is too long or makes no sense is taken.

use std::io::{Error, ErrorKind, Read, Result, Write};

use serde::{Deserialize, Serialize};

/// The longest message.
const MOST: usize = 16 << 20;

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
        /// Grows with everything that is done.
        ticks: u64,
        /// `step 3 of 300`.
        doing: String,
        /// It may take as long as it takes.
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
    let mut len = [0; 4];
    from.read_exact(&mut len)?;
    let len = u32::from_le_bytes(len) as usize;
    if len > MOST {
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
