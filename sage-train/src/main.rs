//! The `sage-train` command.

use std::process::ExitCode;

use sage_train::cli::Cli;

/// Half of the time of tokenizing is allocation: with the system's allocator it takes half as long again.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    let code = match Cli::typed().run() {
        Ok(()) => 0,
        Err(error) => {
            sage_train::tell(&format!("error: {error}"));
            // Shells report the same code for a program that a signal ended.
            sage_train::signals::received().map_or(1, |signal| 128 + signal)
        }
    };
    sage_train::ranks::end(code);
    ExitCode::from(code)
}
