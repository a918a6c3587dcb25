//! The `sage-train` command.

use std::process::ExitCode;

use sage_train::cli::{Cli, exit_code};

/// Tokenizing takes 1.5 times as long with the system's allocator as with mimalloc.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    let code = match Cli::typed().run() {
        Ok(()) => 0,
        Err(error) => {
            sage_train::notify(&format!("error: {error}"));
            exit_code(&error)
        }
    };
    sage_train::ranks::end(code);
    ExitCode::from(code)
}
