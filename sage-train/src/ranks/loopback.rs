//! Ranks on CPUs: tensors over TCP, each pair of ranks on a connection of its own. It makes real ranks of a few processes on
//! any machine, with the sums of several GPUs in the same order; it is not made for speed.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::Duration;

use candle_core::{Device, Result, Tensor};
use candle_sage::Error;
use safetensors::View;

use super::group::{Group, Rank};
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
        let listener = TcpListener::bind(("0.0.0.0", 0)).map_err(during(failed()))?;
        let port = listener.local_addr().map_err(during(failed()))?.port();
        let addresses = meeting.share("data", &format!("{}:{port}", meeting.address()?))?;
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

    /// Sends bytes `to(j)` to each rank `j`, and fills part `i` of `into` with what rank `i` sent.
    fn swap(&self, to: &(dyn Fn(usize) -> Tensor + Sync), into: &Tensor) -> Result<()> {
        let (dtype, part) = (into.dtype(), into.elem_count() / self.rank.of);
        let received = std::thread::scope(|scope| -> std::io::Result<Vec<Vec<u8>>> {
            let senders: Vec<_> = self
                .peers
                .iter()
                .enumerate()
                .filter_map(|(index, peer)| Some((index, peer.as_ref()?)))
                .map(|(index, mut peer)| scope.spawn(move || peer.write_all(&to(index).data())))
                .collect();
            let mut received = Vec::with_capacity(self.rank.of);
            for (index, peer) in self.peers.iter().enumerate() {
                received.push(match peer.as_ref() {
                    None => to(index).data().into_owned(),
                    Some(mut peer) => {
                        let mut bytes = vec![0; part * dtype.size_in_bytes()];
                        peer.read_exact(&mut bytes)?;
                        bytes
                    }
                });
            }
            for sender in senders {
                sender.join().expect("no panic in sending")?;
            }
            Ok(received)
        });
        let received = received.map_err(|error| {
            std::thread::sleep(WATCH);
            candle_core::Error::from(Error::new("another rank cannot be reached").got(error))
        })?;
        for (index, bytes) in received.iter().enumerate() {
            into.slice_set(&Tensor::from_raw_buffer(bytes, dtype, &[part], &Device::Cpu)?, 0, index * part)?;
        }
        Ok(())
    }
}

impl Group for Loopback {
    fn rank(&self) -> Rank {
        self.rank
    }

    fn exchange(&self, from: &Tensor, into: &Tensor) -> Result<()> {
        let part = from.elem_count() / self.rank.of;
        let parts = (0..self.rank.of).map(|n| from.narrow(0, n * part, part)?.force_contiguous());
        let parts = parts.collect::<Result<Vec<_>>>()?;
        self.swap(&|index| parts[index].clone(), into)
    }

    fn gather(&self, part: &Tensor, into: &Tensor) -> Result<()> {
        // Its own copy: the part may be one of those that are written.
        let part = part.force_contiguous()?;
        self.swap(&|_| part.clone(), into)
    }
}
