//! Everything that can be checked from outside, in one test binary.

mod attention;
mod messages;
mod modules;
mod ops;
mod reference;
mod sagebwd;
mod support;
