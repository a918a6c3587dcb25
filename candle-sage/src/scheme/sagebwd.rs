//! Settings of SageBwd, INT8 attention for training (arXiv 2603.02170; first described in 2505.11594).

use super::{KeyMean, Smoothing};
use crate::error::{Error, Result};

/// SageBwd runs six of attention's seven matmuls in INT8 with exact accumulation (INT32; on the CPU, f32 sums below
/// 2^24), and `dP = dO V^T` in 16 bit. (`S = Q K^T` counts twice, in the forward and in the backward.) [`Int8Products`]
/// can keep more matmuls in floating point. The table shows the default [`Granularity`].
///
/// | matmul | left operand, its scales | right operand, its scales |
/// |---|---|---|
/// | `S = Q K^T` | Q, one per tile | K minus its token mean, one per tile |
/// | `O = P V` | P, one per row of each tile | V (minus its token mean with [`Smoothing::Kv`]), one per tile |
/// | `dV = P^T dO` | P, one per key of each tile | dO, one per channel of each tile |
/// | `dP = dO V^T` | dO, 16 bit | V, 16 bit |
/// | `dQ = dS K` | dS, one per query of each tile | K, the forward's INT8 values |
/// | `dK = dS^T Q` | dS, one per key of each tile | Q, the forward's INT8 values |
///
/// An INT8 value is `round(x * 127 / max|x|)`, with the maximum over the values that share a scale and without an
/// additive epsilon; a group of zeros has scale 0. Scales and the log-sum-exp are f32.
///
/// On Hopper GPUs the forward quantizes P to unsigned values, 0 to 254, with one scale per query and pair of key tiles.
/// Before that, it multiplies P of each tile by `s / m`: `s` is the scale of the tile's V, `m` the pair's larger `s`.
/// O's error is a tenth smaller than with signed values at standard deviation 1 of Q and K, and not larger at 3 to 10.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_sage::{Attention, SageBwd, Scheme};
///
/// let x = || Tensor::randn(0f32, 1., (1, 64, 2, 32), &Device::Cpu);
/// let (q, k, v) = (x()?, x()?, x()?);
/// let exact = Attention::new(Scheme::Unquantized).apply(&q, &k, &v)?;
/// let coded = Attention::new(SageBwd::default().tile_q(32)).apply(&q, &k, &v)?;
/// let error = ((coded - &exact)?.sqr()?.sum_all()? / exact.sqr()?.sum_all()?)?.to_scalar::<f32>()?;
/// assert!(0.0 < error.sqrt() && error.sqrt() < 0.05);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct SageBwd {
    /// Operands whose mean over tokens is subtracted before quantizing.
    pub smoothing: Smoothing,
    /// The tokens over which K's mean is taken.
    pub key_mean: KeyMean,
    /// Matmuls that run in INT8.
    pub products: Int8Products,
    /// How many rows or columns of P, dS and dO share a scale in the backward.
    pub granularity: Granularity,
    /// Rows of a query tile, 16 to 256. Each tile of Q and dO is quantized separately.
    pub tile_q: usize,
    /// Rows of a key tile, 16 to 256. Each tile of K and V is quantized separately.
    pub tile_k: usize,
}

impl Default for SageBwd {
    fn default() -> Self {
        Self {
            smoothing: Smoothing::default(),
            key_mean: KeyMean::default(),
            products: Int8Products::default(),
            granularity: Granularity::default(),
            tile_q: 64,
            tile_k: 64,
        }
    }
}

