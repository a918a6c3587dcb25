//! Tests of the command-line program, in one test binary.

mod checkpoints;
mod command;
mod data;
mod files;
mod gradients;
mod hf;
mod hostile;
mod hub;
mod layers;
mod linear;
mod messages;
mod model;
mod old_runs;
mod optimizers;
mod ranks;
mod reports;
mod runs;
mod sources;
mod support;
mod sweeps;
mod tasks;
mod tokenizers;
