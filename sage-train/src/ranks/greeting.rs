//! Challenge and greeting, the first messages of each connection between ranks. The listening side sends the challenge.
//! The connecting side answers with the greeting, which proves that the connecting side knows the run's secret.

use std::io::{Error, ErrorKind, Read, Result};
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

use super::message::{Hello, MOST_HELLO, Message, length, receive_within, send};
use super::secret::{Secret, random};

/// Time limit for the greeting of a new connection.
const HELLO_TIME: Duration = Duration::from_secs(5);

/// Largest number of connections that wait for a greeting, so that strangers cannot use up all file descriptors. At the
/// limit, a further connection replaces the oldest, once the oldest has waited for [`ANSWER_TIME`].
const MOST_WAITING: usize = 256;

/// The time for which a connection cannot be replaced, so that a rank can receive the challenge and answer.
const ANSWER_TIME: Duration = Duration::from_secs(1);

/// A listener whose new connections are read concurrently: a silent connection does not delay the others.
#[derive(Debug)]
pub(super) struct GreetingListener {
    listener: TcpListener,
    secret: Secret,
    waiting: Vec<UngreetedConnection>,
}

/// A connection that has greeted.
#[derive(Debug)]
pub(super) struct GreetedConnection {
    pub(super) stream: TcpStream,
    pub(super) hello: Hello,
    pub(super) is_proven: bool,
}

/// A connection that has not greeted yet.
#[derive(Debug)]
struct UngreetedConnection {
    stream: TcpStream,
    challenge: String,
    since: Instant,
    bytes: Vec<u8>,
}

impl GreetingListener {
    pub(super) fn new(listener: TcpListener, secret: &Secret) -> Result<Self> {
        listener.set_nonblocking(true)?;
        Ok(Self { listener, secret: secret.clone(), waiting: Vec::new() })
    }

    /// The next connection whose greeting has arrived; `None` if no further greeting has arrived.
    ///
    /// # Errors
    /// When the listener fails.
    pub(super) fn next(&mut self) -> Result<Option<GreetedConnection>> {
        self.accept()?;
        let mut at = 0;
        while at < self.waiting.len() {
            match self.waiting[at].read() {
                Ok(None) if self.waiting[at].since.elapsed() < HELLO_TIME => at += 1,
                Ok(Some(hello)) => {
                    let UngreetedConnection { stream, challenge, .. } = self.waiting.remove(at);
                    if stream.set_nonblocking(false).is_ok() {
                        let is_proven = self.secret.is_proven(&challenge, &hello);
                        return Ok(Some(GreetedConnection { stream, hello, is_proven }));
                    }
                }
                // A connection is dropped if it is silent or closed, or sends something other than a greeting.
                Ok(None) | Err(_) => drop(self.waiting.remove(at)),
            }
        }
        Ok(None)
    }

    /// Accepts the connections that have arrived, and sends each its challenge.
    fn accept(&mut self) -> Result<()> {
        // A call accepts a limited number of connections, so that a flood of them does not delay reading greetings.
        for _ in 0..MOST_WAITING {
            if self.waiting.len() == MOST_WAITING {
                if self.waiting[0].since.elapsed() < ANSWER_TIME {
                    return Ok(());
                }
                self.waiting.remove(0);
            }
            let mut stream = match self.listener.accept() {
                Ok((stream, _)) => stream,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(error)
                    if [ErrorKind::ConnectionAborted, ErrorKind::Interrupted].contains(&error.kind()) =>
                {
                    continue;
                }
                Err(error) => return Err(error),
            };
            let challenge = random().map_err(Error::other)?;
            let message = Message::Challenge { nonce: challenge.clone() };
            // The send buffer of a new connection has room for the challenge, so sending cannot fail for lack of room.
            if stream.set_nonblocking(true).and_then(|()| send(&mut stream, &message)).is_err() {
                continue;
            }
            self.waiting.push(UngreetedConnection {
                stream,
                challenge,
                since: Instant::now(),
                bytes: Vec::new(),
            });
        }
        Ok(())
    }
}

impl UngreetedConnection {
    /// The greeting, once it has arrived completely. Bytes after the greeting stay in the connection.
    fn read(&mut self) -> Result<Option<Hello>> {
        loop {
            let whole = match self.bytes.first_chunk() {
                None => 4,
                Some(&len) => 4 + length(len, MOST_HELLO)?,
            };
            if self.bytes.len() >= 4 && self.bytes.len() == whole {
                return match serde_json::from_slice(&self.bytes[4..])? {
                    Message::Hello(hello) => Ok(Some(hello)),
                    _ => Err(ErrorKind::InvalidData.into()),
                };
            }
            let mut part = vec![0; whole - self.bytes.len()];
            match self.stream.read(&mut part) {
                Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
                Ok(len) => self.bytes.extend(&part[..len]),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(None),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }
}

/// Answers the listening side's challenge, which must arrive within `patience`.
///
/// # Errors
/// When the connection is closed, or the challenge does not arrive in time. `InvalidData` when the message that arrives
/// is not a challenge.
pub(super) fn introduce(
    stream: &mut TcpStream,
    secret: &Secret,
    hello: Hello,
    patience: Duration,
) -> Result<()> {
    let Message::Challenge { nonce } = receive_within(stream, patience)? else {
        return Err(ErrorKind::InvalidData.into());
    };
    stream.set_read_timeout(None)?;
    send(stream, &Message::Hello(secret.sign(&nonce, hello)))
}
