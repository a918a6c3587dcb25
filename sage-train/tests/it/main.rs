//! The command from outside, in one test binary.

mod checkpoints;
mod command;
mod messages;
mod model;
mod runs;
mod support;
