//! The transport for ranks on CPUs: TCP, with one connection for each pair of ranks. It runs a few ranks on
//! any machine, with sums in the same order as on several GPUs, and is not made for speed.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::Duration;

use candle_core::{Device, Result, Tensor};
use candle_sage::Error;
use safetensors::View;

use super::meeting::Meeting;
use super::transport::{Swap, Transfer, Transport};
use crate::during;

/// How long a rank with a broken connection leaves it to the threads of [`Meeting`] to name the dead rank and
/// end the process, before it reports an error of its own.
const WATCH: Duration = Duration::from_secs(8);

/// Connections to all other ranks.
#[derive(Debug)]
pub(super) struct Loopback {
    /// By rank; `None` for this rank.
    peers: Vec<Option<TcpStream>>,
}

impl Loopback {
    /// Connects every pair of ranks.
    ///
    /// # Errors
    /// When a rank cannot be reached.
    pub(super) fn connect(meeting: &Meeting) -> candle_sage::Result<Self> {
        let rank = meeting.rank();
        let failed = || "cannot connect the ranks to each other";
        let listener = TcpListener::bind((meeting.address()?, 0)).map_err(during(failed()))?;
        let address = listener.local_addr().map_err(during(failed()))?;
        let addresses = meeting.share("data", &address.to_string());
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
            // A connection that does not introduce itself as one of the missing ranks is dropped.
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
        Ok(Self { peers })
    }
}

impl Transport for Loopback {
    fn swap(&self, swaps: &[Swap]) -> Result<Transfer> {
        // The data is copied, because a tensor that is sent may share storage with one that is received into.
        let copies = |swap: &Swap| swap.sent.iter().map(Tensor::force_contiguous).collect::<Result<Vec<_>>>();
        let sent = swaps.iter().map(copies).collect::<Result<Vec<_>>>()?;
        let peer = |swap: &Swap| self.peers[swap.peer].as_ref().expect("another rank");
        let received = std::thread::scope(|scope| -> std::io::Result<Vec<Vec<Vec<u8>>>> {
            let sends = swaps.iter().zip(&sent).map(|(swap, sent)| {
                let mut peer = peer(swap);
                scope.spawn(move || sent.iter().try_for_each(|sent| peer.write_all(&sent.data())))
            });
            let senders: Vec<_> = sends.collect();
            let receive = |swap: &Swap, comes: &Tensor| {
                let mut bytes = vec![0; comes.elem_count() * comes.dtype().size_in_bytes()];
                peer(swap).read_exact(&mut bytes).map(|()| bytes)
            };
            let receives =
                swaps.iter().map(|swap| swap.comes.iter().map(|comes| receive(swap, comes)).collect());
            let received = receives.collect();
            for sender in senders {
                sender.join().expect("no panic in sending")?;
            }
            received
        });
        let received = received.map_err(|error| {
            std::thread::sleep(WATCH);
            Error::new("another rank cannot be reached").got(error)
        })?;
        for (comes, bytes) in swaps.iter().flat_map(|swap| &swap.comes).zip(received.into_iter().flatten()) {
            let came = Tensor::from_raw_buffer(&bytes, comes.dtype(), comes.dims(), &Device::Cpu)?;
            comes.slice_set(&came, 0, 0)?;
        }
        Ok(Transfer(0))
    }

    /// Transfers complete within `swap`.
    fn wait(&self, _: Transfer) -> Result<()> {
        Ok(())
    }
}
