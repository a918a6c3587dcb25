//! How ranks connect: rank 0 listens, and the other ranks connect and identify themselves.

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::net::{IpAddr, TcpListener, TcpStream};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use candle_sage::{Error, Result};

use super::{LOST, NAMED, Peer, RankProgress, lock};
use crate::ranks::greeting::{GreetedConnection, GreetingListener, introduce};
use crate::ranks::message::{Hello, Message, VERSION, receive, send};
use crate::ranks::secret::random;
use crate::ranks::world::World;
use crate::{during, notify, signals};

/// How long ranks wait for the others to connect.
const COMING: Duration = Duration::from_secs(300);

/// The refusal that a connection without the run's secret receives.
const OTHER_SECRET: &str = "rank 0 has another secret: SAGE_TRAIN_SECRET, or by default the ID of the job (Slurm) or of the run (torchrun), must be the same on all ranks";

fn cannot_listen(world: &World) -> impl Fn(std::io::Error) -> Error {
    let place = format!("{} at port {}", world.host, world.port);
    move |error| {
        Error::failed("cannot wait for the other ranks")
            .got(format!("{place}: {error}"))
            .allowed("a free port at an address of this machine")
            .hint("if another run uses the port, change MASTER_PORT (torchrun: --master-port); under srun each job has a separate port")
    }
}

/// Listens only at the address that the other ranks were given. If other machines cannot reach rank 0 at this address,
/// rank 0 reports the problem and listens at all addresses.
fn listen(world: &World) -> std::io::Result<TcpListener> {
    let everywhere = |why: &str| {
        notify(&format!("rank 0 listens at all addresses of this machine: {} {why}", world.host));
        TcpListener::bind(("0.0.0.0", world.port))
    };
    // On Debian, the machine's name resolves to 127.0.1.1, which other machines cannot reach. If `host` is itself
    // `localhost` or a loopback address, rank 0 listens at it.
    let is_name = world.host != "localhost" && world.host.parse::<IpAddr>().is_err();
    let elsewhere = world.local.of < world.rank.of;
    match TcpListener::bind((world.host.as_str(), world.port)) {
        Ok(listener) if is_name && elsewhere && listener.local_addr()?.ip().is_loopback() => {
            drop(listener);
            everywhere("is a loopback address here, which other machines cannot reach")
        }
        Err(error) if error.kind() == ErrorKind::AddrNotAvailable => everywhere("is not one of them"),
        bound => bound,
    }
}

/// On rank 0: waits until all other ranks have connected.
pub(super) fn wait_for_all(world: &World) -> Result<Vec<Peer>> {
    let failed = cannot_listen(world);
    let listener = listen(world).map_err(&failed)?;
    if world.secret.is_guessable && !listener.local_addr().map_err(&failed)?.ip().is_loopback() {
        notify(
            "the ranks are protected only by the ID of the job or run: set SAGE_TRAIN_SECRET to keep out users who know the ID",
        );
    }
    let mut greetings = GreetingListener::new(listener, &world.secret).map_err(&failed)?;
    let began = Instant::now();
    // By rank: the connection, and the nonce that rank 0 signs to prove that it knows the secret.
    let mut peers: BTreeMap<usize, (Peer, String)> = BTreeMap::new();
    let mut strangers = 0;
    while peers.len() + 1 < world.rank.of {
        if began.elapsed() > COMING {
            return Err(missing(world, &peers, strangers));
        }
        check_parent()?;
        let Some(GreetedConnection { mut stream, hello, is_proven }) = greetings.next().map_err(&failed)?
        else {
            std::thread::sleep(Duration::from_millis(5));
            continue;
        };
        // A connection without the secret neither ends the run nor counts as a rank.
        if !is_proven {
            let _ = send(&mut stream, &Message::Over { why: OTHER_SECRET.into(), code: 1 });
            if strangers == 0 {
                let from = stream.peer_addr().map_or("an unknown address".into(), |from| from.to_string());
                notify(&format!(
                    "warning: a connection from {from} does not have the run's secret and is refused"
                ));
            }
            strangers += 1;
            continue;
        }
        if let Some(why) = refusal(world, &hello, peers.contains_key(&hello.rank)) {
            let over = Message::Over { why: why.clone(), code: 1 };
            let _ = send(&mut stream, &over);
            peers.values().for_each(|(peer, _)| drop(send(&mut *lock(&peer.stream), &over)));
            return Err(Error::new("the ranks do not match")
                .got(why)
                .allowed("ranks of one run, with the same version of sage-train")
                .hint("start all ranks with one command"));
        }
        let Hello { rank, host, nonce, .. } = hello;
        peers.insert(rank, (peer(rank, host, stream)?, nonce));
    }
    let host = gethostname::gethostname().to_string_lossy().into_owned();
    for (peer, nonce) in peers.values() {
        // The timeout for heartbeats starts here, because ranks send none before all have connected.
        *lock(&peer.progress) = RankProgress::new();
        let welcome = world.secret.sign(nonce, Hello::new(world.rank, &host, String::new()));
        let _ = send(&mut *lock(&peer.stream), &Message::Hello(welcome));
    }
    Ok(peers.into_values().map(|(peer, _)| peer).collect())
}

