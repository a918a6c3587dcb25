//! Ranges of numbers that were typed.

use candle_sage::{Error, Result};

/// Checks that a number is above zero, also as the f32 that it becomes.
///
/// # Errors
/// When it is not.
pub fn above_zero(name: &str, value: f64) -> Result<f64> {
    if value as f32 > 0.0 && (value as f32).is_finite() {
        return Ok(value);
    }
    Err(Error::new(format!("{name} is out of range"))
        .got(value)
        .allowed("a number above 0 that f32 can hold")
        .hint(format!("--{name}")))
}

/// Checks that a number lies between two others.
///
/// # Errors
/// When it does not.
pub fn in_range(name: &str, value: f64, low: f64, high: f64) -> Result<f64> {
    if (low..=high).contains(&value) {
        return Ok(value);
    }
    Err(Error::new(format!("{name} is out of range"))
        .got(value)
        .allowed(format!("{low} to {high}"))
        .hint(format!("--{name}")))
}

/// Checks that a count lies between two others.
///
/// # Errors
/// When it does not.
pub fn whole(name: &str, value: u64, low: u64, high: u64) -> Result<u64> {
    if (low..=high).contains(&value) {
        return Ok(value);
    }
    Err(Error::new(format!("{name} is out of range"))
        .got(value)
        .allowed(if high == u64::MAX { format!("{low} and up") } else { format!("{low} to {high}") })
        .hint(format!("--{name}")))
}
