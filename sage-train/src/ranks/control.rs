//! One TCP connection between rank 0 and each other rank, kept until the other rank exits. Over these connections ranks
//! identify themselves, exchange text, and detect that a rank has died.

mod joining;
mod rank_progress;

use std::collections::BTreeMap;
use std::net::{IpAddr, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use candle_sage::{Error, Result};

use joining::{connect_to_first, wait_for_all};
use rank_progress::RankProgress;

use super::greeting::introduce;
use super::mesh::Rank;
use super::message::{Hello, Message, receive, send};
use super::secret::Secret;
use super::world::World;
use crate::{during, notify, signals};

/// Interval between heartbeats.
const BEAT: Duration = Duration::from_secs(1);

/// If a rank sends no heartbeat for this long, its machine has failed or its process is stopped.
const SILENCE: Duration = Duration::from_secs(30);

/// How long a rank may go without progress before its first micro-batch, while it makes the model, connects GPUs and
/// loads kernels.
const FIRST: Duration = Duration::from_secs(600);

/// How long the report of a failure ([`LastWord`]) may take.
const LAST_WORD: Duration = Duration::from_secs(4);

/// Largest number of ranks that a message lists.
const NAMED: usize = 10;

/// Exit code if a process of the run has died or hangs: a restart of the run may succeed (`EX_TEMPFAIL` of
/// sysexits.h).
pub(super) const LOST: i32 = 75;

/// A connection to another rank.
#[derive(Debug)]
struct Peer {
    rank: usize,
    host: String,
    /// The mutex keeps messages from interleaving.
    stream: Mutex<TcpStream>,
    progress: Mutex<RankProgress>,
}

/// A function that is called before [`ControlConnection`] ends this process because of a failure. Its argument is the
/// reason.
pub(super) type LastWord = Box<dyn FnOnce(&str) + Send>;

struct Shared {
    rank: Rank,
    host: String,
    secret: Secret,
    stall: Duration,
    /// On rank 0 the connections to all other ranks; on other ranks the connection to rank 0.
    peers: Vec<Peer>,
    progress: Mutex<RankProgress>,
    ticks: AtomicU64,
    /// What ranks announced to each other: for each topic, one text from each rank, or `None` before it arrives.
    board: Mutex<BTreeMap<String, Vec<Option<String>>>>,
    news: Condvar,
    /// Whether this rank has left the run and has stopped watching the others.
    left: AtomicBool,
    /// Whether a failure is ending this process. Exits of other ranks because of this failure are not separate
    /// failures.
    ending: AtomicBool,
    last_word: Mutex<Option<LastWord>>,
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shared").field("rank", &self.rank).finish_non_exhaustive()
    }
}

