//! SIGINT and SIGTERM: the first asks to stop, the second stops.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use candle_sage::Result;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag;

use crate::during;

static RECEIVED: OnceLock<Arc<AtomicUsize>> = OnceLock::new();

/// From now on the first signal is noted for [`received`], and a second one ends the program at once.
///
/// # Errors
/// When the system does not take a handler.
pub fn watch() -> Result<()> {
    let (once, received) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
    if RECEIVED.set(received.clone()).is_err() {
        return Ok(());
    }
    for signal in [SIGINT, SIGTERM] {
        // In this order: the first signal finds the flag down, and raises it.
        flag::register_conditional_shutdown(signal, 128 + signal, once.clone())
            .and_then(|_| flag::register(signal, once.clone()))
            .and_then(|_| flag::register_usize(signal, received.clone(), signal as usize))
            .map_err(during("cannot watch for signals"))?;
    }
    Ok(())
}

/// The signal that asked to stop.
pub fn received() -> Option<u8> {
    let signal = RECEIVED.get()?.load(Ordering::Relaxed);
    (signal != 0).then_some(signal as u8)
}
