//! The command from outside, in one test binary.

mod command;
mod messages;
mod runs;
mod support;