/// The matmuls that run in INT8. The forward's `S = Q K^T` always runs in INT8. `dP = dO V^T` always runs in 16 bit, as
/// in the paper (arXiv 2603.02170).
///
/// Matmuls whose cell in the table is empty are unquantized: they use Q, V, dO, P, dS, and K minus its mean (see
/// [`Smoothing`]), in f32 on the CPU, and in 16 bit with f32 accumulators on CUDA.
///
/// | set | `O` | `S` of the backward | `dV` | `dQ` | `dK` | |
/// |---|---|---|---|---|---|---|
/// | [`PAPER`](Self::PAPER) | INT8 | INT8 | INT8 | INT8 | INT8 | the paper's algorithms 1 and 2 |
/// | [`FORWARD_AND_S`](Self::FORWARD_AND_S) | INT8 | INT8 | | | | the paper's forward, and a backward with the same P |
/// | [`SCORES`](Self::SCORES) | | INT8 | | | | only S, in the forward and in the backward |
/// | [`FORWARD`](Self::FORWARD) | INT8 | | | | | the paper's forward, with an unquantized backward |
///
/// `FORWARD_AND_S` has only the error of the paper's forward, and `SCORES` has only the error of quantizing Q
/// and K. Each further INT8 matmul adds error, but not always speed: quantizing P and dS can take longer than their
/// INT8 matmuls save. If Q and K are large (standard deviation 3 or more), the gradients' errors with `FORWARD`, whose
/// backward recomputes S without quantization, are at least 1.6 times as large as with `PAPER`.
/// `docs/sagebwd_products.md` has measured errors and speeds.
///
/// A set is written as `paper`, `forward-and-s`, `scores`, `forward`, or a list that begins with `forward` (`S` and `O`
/// of the forward) or with `scores`: `forward,s,dv,dk`, `scores,dv`. CUDA supports the named sets, the CPU all sets.
///
/// ```
/// use candle_sage::Int8Products;
///
/// let set: Int8Products = "forward,s,dv".parse()?;
/// assert!(set.s && set.dv && !set.dq && !set.dk);
/// assert_eq!("forward,s".parse::<Int8Products>()?, Int8Products::FORWARD_AND_S);
/// assert!("forward,dp".parse::<Int8Products>().is_err());
/// # Ok::<(), candle_sage::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Int8Products {
    /// `O = P V`, in the forward.
    pub o: bool,
    /// `S = Q K^T`, recomputed in the backward.
    pub s: bool,
    /// `dV = P^T dO`.
    pub dv: bool,
    /// `dQ = dS K`.
    pub dq: bool,
    /// `dK = dS^T Q`.
    pub dk: bool,
}

impl Int8Products {
    /// All five optional matmuls.
    pub const PAPER: Self = Self { o: true, s: true, dv: true, dq: true, dk: true };
    /// `O`, and `S` of the backward.
    pub const FORWARD_AND_S: Self = Self { s: true, ..Self::FORWARD };
    /// Only `S` of the forward and `S` of the backward.
    pub const SCORES: Self = Self { o: false, ..Self::FORWARD_AND_S };
    /// Only the forward's `S` and `O`.
    pub const FORWARD: Self = Self { o: true, s: false, dv: false, dq: false, dk: false };

    const NAMED: [(&'static str, Self); 4] = [
        ("paper", Self::PAPER),
        ("forward-and-s", Self::FORWARD_AND_S),
        ("scores", Self::SCORES),
        ("forward", Self::FORWARD),
    ];

    /// Sets whether `dV = P^T dO` is in INT8.
    #[must_use]
    pub const fn dv(self, dv: bool) -> Self {
        Self { dv, ..self }
    }

    /// Sets whether `dQ = dS K` is in INT8.
    #[must_use]
    pub const fn dq(self, dq: bool) -> Self {
        Self { dq, ..self }
    }

    /// Sets whether `dK = dS^T Q` is in INT8.
    #[must_use]
    pub const fn dk(self, dk: bool) -> Self {
        Self { dk, ..self }
    }

    fn listed(self) -> [(&'static str, bool); 4] {
        [("s", self.s), ("dv", self.dv), ("dq", self.dq), ("dk", self.dk)]
    }

    /// Whether the backward quantizes P, dS or dO.
    fn quantizes_gradients(self) -> bool {
        self.dv || self.dq || self.dk
    }
}

impl Default for Int8Products {
    fn default() -> Self {
        Self::PAPER
    }
}

impl std::fmt::Display for Int8Products {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if let Some((name, _)) = Self::NAMED.iter().find(|(_, set)| set == self) {
            return f.write_str(name);
        }
        // `scores` includes S, so `s` is not listed after it.
        f.write_str(if self.o { "forward" } else { "scores" })?;
        let listed = Self { s: self.s && self.o, ..*self };
        listed.listed().iter().filter(|(_, on)| *on).try_for_each(|(name, _)| write!(f, ",{name}"))
    }
}

impl std::str::FromStr for Int8Products {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        if let Some((_, set)) = Self::NAMED.iter().find(|(name, _)| *name == text) {
            return Ok(*set);
        }
        let mut words = text.split(',').map(str::trim);
        let first = words.next();
        let mut set = if first == Some("scores") { Self::SCORES } else { Self::FORWARD };
        let known = matches!(first, Some("forward" | "scores"))
            && words.all(|word| {
                let product = match word {
                    "s" => &mut set.s,
                    "dv" => &mut set.dv,
                    "dq" => &mut set.dq,
                    "dk" => &mut set.dk,
                    _ => return false,
                };
                !std::mem::replace(product, true)
            });
        known.then_some(set).ok_or_else(|| {
            Error::new("unknown set of INT8 matmuls")
                .got(format!("`{text}`"))
                .allowed("paper, forward-and-s, scores, forward; or a comma-separated list: `forward` or `scores`, then any of s, dv, dq, dk")
                .hint("`scores` includes s; dP never runs in INT8")
        })
    }
}

