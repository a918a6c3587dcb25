//! The secret that the ranks of a run share. The ranks, rank 0 included, prove that they know the secret. The
//! secret itself is never sent.

use std::fmt::{Debug, Formatter};

use candle_sage::Result;
use rand::TryRngCore;
use rand::rngs::OsRng;
use sha2::{Digest, Sha256};

use super::message::Hello;
use crate::{during, hex};

/// The environment variable that holds the secret.
pub(super) const SECRET: &str = "SAGE_TRAIN_SECRET";

/// SHA-256's block size in bytes. HMAC pads its key to this size.
const BLOCK: usize = 64;

#[derive(Clone, PartialEq, Eq)]
pub(super) struct Secret {
    text: String,
    /// Whether `text` is the id of a Slurm job or torchrun run, which others may know.
    pub(super) is_guessable: bool,
}

/// Omits the secret, so that no message prints it.
impl Debug for Secret {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Secret").field("is_guessable", &self.is_guessable).finish_non_exhaustive()
    }
}

impl Secret {
    /// A secret that the user chose.
    pub(super) fn given(text: String) -> Self {
        Self { text, is_guessable: false }
    }

    /// The number of a job instead of a secret.
    pub(super) fn of_job(number: String) -> Self {
        Self { text: number, is_guessable: true }
    }

    /// The greeting with the proof that its sender knows the secret. The receiver chose `challenge`, so that a recorded
    /// proof is not valid for another connection.
    pub(super) fn sign(&self, challenge: &str, hello: Hello) -> Hello {
        Hello { proof: self.proof(challenge, &hello), ..hello }
    }

    /// Whether the sender of a greeting knows the secret.
    pub(super) fn is_proven(&self, challenge: &str, hello: &Hello) -> bool {
        let (expected, got) = (self.proof(challenge, hello), &hello.proof);
        // Compares all bytes, so that the time does not depend on how many of them are right.
        let differs = expected.bytes().zip(got.bytes()).fold(0, |differs, (a, b)| differs | (a ^ b));
        expected.len() == got.len() && differs == 0
    }

    fn proof(&self, challenge: &str, hello: &Hello) -> String {
        let bare = Hello { proof: String::new(), ..hello.clone() };
        let text = serde_json::to_string(&bare).expect("plain values");
        hex(&hmac(self.text.as_bytes(), format!("{challenge}\n{text}").as_bytes()))
    }
}

/// HMAC-SHA256 (RFC 2104).
fn hmac(key: &[u8], text: &[u8]) -> [u8; 32] {
    let mut block = [0u8; BLOCK];
    match key.len() {
        0..=BLOCK => block[..key.len()].copy_from_slice(key),
        _ => block[..32].copy_from_slice(&Sha256::digest(key)),
    }
    let padded = |with: u8| block.map(|byte| byte ^ with);
    let inner = Sha256::new().chain_update(padded(0x36)).chain_update(text).finalize();
    Sha256::new().chain_update(padded(0x5c)).chain_update(inner).finalize().into()
}

/// 32 random bytes as hexadecimal digits: a secret, or a challenge.
pub(super) fn random() -> Result<String> {
    let mut bytes = [0; 32];
    OsRng.try_fill_bytes(&mut bytes).map_err(during("the system has no random numbers"))?;
    Ok(hex(&bytes))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ranks::Rank;

    #[test]
    fn hmac_is_that_of_rfc_4231() {
        let test_2 = hmac(b"Jefe", b"what do ya want for nothing?");
        assert_eq!(hex(&test_2), "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
        let test_6 = hmac(&[0xaa; 131], b"Test Using Larger Than Block-Size Key - Hash Key First");
        assert_eq!(hex(&test_6), "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54");
    }

    #[test]
    fn a_proof_is_of_one_secret_one_challenge_and_one_greeting() {
        let secret = Secret::given("s".into());
        let hello = Hello::new(Rank { index: 1, of: 2 }, "node", random().expect("numbers"));
        let signed = secret.sign("a", hello.clone());
        assert!(secret.is_proven("a", &signed));
        assert!(!secret.is_proven("b", &signed) && !secret.is_proven("a", &hello));
        assert!(!Secret::given("t".into()).is_proven("a", &signed));
        assert!(!secret.is_proven("a", &Hello { rank: 0, ..signed.clone() }));
        assert!(!secret.is_proven("a", &Hello { nonce: String::new(), ..signed.clone() }));
        assert!(!secret.is_proven("a", &Hello { proof: signed.proof[..62].into(), ..signed }));
        assert_ne!(random(), random());
        assert!(!format!("{secret:?}").contains("\"s\""));
    }
}
