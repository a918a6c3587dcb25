//! The transport for ranks on CPUs: TCP, with one connection for each pair of ranks. It runs a few ranks on any
//! machine, with sums in the same order as on several GPUs, and is not optimized for speed.

use std::cell::{Cell, RefCell};
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::Duration;

use candle_core::{DType, Device, Result, Tensor};
use safetensors::View;

use super::control::ControlConnection;
use super::greeting::{GreetedConnection, GreetingListener};
use super::transport::{Swap, Transfer, Transport, wait_for_report};
use crate::during;

/// NaN in both formats of FP8.
const FP8_NAN: u8 = 0x7f;

#[derive(Debug)]
pub(super) struct Loopback {
    /// By rank; `None` for this rank.
    peers: Vec<Option<TcpStream>>,
    /// Received data of transfers that have not been waited for: the number of the transfer, the destination and the
    /// values. As on a GPU, the destination must not be read before the wait; it contains NaN until then.
    coming: RefCell<Vec<(u64, Tensor, Tensor)>>,
    transfers: Cell<u64>,
}

impl Loopback {
    /// Connects every pair of ranks.
    ///
    /// # Errors
    /// When a rank cannot be reached.
    pub(super) fn connect(connection: &ControlConnection) -> candle_sage::Result<Self> {
        let rank = connection.rank();
        let failed = || "cannot connect the ranks to each other";
        let listener = TcpListener::bind((connection.address()?, 0)).map_err(during(failed()))?;
        let address = listener.local_addr().map_err(during(failed()))?;
        let addresses = connection.share("data", &address.to_string());
        let mut peers: Vec<Option<TcpStream>> = (0..rank.of).map(|_| None).collect();
        for (index, address) in addresses.iter().enumerate().take(rank.index) {
            let connected = TcpStream::connect(address)
                .and_then(|mut stream| connection.introduce(&mut stream).map(|()| stream))
                .map_err(|error| wait_for_report(during(failed())(error)))?;
            peers[index] = Some(connected);
        }
        let mut greetings = GreetingListener::new(listener, connection.secret()).map_err(during(failed()))?;
        while peers.iter().filter(|peer| peer.is_some()).count() + 1 < rank.of {
            match greetings.next().map_err(during(failed()))? {
                // Keeps the first connection of each higher rank, and drops all other connections.
                Some(GreetedConnection { stream, hello, is_proven: true })
                    if (rank.index + 1..rank.of).contains(&hello.rank) && peers[hello.rank].is_none() =>
                {
                    peers[hello.rank] = Some(stream);
                }
                Some(_) => {}
                None => std::thread::sleep(Duration::from_millis(5)),
            }
        }
        for stream in peers.iter().flatten() {
            stream.set_nodelay(true).map_err(during(failed()))?;
        }
        Ok(Self { peers, coming: RefCell::default(), transfers: Cell::default() })
    }
}

impl Transport for Loopback {
    fn swap(&self, swaps: &[Swap]) -> Result<Transfer> {
        self.transfers.set(self.transfers.get() + 1);
        let number = self.transfers.get();
        // The data is copied, because a tensor that is sent may share storage with a tensor to receive into.
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
        let received =
            received.map_err(|error| wait_for_report(during("another rank cannot be reached")(error)))?;
        for (comes, bytes) in swaps.iter().flat_map(|swap| &swap.comes).zip(received.into_iter().flatten()) {
            let came = Tensor::from_raw_buffer(&bytes, comes.dtype(), comes.dims(), &Device::Cpu)?;
            let unread = match comes.dtype() {
                DType::U8 => Tensor::full(FP8_NAN, comes.dims(), &Device::Cpu)?,
                float => Tensor::full(f32::NAN, comes.dims(), &Device::Cpu)?.to_dtype(float)?,
            };
            comes.slice_set(&unread, 0, 0)?;
            self.coming.borrow_mut().push((number, comes.clone(), came));
        }
        Ok(Transfer(number))
    }

    fn wait(&self, transfer: Transfer) -> Result<()> {
        let mut coming = self.coming.borrow_mut();
        let (came, later) = std::mem::take(&mut *coming).into_iter().partition(|(of, ..)| *of <= transfer.0);
        *coming = later;
        let came: Vec<_> = came;
        came.iter().try_for_each(|(_, place, values)| place.slice_set(values, 0, 0))
    }
}