/// The number of vectors that share one scale when the backward quantizes P, dS and dO.
///
/// A vector contains values that a matmul sums over, because these must share a scale. A vector is a query row of dS
/// for dQ, a key column of dS for dK, and a key column of P or a channel of dO for dV.
///
/// ```
/// use candle_sage::Granularity;
///
/// let granularity: Granularity = "group-8".parse()?;
/// assert_eq!(granularity, Granularity::Group(8));
/// assert!("group-65".parse::<Granularity>().is_err());
/// # Ok::<(), candle_sage::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Granularity {
    /// One scale per vector. Only this gives the SageBwd paper's gradient accuracy at standard deviation 1 of Q and K.
    #[default]
    Vector,
    /// One scale per group of this many adjacent vectors (2 to 64).
    Group(usize),
    /// One scale per tile, as the SageBwd paper describes.
    Tile,
}

impl Granularity {
    /// The number of vectors that share a scale in a tile of `extent` vectors.
    ///
    /// ```
    /// use candle_sage::Granularity;
    ///
    /// let all = [Granularity::Vector, Granularity::Group(8), Granularity::Tile];
    /// assert_eq!(all.map(|granularity| granularity.vectors(64)), [1, 8, 64]);
    /// ```
    pub fn vectors(self, extent: usize) -> usize {
        match self {
            Granularity::Vector => 1,
            Granularity::Group(size) => size.min(extent).max(1),
            Granularity::Tile => extent.max(1),
        }
    }
}

impl std::fmt::Display for SageBwd {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { smoothing, key_mean, products, granularity, tile_q, tile_k } = self;
        write!(f, "SageBwd, smoothing {smoothing}, ")?;
        if *key_mean != KeyMean::All {
            write!(f, "mean of {key_mean}, ")?;
        }
        if *products != Int8Products::PAPER {
            write!(f, "products {products}, ")?;
        }
        write!(f, "granularity {granularity}, tiles {tile_q}x{tile_k}")
    }
}

impl std::fmt::Display for Granularity {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Granularity::Vector => f.write_str("vector"),
            Granularity::Group(size) => write!(f, "group-{size}"),
            Granularity::Tile => f.write_str("tile"),
        }
    }
}

impl std::str::FromStr for Granularity {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let parsed = match text {
            "vector" => Some(Granularity::Vector),
            "tile" => Some(Granularity::Tile),
            _ => text.strip_prefix("group-").and_then(|n| n.parse().ok()).map(Granularity::Group),
        };
        parsed.filter(|granularity| granularity.in_range()).ok_or_else(|| {
            Error::new("unknown scale granularity")
                .got(format!("`{text}`"))
                .allowed("vector, tile, group-2 to group-64")
                .hint("vector is the most accurate; tile follows the paper's text")
        })
    }
}

impl Granularity {
    fn in_range(self) -> bool {
        !matches!(self, Granularity::Group(size) if !(2..=64).contains(&size))
    }
}

impl SageBwd {
    /// Sets [`SageBwd::smoothing`].
    #[must_use]
    pub fn smoothing(self, smoothing: Smoothing) -> Self {
        Self { smoothing, ..self }
    }

    /// Sets [`SageBwd::key_mean`].
    #[must_use]
    pub fn key_mean(self, key_mean: KeyMean) -> Self {
        Self { key_mean, ..self }
    }

    /// Sets [`SageBwd::products`].
    #[must_use]
    pub fn products(self, products: Int8Products) -> Self {
        Self { products, ..self }
    }

    /// Sets [`SageBwd::granularity`].
    #[must_use]
    pub fn granularity(self, granularity: Granularity) -> Self {
        Self { granularity, ..self }
    }

    /// Sets [`SageBwd::tile_q`].
    #[must_use]
    pub fn tile_q(self, rows: usize) -> Self {
        Self { tile_q: rows, ..self }
    }

    /// Sets [`SageBwd::tile_k`].
    #[must_use]
    pub fn tile_k(self, rows: usize) -> Self {
        Self { tile_k: rows, ..self }
    }

    /// Every setting, as its name and its value as text.
    pub(super) fn as_text(&self) -> Vec<(&'static str, String)> {
        let Self { smoothing, key_mean, products, granularity, tile_q, tile_k } = self;
        vec![
            ("smoothing", smoothing.to_string()),
            ("key-mean", key_mean.to_string()),
            ("products", products.to_string()),
            ("granularity", granularity.to_string()),
            ("tile-q", tile_q.to_string()),
            ("tile-k", tile_k.to_string()),
        ]
    }

