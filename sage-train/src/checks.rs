//! Range checks of numbers from the command line and settings files.

use candle_sage::{Error, Result};

/// Checks that a number is finite and above zero, also after rounding to f32.
///
/// # Errors
/// When the number is not finite, or not above zero.
pub fn above_zero(name: &str, value: f64) -> Result<f64> {
    if value as f32 > 0.0 && (value as f32).is_finite() {
        return Ok(value);
    }
    Err(Error::new(format!("{name} is out of range"))
        .got(value)
        .allowed("a number above 0 that f32 can hold")
        .hint(format!("set --{name} to an allowed value")))
}

/// Checks that a number is in a closed interval.
///
/// # Errors
/// When the number is outside the interval.
pub fn in_range<T: PartialOrd + std::fmt::Display>(name: &str, value: T, low: T, high: T) -> Result<T> {
    if low <= value && value <= high {
        return Ok(value);
    }
    Err(Error::new(format!("{name} is out of range"))
        .got(value)
        .allowed(format!("{low} to {high}"))
        .hint(format!("set --{name} to an allowed value")))
}

/// The value of a setting that every preset fills in.
///
/// # Panics
/// When a preset lacks the setting, which a test of the presets detects.
pub fn need<T>(setting: Option<T>) -> T {
    setting.expect("presets fill in every setting that is not optional")
}

/// Checks that a seed is at most 2^63 - 1: the settings are saved as TOML, whose integers are signed.
///
/// # Errors
/// When the seed is larger.
pub fn seed(name: &str, seed: u64) -> Result<u64> {
    in_range(name, seed, 0, i64::MAX as u64)
}