#[derive(Debug)]
pub(super) struct ControlConnection {
    shared: Arc<Shared>,
    /// By topic: the number of calls.
    topics: Mutex<BTreeMap<String, u64>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl ControlConnection {
    /// Connects to the other ranks. `stall` is how long a rank may go without progress once the steps have
    /// begun.
    ///
    /// # Errors
    /// When the other ranks do not connect in time, or belong to another version or another run.
    pub(super) fn join(world: &World, stall: Duration) -> Result<Self> {
        let host = gethostname::gethostname().to_string_lossy().into_owned();
        let peers = match world.rank.is_first() {
            true => wait_for_all(world)?,
            false => vec![connect_to_first(world, &host, SILENCE.min(stall))?],
        };
        let shared = Arc::new(Shared {
            rank: world.rank,
            host,
            secret: world.secret.clone(),
            stall,
            peers,
            progress: Mutex::new(RankProgress::new()),
            ticks: AtomicU64::new(0),
            board: Mutex::default(),
            news: Condvar::new(),
            left: AtomicBool::new(false),
            ending: AtomicBool::new(false),
            last_word: Mutex::default(),
        });
        for peer in 0..shared.peers.len() {
            let stream =
                lock(&shared.peers[peer].stream).try_clone().map_err(during("cannot connect the ranks"))?;
            let shared = shared.clone();
            start("ranks", move || shared.listen(peer, stream))?;
        }
        let beating = shared.clone();
        start("ranks-watch", move || beating.watch())?;
        Ok(Self { shared, topics: Mutex::default() })
    }

    pub(super) fn rank(&self) -> Rank {
        self.shared.rank
    }

    pub(super) fn secret(&self) -> &Secret {
        &self.shared.secret
    }

    /// Sends this rank's greeting over a connection to another rank.
    ///
    /// # Errors
    /// When the other side is not a rank, or has disconnected.
    pub(super) fn introduce(&self, stream: &mut TcpStream) -> std::io::Result<()> {
        let Shared { rank, host, secret, .. } = &*self.shared;
        introduce(stream, secret, Hello::new(*rank, host, String::new()), SILENCE)
    }

    /// The address of this machine at which the other ranks reach it.
    ///
    /// # Errors
    /// When the connection is closed.
    pub(super) fn address(&self) -> Result<IpAddr> {
        let address = lock(&self.shared.peers[0].stream).local_addr();
        Ok(address.map_err(during("the connection to another rank is closed"))?.ip())
    }

    /// An all-gather of text on a topic: the text of each rank, in the order of the ranks. All ranks must make the same
    /// number of calls on each topic. The death of another rank ends this process.
    pub(super) fn share(&self, topic: &str, text: &str) -> Vec<String> {
        let topic = {
            let mut topics = lock(&self.topics);
            let count = topics.entry(topic.to_owned()).or_default();
            *count += 1;
            format!("{topic} {count}")
        };
        let shared = &self.shared;
        shared.note(&topic, shared.rank.index, text.to_owned());
        if !shared.rank.is_first() {
            shared.send_to(0, &Message::Text { topic: topic.clone(), text: text.to_owned() });
        }
        let mut board = lock(&shared.board);
        loop {
            if board.get(&topic).is_some_and(|texts| texts.iter().all(Option::is_some)) {
                return board.remove(&topic).into_iter().flatten().flatten().collect();
            }
            board = shared.news.wait(board).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Checks that all ranks pass the same text as rank 0.
    ///
    /// # Errors
    /// When a rank passes another text; the error names the rank and its machine.
    pub(super) fn agree(&self, what: &str, text: &str) -> Result<()> {
        let texts = self.share(what, &format!("{}\n{text}", self.shared.host));
        let parts: Vec<(&str, &str)> =
            texts.iter().map(|texts| texts.split_once('\n').unwrap_or((texts, ""))).collect();
        let Some(other) = (1..parts.len()).find(|&rank| parts[rank].1 != parts[0].1) else { return Ok(()) };
        // The first line that differs shows the setting that differs.
        let (mut first, mut theirs) = (parts[0].1.lines(), parts[other].1.lines());
        let (expected, got) = loop {
            match (first.next(), theirs.next()) {
                (a, b) if a == b && a.is_some() => {}
                (a, b) => break (a.unwrap_or("nothing"), b.unwrap_or("nothing")),
            }
        };
        Err(Error::failed(format!("rank {other} differs from rank 0 in its {what}"))
            .got(format!("{got} on rank {other} on {}", parts[other].0))
            .allowed(format!("{expected}, as on rank 0 on {}", parts[0].0))
            .hint("every rank needs the same command, the same data and the same version of this program"))
    }

    /// Counts a batch of training or validation as progress. The next heartbeat reports the count.
    pub(super) fn tick(&self) {
        self.shared.ticks.fetch_add(1, Ordering::Relaxed);
    }

    /// Sets this rank's activity, which may take hours if `aside` is true. Returns the previous activity and `aside`.
    pub(super) fn set_activity(&self, what: &str, aside: bool) -> (String, bool) {
        let mut progress = lock(&self.shared.progress);
        let before = (progress.doing.clone(), progress.aside);
        let (step, ticks) = (progress.step, self.shared.ticks.load(Ordering::Relaxed));
        progress.record(step, ticks, what.to_owned(), aside);
        before
    }

    /// Sets the step that begins, from 1.
    pub(super) fn step(&self, step: u64, what: &str) {
        let ticks = self.shared.ticks.load(Ordering::Relaxed);
        lock(&self.shared.progress).record(step, ticks, what.to_owned(), false);
    }

    pub(super) fn at_end(&self, last_word: LastWord) {
        *lock(&self.shared.last_word) = Some(last_word);
    }

    /// Leaves the run. At the regular end of the run `failed` is `None`; otherwise it is an error, which ends the other
    /// ranks too.
    pub(super) fn leave(&self, failed: Option<&Error>) {
        let shared = &self.shared;
        shared.left.store(true, Ordering::Relaxed);
        let message = match failed {
            None => Message::Bye,
            Some(error) => Message::Failed { why: error.to_string() },
        };
        (0..shared.peers.len()).for_each(|peer| shared.send_to(peer, &message));
    }
}

fn start(name: &str, work: impl FnOnce() + Send + 'static) -> Result<()> {
    let started = std::thread::Builder::new().name(name.into()).spawn(work);
    started.map(drop).map_err(during("cannot watch the ranks"))
}

impl Shared {
    /// Sends a message to a peer. A failure is ignored: the thread that listens to this peer notices the
    /// broken connection.
    fn send_to(&self, peer: usize, message: &Message) {
        let _ = send(&mut *lock(&self.peers[peer].stream), message);
    }

    /// Records a rank's text. When all ranks have sent their text on a topic, rank 0 sends all texts to the others.
    fn note(&self, topic: &str, rank: usize, text: String) {
        let mut board = lock(&self.board);
        let texts = board.entry(topic.to_owned()).or_insert_with(|| vec![None; self.rank.of]);
        texts[rank] = Some(text);
        if self.rank.is_first() && texts.iter().all(Option::is_some) {
            let texts = texts.iter().flatten().cloned().collect();
            let all = Message::All { topic: topic.to_owned(), texts };
            (0..self.peers.len()).for_each(|peer| self.send_to(peer, &all));
        }
        self.news.notify_all();
    }

    /// Receives messages from one peer until its connection closes.
    fn listen(&self, peer: usize, mut stream: TcpStream) {
        let of = &self.peers[peer];
        loop {
            match receive(&mut stream) {
                Ok(Message::Beat { step, ticks, doing, aside }) => {
                    lock(&of.progress).record(step, ticks, doing, aside);
                }
                Ok(Message::Text { topic, text }) if self.rank.is_first() => self.note(&topic, of.rank, text),
                Ok(Message::All { topic, texts }) if texts.len() == self.rank.of => {
                    *lock(&self.board).entry(topic).or_default() = texts.into_iter().map(Some).collect();
                    self.news.notify_all();
                }
                Ok(Message::Bye) => lock(&of.progress).left = true,
                Ok(Message::Failed { why }) => {
                    let why = format!("rank {} on {} stopped: {why}", of.rank, of.host);
                    return self.end(&why, 1);
                }
                Ok(Message::Over { why, code }) => return self.end(&why, code),
                Ok(_) => return self.lose(peer, "sent an invalid message"),
                Err(_) if lock(&of.progress).left || self.left.load(Ordering::Relaxed) => return,
                Err(_) => return self.lose(peer, "has disconnected"),
            }
        }
    }

    /// Sends heartbeats, and checks the heartbeats of the other ranks.
    fn watch(&self) {
        loop {
            std::thread::sleep(BEAT.min(self.stall / 4));
            if self.left.load(Ordering::Relaxed) {
                return;
            }
            let own = {
                let mut progress = lock(&self.progress);
                let ticks = self.ticks.load(Ordering::Relaxed);
                let (step, doing, aside) = (progress.step, progress.doing.clone(), progress.aside);
                progress.record(step, ticks, doing, aside);
                progress.clone()
            };
            // From the first step on, the training loop itself checks whether the launcher has exited, and then saves
            // a checkpoint.
            if own.step == 0 && signals::is_orphan() {
                return self.end("the process that started the ranks has exited", LOST);
            }
            let beat = Message::Beat {
                step: own.step,
                ticks: own.ticks,
                doing: own.doing.clone(),
                aside: own.aside,
            };
            (0..self.peers.len()).for_each(|peer| self.send_to(peer, &beat));
            let lives: Vec<RankProgress> =
                self.peers.iter().map(|peer| lock(&peer.progress).clone()).collect();
            let silence = SILENCE.min(self.stall);
            if let Some(peer) =
                lives.iter().position(|progress| !progress.left && progress.heard.elapsed() > silence)
            {
                let seconds = lives[peer].heard.elapsed().as_secs();
                return self.lose(peer, &format!("sent no heartbeat for {seconds} s"));
            }
            // If one rank hangs, the others wait for it and make no progress. The rank that hangs is one of the
            // ranks with the lowest step number.
            let limit = if own.ticks == 0 { FIRST.max(self.stall) } else { self.stall };
            let all = || lives.iter().chain([&own]).filter(|progress| !progress.left);
            if self.rank.is_first() && all().all(|progress| progress.is_stalled(limit)) {
                let behind = all().map(|progress| progress.step).min().unwrap_or(0);
                let some_are_ahead = all().any(|progress| progress.step > behind);
                let peer = lives.iter().position(|progress| !progress.left && progress.step == behind);
                let why = format!("made no progress for {} s", limit.as_secs());
                return match peer.filter(|_| some_are_ahead && own.step > behind) {
                    Some(peer) => self.lose(peer, &why),
                    None if some_are_ahead => {
                        self.end(&format!("rank 0 on {} {why}, it was at {}", self.host, own.place()), LOST)
                    }
                    None => self.end(&format!("the ranks {why}, rank 0 was at {}", own.place()), LOST),
                };
            }
        }
    }

    fn lose(&self, peer: usize, what: &str) {
        let peer = &self.peers[peer];
        let progress = lock(&peer.progress).clone();
        let (ago, place, here) =
            (progress.heard.elapsed().as_secs(), progress.place(), lock(&self.progress).place());
        self.end(
            &format!(
                "rank {} on {} {what}; last heartbeat {ago} s ago at {place}, this rank was at {here}",
                peer.rank, peer.host
            ),
            LOST,
        );
    }

    /// Ends this process and, on rank 0, all others, so that no rank waits for a dead rank. Only the first failure is
    /// reported, not the connections that break because of it.
    fn end(&self, why: &str, code: i32) {
        if self.ending.swap(true, Ordering::Relaxed) {
            // Another thread is reporting the first failure, and then ends the process. If a file system hangs
            // meanwhile, this thread ends the process.
            std::thread::sleep(LAST_WORD);
            signal_hook::low_level::exit(code);
        }
        if self.rank.is_first() {
            let over = Message::Over { why: why.to_owned(), code };
            (0..self.peers.len()).for_each(|peer| self.send_to(peer, &over));
        }
        let hint =
            if code == LOST { "\n  hint:    --resume continues from the newest checkpoint" } else { "" };
        notify(&format!("error: {why}{hint}"));
        if let Some(last_word) = lock(&self.last_word).take() {
            last_word(why);
        }
        // Exits without the exit handlers of the GPU's libraries, which may wait for the dead rank.
        signal_hook::low_level::exit(code);
    }
}