/// Why rank 0 refuses the rank that sent `hello`; `None` if rank 0 accepts the rank.
fn refusal(world: &World, hello: &Hello, is_there: bool) -> Option<String> {
    let Hello { version, rank, of, host, .. } = hello;
    if version != VERSION {
        Some(format!("rank {rank} on {host} is version {version}, rank 0 is {VERSION}"))
    } else if *of != world.rank.of {
        Some(format!("rank {rank} on {host} expects {of} ranks, rank 0 expects {}", world.rank.of))
    } else if *rank == 0 || rank >= of || is_there {
        Some(format!("there are two ranks {rank}, the second on {host}"))
    } else {
        None
    }
}

/// Checks that the launcher is running: without it no further ranks will be started.
fn check_parent() -> Result<()> {
    match signals::is_orphan() {
        true => Err(Error::failed("the process that started the ranks has exited")),
        false => Ok(()),
    }
}

fn peer(rank: usize, host: String, stream: TcpStream) -> Result<Peer> {
    let ready = stream.set_read_timeout(None).and_then(|()| stream.set_nodelay(true));
    // Each write to a peer that accepts no data fails after 5 s.
    let ready = ready.and_then(|()| stream.set_write_timeout(Some(Duration::from_secs(5))));
    ready.map_err(during("cannot connect the ranks"))?;
    Ok(Peer { rank, host, stream: Mutex::new(stream), progress: Mutex::new(RankProgress::new()) })
}

