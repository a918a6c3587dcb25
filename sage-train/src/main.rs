//! The `sage-train` command.

use std::io::Write;
use std::process::ExitCode;

use clap::Parser;
use sage_train::cli::Cli;

fn main() -> ExitCode {
    let cli = Cli::parse();
    // Backward recurses once for each node between the loss and the first layer.
    const STACK: usize = 256 << 20;
    let worker = std::thread::Builder::new().stack_size(STACK).spawn(move || cli.run());
    match worker.map(std::thread::JoinHandle::join) {
        Ok(Ok(Ok(()))) => ExitCode::SUCCESS,
        Ok(Ok(Err(error))) => {
            tell(&error);
            ExitCode::FAILURE
        }
        // A panic has already been printed.
        Ok(Err(_)) => ExitCode::from(101),
        Err(error) => {
            tell(&format_args!("cannot start a thread: {error}"));
            ExitCode::FAILURE
        }
    }
}

/// Prints an error. Nobody reading it changes nothing.
fn tell(error: &dyn std::fmt::Display) {
    let _ = writeln!(std::io::stderr(), "error: {error}");
}
