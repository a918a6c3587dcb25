//! The `sage-train` command.

use std::io::Write;
use std::process::ExitCode;

use sage_train::cli::Cli;

/// Tokenizing is half allocation: with the system's allocator it takes half as long again.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    match Cli::typed().run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tell(&error);
            // As a shell says it of a program that a signal ended.
            sage_train::signals::received().map_or(ExitCode::FAILURE, |signal| ExitCode::from(128 + signal))
        }
    }
}

/// Prints an error. Nobody reading it changes nothing.
fn tell(error: &dyn std::fmt::Display) {
    let _ = writeln!(std::io::stderr(), "error: {error}");
}