fn missing<T>(world: &World, peers: &BTreeMap<usize, T>, strangers: usize) -> Error {
    let missing = (1..world.rank.of).filter(|rank| !peers.contains_key(rank));
    let named: Vec<String> = missing.take(NAMED).map(|rank| rank.to_string()).collect();
    let more = match world.rank.of - 1 - peers.len() - named.len() {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    let refused = match strangers {
        0 => String::new(),
        refused => {
            format!("; {refused} other connections were refused, because they did not know the run's secret")
        }
    };
    Error::failed("ranks did not connect")
        .got(format!("after {} s without rank {}{more}{refused}", COMING.as_secs(), named.join(", ")))
        .allowed(format!("{} ranks", world.rank.of))
        .hint(format!(
            "check that these ranks can reach {} at port {}; their output may say more",
            world.host, world.port
        ))
}

fn unreachable_first(world: &World, got: impl std::fmt::Display) -> Error {
    Error::failed("cannot reach rank 0")
        .got(format!("{} at port {}: {got}", world.host, world.port))
        .allowed("rank 0 of the same run at this address")
        .hint("check that rank 0 is running and reachable; MASTER_ADDR and MASTER_PORT set its address")
}

const ANOTHER_PROGRAM: &str = "something that is not this program";

/// Called on every rank except rank 0: connects to rank 0, even if it starts later. Once connected, rank 0 must answer
/// within `patience`.
pub(super) fn connect_to_first(world: &World, host: &str, patience: Duration) -> Result<Peer> {
    let began = Instant::now();
    loop {
        let nonce = random()?;
        let hello = Hello::new(world.rank, host, nonce.clone());
        let failure = match TcpStream::connect((world.host.as_str(), world.port)) {
            Ok(mut stream) => match introduce(&mut stream, &world.secret, hello, patience) {
                Ok(()) => return wait_for_welcome(world, stream, &nonce),
                Err(error) if error.kind() == ErrorKind::InvalidData => {
                    return Err(unreachable_first(world, ANOTHER_PROGRAM));
                }
                // Rank 0 answers a connection at once, so a timeout suggests another program.
                Err(error) if is_timeout(&error) => {
                    let got =
                        format!("no answer for {} s: another program may have the port", patience.as_secs());
                    return Err(unreachable_first(world, got));
                }
                // A connection that closes without an answer is tried again.
                Err(error) => error,
            },
            Err(error) => error,
        };
        if began.elapsed() > COMING {
            return Err(unreachable_first(world, failure));
        }
        check_parent()?;
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn is_timeout(error: &std::io::Error) -> bool {
    [ErrorKind::WouldBlock, ErrorKind::TimedOut].contains(&error.kind())
}

/// Waits for the welcome, which rank 0 sends when all ranks have connected.
fn wait_for_welcome(world: &World, mut stream: TcpStream, nonce: &str) -> Result<Peer> {
    // Rank 0 waits up to `COMING` for all ranks. This rank waits longer, so that rank 0 reports missing ranks first.
    let ready = stream.set_read_timeout(Some(2 * COMING));
    match ready.and_then(|()| receive(&mut stream)) {
        Ok(Message::Hello(hello)) if hello.rank == 0 && hello.of == world.rank.of => {
            match world.secret.is_proven(nonce, &hello) {
                true => peer(0, hello.host, stream),
                false => Err(unreachable_first(world, "a rank 0 without the run's secret")),
            }
        }
        Ok(Message::Over { why, .. }) => Err(unreachable_first(world, why)),
        Ok(_) => Err(unreachable_first(world, ANOTHER_PROGRAM)),
        Err(error) if error.kind() == ErrorKind::InvalidData => {
            Err(unreachable_first(world, ANOTHER_PROGRAM))
        }
        Err(error) if is_timeout(&error) => {
            Err(unreachable_first(world, format!("no answer for {} s", (2 * COMING).as_secs())))
        }
        Err(error) => {
            // Rank 0 was reachable, and died before all ranks had connected.
            notify(&format!("error: rank 0 on {} has disconnected: {error}", world.host));
            signal_hook::low_level::exit(LOST)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ranks::Rank;
    use crate::ranks::secret::Secret;

    /// Rank 0 ends the run if a rank with the run's secret has another version than rank 0, expects another number of
    /// ranks, or claims to be rank 0.
    #[test]
    fn ranks_of_another_version_or_number_are_refused() {
        let free = TcpListener::bind(("127.0.0.1", 0)).and_then(|free| free.local_addr()).expect("a port");
        let rank = |index, of| Rank { index, of };
        let world = World {
            rank: rank(0, 2),
            local: rank(0, 2),
            host: "127.0.0.1".into(),
            port: free.port(),
            secret: Secret::given("s".into()),
            launcher: "a test",
        };
        let hello = |rank| Hello::new(rank, "node", random().expect("numbers"));
        for (hello, expected) in [
            (
                Hello { version: "0.0.1".into(), ..hello(rank(1, 2)) },
                "rank 1 on node is version 0.0.1, rank 0 is",
            ),
            (hello(rank(1, 3)), "rank 1 on node expects 3 ranks, rank 0 expects 2"),
            (hello(rank(0, 2)), "there are two ranks 0"),
        ] {
            let first = world.clone();
            let waiting = std::thread::spawn(move || wait_for_all(&first).map(drop));
            let mut stream = loop {
                match TcpStream::connect((world.host.as_str(), world.port)) {
                    Ok(stream) => break stream,
                    Err(_) => std::thread::sleep(Duration::from_millis(5)),
                }
            };
            introduce(&mut stream, &world.secret, hello, COMING).expect("a challenge");
            let Ok(Message::Over { why, code: 1 }) = receive(&mut stream) else {
                panic!("not refused: {expected}")
            };
            assert!(why.contains(expected), "{why}");
            let error = waiting.join().expect("no panic").expect_err("refused").to_string();
            assert!(error.contains(expected) && error.contains("hint:"), "{error}");
        }
    }
}
