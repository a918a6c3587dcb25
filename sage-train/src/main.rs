//! The `sage-train` command.

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
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
        // A panic has already been printed.
        Ok(Err(_)) => ExitCode::from(101),
        Err(error) => {
            eprintln!("error: cannot start a thread: {error}");
            ExitCode::FAILURE
        }
    }
}
