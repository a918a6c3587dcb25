//! How ranks come to know each other: rank 0 waits, the others connect and say who they are.

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::net::{TcpListener, TcpStream};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use candle_sage::{Error, Result};

use super::{LOST, Life, NAMED, Peer, lock};
use crate::ranks::message::{Message, receive, receive_hello, send};
use crate::ranks::world::World;
use crate::{during, signals, tell};

/// How long ranks wait for the others to connect.
const COMING: Duration = Duration::from_secs(300);

/// On rank 0: waits until all other ranks have connected.
pub(super) fn wait_for_all(world: &World) -> Result<Vec<Peer>> {
    let failed = |error: std::io::Error| {
        Error::new("cannot wait for the other ranks")
            .got(format!("port {}: {error}", world.port))
            .allowed("a port that nobody has")
            .hint("does another run use it? MASTER_PORT names one for torchrun; a job of its own has its own under srun")
    };
    // If all ranks are on this machine, the port is not opened to the network.
    let own = ["127.0.0.1", "localhost"].contains(&world.host.as_str());
    let listener =
        TcpListener::bind((if own { "127.0.0.1" } else { "0.0.0.0" }, world.port)).map_err(failed)?;
    listener.set_nonblocking(true).map_err(failed)?;
    let began = Instant::now();
    let mut peers: BTreeMap<usize, Peer> = BTreeMap::new();
    while peers.len() + 1 < world.rank.of {
        if began.elapsed() > COMING {
            return Err(missing(world, &peers));
        }
        check_parent()?;
        let mut stream = match listener.accept() {
            Ok((stream, _)) => stream,
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                std::thread::sleep(Duration::from_millis(5));
                continue;
            }
            Err(error) if error.kind() == ErrorKind::ConnectionAborted => continue,
            Err(error) => return Err(failed(error)),
        };
        let hello = stream.set_nonblocking(false).and_then(|()| receive_hello(&mut stream));
        // A connection that does not introduce itself as a rank is ignored.
        let Ok(Message::Hello { version, rank, of, host }) = hello else { continue };
        let refused = if version != VERSION {
            Some(format!("rank {rank} on {host} is version {version}, rank 0 is {VERSION}"))
        } else if of != world.rank.of {
            Some(format!("rank {rank} on {host} is one of {of}, rank 0 one of {}", world.rank.of))
        } else if rank == 0 || rank >= of || peers.contains_key(&rank) {
            Some(format!("there are two ranks {rank}, the second on {host}"))
        } else {
            None
        };
        if let Some(why) = refused {
            let over = Message::Over { why: why.clone(), code: 1 };
            let _ = send(&mut stream, &over);
            peers.values().for_each(|peer| drop(send(&mut *lock(&peer.stream), &over)));
            return Err(Error::new("the ranks do not fit together")
                .got(why)
                .allowed("ranks of one run")
                .hint("start all of them with one command"));
        }
        peers.insert(rank, peer(rank, host, stream)?);
    }
    let host = gethostname::gethostname().to_string_lossy().into_owned();
    for peer in peers.values() {
        // A rank's time of silence starts now, because ranks send no heartbeats before all have connected.
        *lock(&peer.life) = Life::new();
        let welcome =
            Message::Hello { version: VERSION.into(), rank: 0, of: world.rank.of, host: host.clone() };
        let _ = send(&mut *lock(&peer.stream), &welcome);
    }
    Ok(peers.into_values().collect())
}

/// Checks that the launcher lives, since without it no further ranks will be started.
fn check_parent() -> Result<()> {
    match signals::is_orphan() {
        true => Err(Error::new("the process that started the ranks is gone")),
        false => Ok(()),
    }
}

const VERSION: &str = env!("CARGO_PKG_VERSION");

fn peer(rank: usize, host: String, stream: TcpStream) -> Result<Peer> {
    let ready = stream.set_read_timeout(None).and_then(|()| stream.set_nodelay(true));
    // A peer that accepts no data for 5 s counts as dead: the thread that listens to it will report that.
    let ready = ready.and_then(|()| stream.set_write_timeout(Some(Duration::from_secs(5))));
    ready.map_err(during("cannot meet the ranks"))?;
    Ok(Peer { rank, host, stream: Mutex::new(stream), life: Mutex::new(Life::new()) })
}

fn missing(world: &World, peers: &BTreeMap<usize, Peer>) -> Error {
    let missing = (1..world.rank.of).filter(|rank| !peers.contains_key(rank));
    let named: Vec<String> = missing.take(NAMED).map(|rank| rank.to_string()).collect();
    let more = match world.rank.of - 1 - peers.len() - named.len() {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    Error::new("ranks did not come")
        .got(format!("no rank {}{more} after {} s", named.join(", "), COMING.as_secs()))
        .allowed(format!("{} ranks", world.rank.of))
        .hint(format!("do they reach {} at port {}? Their own output may say more", world.host, world.port))
}

/// On the other ranks: connects to rank 0, which may start later than they.
pub(super) fn go_to_first(world: &World, host: &str) -> Result<Peer> {
    let began = Instant::now();
    let failed = |got: String| {
        Error::new("cannot reach rank 0")
            .got(format!("{} at port {}: {got}", world.host, world.port))
            .allowed("rank 0 there, in the same run")
            .hint("MASTER_ADDR and MASTER_PORT say where; does it run, and may it be reached?")
    };
    let hello = Message::Hello {
        version: VERSION.into(),
        rank: world.rank.index,
        of: world.rank.of,
        host: host.into(),
    };
    loop {
        let tried = TcpStream::connect((world.host.as_str(), world.port));
        match tried.and_then(|mut stream| send(&mut stream, &hello).map(|()| stream)) {
            Ok(mut stream) => {
                // Twice the time, because rank 0 may have started to wait when this rank connected.
                let ready = stream.set_read_timeout(Some(2 * COMING));
                return match ready.and_then(|()| receive(&mut stream)) {
                    Ok(Message::Hello { rank: 0, of, host, .. }) if of == world.rank.of => {
                        peer(0, host, stream)
                    }
                    Ok(Message::Over { why, .. }) => Err(failed(why)),
                    Ok(_) => Err(failed("something that is not this program".into())),
                    Err(error) if error.kind() == ErrorKind::InvalidData => {
                        Err(failed("something that is not this program".into()))
                    }
                    Err(error) if [ErrorKind::WouldBlock, ErrorKind::TimedOut].contains(&error.kind()) => {
                        Err(failed(format!("no answer for {} s", (2 * COMING).as_secs())))
                    }
                    Err(error) => {
                        // Rank 0 was reachable, and died before all ranks had connected.
                        tell(&format!("error: rank 0 on {} is gone: {error}", world.host));
                        signal_hook::low_level::exit(LOST)
                    }
                };
            }
            Err(error) if began.elapsed() > COMING => return Err(failed(error.to_string())),
            Err(_) => {
                check_parent()?;
                std::thread::sleep(Duration::from_millis(20));
            }
        }
    }
}
