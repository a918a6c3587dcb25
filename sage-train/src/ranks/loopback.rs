//! Ranks on CPUs: tensors over TCP, each pair of ranks on a connection of its own. It makes real ranks of a few processes on
//! any machine, with the sums of several GPUs in the same order; it is not made for speed.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::Duration;

use candle_core::{Device, Result, Tensor};
use candle_sage::Error;
use safetensors::View;

use super::group::{Group, Rank, Transfer};
use super::meeting::Meeting;
use crate::during;

/// How long a rank waits for the watch to say who is gone, before it says itself that something is.
const WATCH: Duration = Duration::from_secs(8);

/// Connections to all other ranks.
#[derive(Debug)]
pub(super) struct Loopback {
    rank: Rank,
    /// By rank; none to itself.
    peers: Vec<Option<TcpStream>>,
}

impl Loopback {
    /// Connects every rank to every other.
    ///
    /// # Errors
    /// When a rank cannot be reached.
    pub(super) fn connect(meeting: &Meeting) -> candle_sage::Result<Self> {
        let rank = meeting.rank();
        let failed = || "cannot connect the ranks to each other";
        let listener = TcpListener::bind((meeting.address()?, 0)).map_err(during(failed()))?;
        let address = listener.local_addr().map_err(during(failed()))?;
        let addresses = meeting.share("data", &address.to_string())?;
        let mut peers: Vec<Option<TcpStream>> = (0..rank.of).map(|_| None).collect();
        for (index, address) in addresses.iter().enumerate().take(rank.index) {
            let mut stream = TcpStream::connect(address).map_err(during(failed()))?;
            stream.write_all(&(rank.index as u32).to_le_bytes()).map_err(during(failed()))?;
            peers[index] = Some(stream);
        }
        while peers.iter().filter(|peer| peer.is_some()).count() + 1 < rank.of {
            let (mut stream, _) = listener.accept().map_err(during(failed()))?;
            let mut number = [0; 4];
            stream.set_read_timeout(Some(Duration::from_secs(5))).map_err(during(failed()))?;
            // Who does not say a rank that is still missing is none of us.
            if stream.read_exact(&mut number).is_err() {
                continue;
            }
            let index = u32::from_le_bytes(number) as usize;
            if index > rank.index && index < rank.of && peers[index].is_none() {
                stream.set_read_timeout(None).map_err(during(failed()))?;
                peers[index] = Some(stream);
            }
        }
        for stream in peers.iter().flatten() {
            stream.set_nodelay(true).map_err(during(failed()))?;
        }
        Ok(Self { rank, peers })
    }

    /// Sends `to(j)` to each other rank `j`, and returns what each of them sent, `bytes` of it, in their order.
    fn swap(&self, to: &(dyn Fn(usize) -> Tensor + Sync), bytes: usize) -> Result<Vec<Vec<u8>>> {
        let peers =
            || self.peers.iter().enumerate().filter_map(|(index, peer)| Some((index, peer.as_ref()?)));
        let received = std::thread::scope(|scope| -> std::io::Result<Vec<Vec<u8>>> {
            let senders: Vec<_> = peers()
                .map(|(index, mut peer)| scope.spawn(move || peer.write_all(&to(index).data())))
                .collect();
            let mut received = Vec::with_capacity(self.rank.of);
            for (_, mut peer) in peers() {
                let mut part = vec![0; bytes];
                peer.read_exact(&mut part)?;
                received.push(part);
            }
            for sender in senders {
                sender.join().expect("no panic in sending")?;
            }
            Ok(received)
        });
        received.map_err(|error| {
            std::thread::sleep(WATCH);
            Error::new("another rank cannot be reached").got(error).into()
        })
    }
}

/// Puts parts one behind the other.
fn fill(into: &Tensor, parts: &[Vec<u8>]) -> Result<()> {
    let dtype = into.dtype();
    let mut at = 0;
    for bytes in parts {
        let len = bytes.len() / dtype.size_in_bytes();
        into.slice_set(&Tensor::from_raw_buffer(bytes, dtype, &[len], &Device::Cpu)?, 0, at)?;
        at += len;
    }
    Ok(())
}

impl Group for Loopback {
    fn exchange(&self, from: &Tensor, into: &Tensor) -> Result<Transfer> {
        let part = from.elem_count() / self.rank.of;
        let parts = (0..self.rank.of).map(|n| from.narrow(0, n * part, part)?.force_contiguous());
        let parts = parts.collect::<Result<Vec<_>>>()?;
        fill(into, &self.swap(&|index| parts[index].clone(), part * from.dtype().size_in_bytes())?)?;
        Ok(Transfer(0))
    }

    fn gather(&self, part: &Tensor, into: &Tensor) -> Result<Transfer> {
        // Its own copy: the part may be one of those that are written.
        let part = part.force_contiguous()?;
        let mut parts = self.swap(&|_| part.clone(), part.elem_count() * part.dtype().size_in_bytes())?;
        parts.insert(self.rank.index, part.data().into_owned());
        fill(into, &parts)?;
        Ok(Transfer(0))
    }

    /// Everything has come when it was sent.
    fn wait(&self, _: Transfer) -> Result<()> {
        Ok(())
    }
}