    /// Allowed numbers of rows of a tile. The upper bound keeps `127^2 * rows` below 2^24, so that f32 sums of INT8
    /// products over the rows are exact.
    pub const TILE_ROWS: std::ops::RangeInclusive<usize> = 16..=256;

    /// Checks the settings.
    ///
    /// ```
    /// use candle_sage::{Granularity, Int8Products, SageBwd};
    ///
    /// let tile = SageBwd::default().granularity(Granularity::Tile);
    /// assert!(tile.validate().is_ok());
    /// // Where the backward quantizes nothing, a granularity has no effect.
    /// assert!(tile.products(Int8Products::FORWARD).validate().is_err());
    /// ```
    ///
    /// # Errors
    /// When the size of a tile, of a group of vectors or of the key mean's sample is out of range; when neither
    /// `products.o` nor `products.s` is set; when a non-default granularity, key mean or smoothing has no effect.
    pub fn validate(&self) -> Result<()> {
        for (name, rows) in [("tile_q", self.tile_q), ("tile_k", self.tile_k)] {
            if !Self::TILE_ROWS.contains(&rows) {
                return Err(Error::new(format!("{name} is out of range"))
                    .got(rows)
                    .allowed(format!("{} to {}", Self::TILE_ROWS.start(), Self::TILE_ROWS.end()))
                    .hint("64 is the default"));
            }
        }
        if !self.granularity.in_range() {
            return Err(Error::new("the group size of the granularity is out of range")
                .got(self.granularity)
                .allowed("group-2 to group-64")
                .hint("Granularity::Vector has one scale per vector, Granularity::Tile one per tile"));
        }
        if !self.key_mean.in_range() {
            return Err(Error::new("the sample for K's mean is out of range")
                .got(self.key_mean)
                .allowed("sample-1 to sample-4096")
                .hint("KeyMean::Sample(64) averages 64 tokens, KeyMean::All all tokens"));
        }
        if self.key_mean != KeyMean::All && self.smoothing == Smoothing::None {
            return Err(Error::new("without smoothing this mean of K has no effect")
                .got(format!("key_mean {}, smoothing {}", self.key_mean, self.smoothing))
                .allowed("smoothing k, qk or kv; or key_mean all")
                .hint("smoothing subtracts a mean; key_mean says over which tokens it is taken"));
        }
        if self.smoothing.of_values() && !self.products.o {
            return Err(Error::new("this smoothing has no effect with these products")
                .got(format!("smoothing {}, products {}", self.smoothing, self.products))
                .allowed(
                    "smoothing kv with products that have O = P V in INT8: paper, forward-and-s, forward",
                )
                .hint("if V is not quantized, Smoothing::K gives the same result"));
        }
        if !self.products.o && !self.products.s {
            return Err(Error::new("these products have neither O nor the backward's S in INT8")
                .got(format!("products {} with s = false", self.products))
                .allowed("products with s or o, such as Int8Products::SCORES")
                .hint("add s: the backward then recomputes S from the forward's INT8 values"));
        }
        if self.granularity != Granularity::Vector && !self.products.quantizes_gradients() {
            return Err(Error::new("this granularity has no effect with these products")
                .got(format!("granularity {}, products {}", self.granularity, self.products))
                .allowed("granularity vector; or products with dv, dq or dk")
                .hint("granularity sets how many values share a scale of P, dS and dO in the backward"));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn products_print_and_parse() {
        for bits in 0..32 {
            let [o, s, dv, dq, dk] = [1, 2, 4, 8, 16].map(|bit| bits & bit != 0);
            let set = Int8Products { o, s, dv, dq, dk };
            // A set is valid if it contains O or the backward's S.
            assert_eq!(SageBwd::default().products(set).validate().is_ok(), o || s, "{set}");
            if o || s {
                assert_eq!(set.to_string().parse(), Ok(set), "{set}");
            }
        }
        assert_eq!("scores,dk".parse(), Ok(Int8Products::SCORES.dk(true)));
        assert_eq!("forward,s".parse(), Ok(Int8Products::FORWARD_AND_S));
        assert_eq!("forward, dk, s, dq, dv".parse(), Ok(Int8Products::PAPER));
        for bad in ["", "s", "forward,", "forward,dp", "forward,s,s", "paper,s", "Forward", "scores,s"] {
            assert!(bad.parse::<Int8Products>().is_err(), "{bad}");
        }
    }

    #[test]
    fn granularity_prints_and_parses() {
        for granularity in [Granularity::Vector, Granularity::Group(8), Granularity::Tile] {
            assert_eq!(granularity.to_string().parse(), Ok(granularity));
        }
        for bad in ["", "group-", "group-0", "group-1", "group-65", "row"] {
            assert!(bad.parse::<Granularity>().is_err(), "{bad}");
        }
    }
}
