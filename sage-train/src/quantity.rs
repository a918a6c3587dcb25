//! Whole numbers with units, such as `256k` for 262,144.

use std::fmt;
use std::str::FromStr;

use candle_sage::{Error, Result};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// A count. `k`, `m`, `g` and `b` stand for 1024, 1024^2, 1024^3 and 10^9: 64 sequences of 4096 tokens have 256k
/// tokens. A plain number stands for itself, and may have `_` between its digits or an exponent (`1e6`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Quantity(pub u64);

impl FromStr for Quantity {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let plain: String = text.trim().to_ascii_lowercase().chars().filter(|c| *c != '_').collect();
        let (digits, unit) = match plain.strip_suffix(['k', 'm', 'g', 'b']) {
            Some(digits) => (digits, &plain[digits.len()..]),
            None => (plain.as_str(), ""),
        };
        let unit: u64 = match unit {
            "k" => 1 << 10,
            "m" => 1 << 20,
            "g" => 1 << 30,
            "b" => 1_000_000_000,
            _ => 1,
        };
        let value = match digits.contains(['.', 'e']) {
            _ if !digits.starts_with(|c: char| c.is_ascii_digit()) => None,
            false => digits.parse::<u64>().ok().and_then(|n| n.checked_mul(unit)),
            // With a unit, the count is rounded: 2.1m is 2,202,010. A fraction without a unit is an error.
            true => digits
                .parse::<f64>()
                .ok()
                .map(|x| x * unit as f64)
                .filter(|x| (x.fract() == 0.0 || unit > 1) && *x < 1e18)
                .map(|x| x.round() as u64),
        };
        value.map(Quantity).ok_or_else(|| {
            Error::new("not a count")
                .got(format!("`{text}`"))
                .allowed("a whole number, such as 300 or 1e6, or a number with k (1024), m (1024k), g (1024m) or b (a \
                          billion)")
                .hint("256k is 262,144: 64 sequences of 4096")
        })
    }
}

impl fmt::Display for Quantity {
    /// The number in the largest of the units `g`, `m` and `k` that divides it. The text parses to the same number.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (shift, unit) in [(30, "g"), (20, "m"), (10, "k")] {
            if self.0 > 0 && self.0.trailing_zeros() >= shift {
                return write!(f, "{}{unit}", self.0 >> shift);
            }
        }
        write!(f, "{}", self.0)
    }
}

impl Serialize for Quantity {
    /// A number, or text if it has a unit: `300`, `"64k"`.
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        let text = self.to_string();
        // TOML's integers are signed.
        match i64::try_from(self.0).ok().filter(|_| text.bytes().all(|byte| byte.is_ascii_digit())) {
            Some(number) => serializer.serialize_i64(number),
            None => serializer.serialize_str(&text),
        }
    }
}

impl<'de> Deserialize<'de> for Quantity {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        struct Visitor;

        impl serde::de::Visitor<'_> for Visitor {
            type Value = Quantity;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a count, such as 1000 or \"256k\"")
            }

            fn visit_u64<E: serde::de::Error>(self, n: u64) -> std::result::Result<Quantity, E> {
                Ok(Quantity(n))
            }

            fn visit_i64<E: serde::de::Error>(self, n: i64) -> std::result::Result<Quantity, E> {
                self.visit_str(&n.to_string())
            }

            fn visit_f64<E: serde::de::Error>(self, x: f64) -> std::result::Result<Quantity, E> {
                self.visit_str(&x.to_string())
            }

            fn visit_str<E: serde::de::Error>(self, text: &str) -> std::result::Result<Quantity, E> {
                text.parse().map_err(E::custom)
            }
        }
        deserializer.deserialize_any(Visitor)
    }
}

/// Bytes in GiB.
pub fn gib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 30)
}

/// A number of things as text: `1 document`, `1,200 documents`.
pub fn counted(n: u64, noun: &str) -> String {
    format!("{} {noun}{}", grouped(n), if n == 1 { "" } else { "s" })
}

/// Groups digits by threes: `1234567` as `1,234,567`.
pub fn grouped(n: u64) -> String {
    let digits = n.to_string();
    let mut out = String::new();
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_units_and_plain_numbers() {
        for (text, value) in [
            ("256k", 262_144),
            ("2m", 2_097_152),
            ("2M", 2_097_152),
            ("1g", 1 << 30),
            ("1.5k", 1536),
            ("0", 0),
            ("1_000", 1000),
            ("78B", 78_000_000_000),
            ("1e6", 1_000_000),
            ("2.1M", 2_202_010),
        ] {
            assert_eq!(text.parse(), Ok(Quantity(value)), "{text}");
        }
        for bad in [
            "",
            "k",
            "-1",
            "1.3",
            "x",
            "1kk",
            "1t",
            "1.5e0",
            "e6",
            "1e19",
            "99999999999g",
            "1,5k",
            "262,144",
            "inf",
            "nan",
        ] {
            assert!(bad.parse::<Quantity>().is_err(), "{bad}");
        }
    }

    #[test]
    fn files_have_numbers_where_there_is_no_unit() {
        let json = |n: u64| serde_json::to_value(Quantity(n)).expect("plain");
        assert_eq!((json(300), json(65_536)), (300.into(), "64k".into()));
        assert!(json(u64::MAX).is_string(), "TOML's integers are signed");
        for n in [0, 300, 65_536, u64::MAX] {
            assert_eq!(serde_json::from_value::<Quantity>(json(n)).expect("a quantity"), Quantity(n));
        }
    }

    #[test]
    fn prints_what_reads_back() {
        for n in [0, 1, 1000, 1024, 1536, 262_144, 2_097_152, 1 << 30, u64::MAX] {
            assert_eq!(Quantity(n).to_string().parse(), Ok(Quantity(n)));
        }
        assert_eq!(Quantity(262_144).to_string(), "256k");
        assert_eq!(grouped(1_234_567), "1,234,567");
        assert_eq!([0, 1, 1200].map(|n| counted(n, "run")), ["0 runs", "1 run", "1,200 runs"]);
    }
}
