//! SLA2 for tokens that follow earlier tokens: keys, values and the tail's state are kept from call to call.

use candle_core::{D, DType, Device, Result, Tensor};
use candle_nn::kv_cache::KvCache;
use candle_nn::ops::{sigmoid, softmax};

use super::{Router, Sla2, Tail};
use crate::error::Error;
use crate::ops::{Alpha, chosen, dims4, inverse_norm, shapes_of};
use crate::scheme::Scheme;

/// The dimension of tokens: tensors are (batch, sequence, heads, head_dim).
const SEQUENCE: usize = 1;

/// The tokens that [`Sla2::apply_cached`] has seen. A cache belongs to one layer and one batch.
#[derive(Debug)]
pub struct Sla2Cache {
    keys_values: KvCache,
    /// The first call's settings.
    settings: Option<Settings>,
    /// Whether a call began and did not end.
    failed: bool,
    /// The last [`Settings::pool`] queries, for the mean from which the router selects blocks of keys.
    recent: Option<Tensor>,
    /// Number of candidates: the whole blocks of keys before the current block of queries.
    candidates: usize,
    /// The mean key of each candidate, projected by the router: (batch, key heads, candidates, head_dim).
    means: Option<Tensor>,
    /// With [`Tail::Complement`]: the tail's state for each candidate block of keys. With [`Tail::Past`]: the sum of
    /// these states. See [`states`].
    states: Option<Tensor>,
    block: Option<Block>,
}

/// Settings that all calls with a cache share.
#[derive(Debug, Clone, PartialEq)]
struct Settings {
    block: (usize, usize),
    pool: usize,
    count: usize,
    nearest: usize,
    tail: Option<Tail>,
    heads: usize,
}

/// What the queries of the current block attend to in addition to the block on the diagonal.
#[derive(Debug)]
struct Block {
    /// Keys and values of the selected blocks, (batch, keys, key heads, head_dim).
    selected: Option<[Tensor; 2]>,
    /// Number of keys in candidate blocks that are not selected.
    left: usize,
    /// The tail's state; `None` without a tail, or if all candidates are selected.
    tail: Option<Tensor>,
}

/// `phi`, the softmax over channels: (batch, sequence, heads, head_dim) -> (batch, heads, sequence, head_dim) in f32.
fn features(x: &Tensor) -> Result<Tensor> {
    softmax(&by_head(x)?, D::Minus1)
}

fn by_head(x: &Tensor) -> Result<Tensor> {
    x.to_dtype(DType::F32)?.transpose(1, 2)?.contiguous()
}

/// A state of linear attention for each block of `block` keys, (batch, key heads, blocks, head_dim, head_dim + 1): the
/// sum of `phi(k)^T v` over the block's keys. The last column is the sum of `phi(k)`.
fn states(k: &Tensor, v: &Tensor, block: usize) -> Result<Tensor> {
    let (batch, len, heads, d) = dims4("key", k)?;
    let phi = features(k)?.reshape(((), block, d))?;
    let v = by_head(v)?;
    let v = Tensor::cat(&[&v, &v.narrow(3, 0, 1)?.ones_like()?], 3)?.reshape(((), block, d + 1))?;
    phi.t()?.matmul(&v)?.reshape((batch, heads, len / block, d, d + 1))
}

impl Sla2Cache {
    /// An empty cache, which allocates memory for `len` tokens at its first use, and for `len` more whenever it is
    /// full.
    pub fn new(len: usize) -> Self {
        Self {
            keys_values: KvCache::new(SEQUENCE, len.max(1)),
            settings: None,
            failed: false,
            recent: None,
            candidates: 0,
            means: None,
            states: None,
            block: None,
        }
    }

    /// The number of tokens in the cache.
    pub fn current_seq_len(&self) -> usize {
        self.keys_values.current_seq_len()
    }

    /// Empties the cache, for another sequence.
    pub fn reset(&mut self) {
        let mut keys_values = self.keys_values.clone();
        keys_values.reset();
        *self = Self { keys_values, ..Self::new(1) };
    }

    /// Joins `recent` and `q`, and copies the last `count` queries. (A view would keep all of `q` alive.)
    fn last_queries(&self, q: &Tensor, count: usize) -> Result<Tensor> {
        let all = match &self.recent {
            Some(recent) => Tensor::cat(&[recent, q], SEQUENCE)?,
            None => q.clone(),
        };
        let len = all.dim(SEQUENCE)?;
        all.narrow(SEQUENCE, len.saturating_sub(count), len.min(count))?.force_contiguous()
    }

    /// Keys and values of the blocks in `lists`, which has a list for each batch entry and key head.
    fn gather(&self, lists: &[Vec<u32>], block: usize) -> Result<[Tensor; 2]> {
        let cached =
            [self.keys_values.k_cache(), self.keys_values.v_cache()].map(|cache| cache.all_data().as_ref());
        let [Some(keys), Some(values)] = cached else { candle_core::bail!("an empty cache has no blocks") };
        let (batch, capacity, heads, d) = dims4("the cache", keys)?;
        let rows: Vec<u32> = lists
            .iter()
            .enumerate()
            .flat_map(|(n, list)| {
                let (entry, head) = (n / heads, n % heads);
                let tokens = list.iter().flat_map(move |&at| at as usize * block..(at as usize + 1) * block);
                tokens.map(move |token| ((entry * capacity + token) * heads + head) as u32)
            })
            .collect();
        let rows = Tensor::new(rows, keys.device())?;
        let of = |x: &Tensor| {
            let x = x.reshape((batch * capacity * heads, d))?.index_select(&rows, 0)?;
            x.reshape((batch, heads, (), d))?.transpose(1, 2)
        };
        Ok([of(keys)?, of(values)?])
    }
}

impl Sla2 {
    /// Computes [`Sla2::apply`] for tokens that follow the tokens in `cache`, and adds the new tokens to the cache. The
    /// first call has the prompt, each later call one or more tokens. Query, key and value belong to the new tokens.
    /// All calls with one cache must have the same router, `theta` and settings.
    ///
    /// The prompt is computed as by [`Sla2::select`] and [`Sla2::apply`]. For later tokens, attention to the selected
    /// blocks and to the block on the diagonal is unquantized, because a scheme would quantize all these keys again for
    /// each token. The time for a token does not grow with the sequence, with two exceptions: at the first token of a
    /// block of queries the router compares all candidates, and at some tokens the cache grows. The output is detached.
    /// A cache cannot be used after an error.
    ///
    /// ```
    /// use candle_core::{Device, Tensor};
    /// use candle_sage::{Router, Scheme, Sla2, Sla2Cache};
    ///
    /// let x = Tensor::randn(0f32, 1., (1, 64, 2, 8), &Device::Cpu)?;
    /// let (router, theta) = (Router::new(2, 8, &Device::Cpu)?, Tensor::full(2f32, 2, &Device::Cpu)?);
    /// let sla2 = Sla2::new(Scheme::Unquantized).block((16, 16)).blocks(1).causal(true);
    /// let whole = sla2.apply(&x, &x, &x, &sla2.select(&router, &x, &x)?, &theta)?;
    ///
    /// let mut cache = Sla2Cache::new(64);
    /// for (first, tokens) in [(0, 40), (40, 1), (41, 23)] {
    ///     let x = x.narrow(1, first, tokens)?;
    ///     let out = sla2.apply_cached(&router, [&x, &x, &x], &theta, &mut cache)?;
    ///     let expected = whole.narrow(1, first, tokens)?;
    ///     assert!((out - expected)?.abs()?.max_all()?.to_scalar::<f32>()? < 1e-5);
    /// }
    /// # Ok::<(), candle_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Sla2::apply`]; without a causal mask or with packed documents; when values have another head_dim than keys;
    /// when the new tokens or the settings do not fit the cache.
    pub fn apply_cached(
        &self,
        router: &Router,
        [q, k, v]: [&Tensor; 3],
        theta: &Tensor,
        cache: &mut Sla2Cache,
    ) -> Result<Tensor> {
        let settings = self.check_cached([q, k, v], theta, cache)?;
        let [q, k, v, theta] = [q, k, v, theta].map(Tensor::detach);
        let (past, tokens) = (cache.current_seq_len(), q.dim(SEQUENCE)?);
        let (pool, size) = (settings.pool, settings.block.0);
        cache.failed = true;
        cache.settings = Some(settings);
        let (keys, values) = cache.keys_values.append(&k.contiguous()?, &v.contiguous()?)?;
        let mut outputs = Vec::new();
        if past == 0 {
            outputs.push(self.apply(&q, &k, &v, &self.select(router, &q, &k)?, &theta)?);
            let first = tokens / size * size;
            if first < tokens {
                let window = cache.last_queries(&q.narrow(SEQUENCE, 0, first + 1)?, pool)?;
                self.begin_block(router, &window, first, [&keys, &values], cache)?;
            }
            cache.recent = Some(cache.last_queries(&q, pool)?);
        }
        let mut at = if past == 0 { tokens } else { past };
        while at < past + tokens {
            let len = (size - at % size).min(past + tokens - at);
            let q = q.narrow(SEQUENCE, at - past, len)?;
            if at.is_multiple_of(size) {
                let window = cache.last_queries(&q.narrow(SEQUENCE, 0, 1)?, pool)?;
                self.begin_block(router, &window, at, [&keys, &values], cache)?;
            }
            outputs.push(self.follow(&q, at, [&keys, &values], &theta, cache)?);
            cache.recent = Some(cache.last_queries(&q, pool)?);
            at += len;
        }
        cache.failed = false;
        Ok(Tensor::cat(&outputs, SEQUENCE)?.detach())
    }

    /// Checks a call before it changes the cache.
    fn check_cached(&self, [q, k, v]: [&Tensor; 3], theta: &Tensor, cache: &Sla2Cache) -> Result<Settings> {
        let (shape, _) = self.shape(q, k)?;
        if !shape.causal() || shape.is_packed() {
            return Err(Error::new("SLA2 with a cache needs one causal sequence for each batch entry")
                .got(if shape.causal() { "packed documents" } else { "no causal mask" })
                .allowed("`Sla2::causal(true)`, without `Sla2::packing`")
                .hint("without a cache, call `Sla2::apply` on the whole sequences")
                .into());
        }
        let heads = shape.query_heads();
        let types = [q, k, v].map(Tensor::dtype);
        if dims4("value", v)? != shape.key_dims() || types != [types[0]; 3] {
            return Err(Error::shape("query, key and value of the new tokens do not match")
                .got(shapes_of(&[("query", q), ("key", k), ("value", v)]))
                .allowed("keys and values of one shape, and one element type for all three")
                .hint("the cache needs values with the keys' head_dim; convert types with `to_dtype`")
                .into());
        }
        if theta.dims() != [heads] || theta.dtype() != DType::F32 {
            return Err(Error::shape("theta does not fit the query")
                .got(shapes_of(&[("theta", theta)]))
                .allowed(format!("[{heads}] in f32"))
                .hint("theta has one value for each query head")
                .into());
        }
        let Self { block, count, nearest, tail, .. } = *self;
        let settings = Settings { block, pool: self.pool_of_block(), count, nearest, tail, heads };
        let first = cache.settings.as_ref().filter(|_| !cache.failed);
        if cache.failed || first.is_some_and(|first| *first != settings) {
            let failed = "a cache whose last call failed".to_string();
            return Err(Error::new("the cache's last call failed, or had other settings")
                .got(if cache.failed { failed } else { format!("{settings:?}") })
                .allowed(first.map_or("another cache".into(), |first| format!("{first:?}")))
                .hint("`Sla2Cache::reset` empties the cache")
                .into());
        }
        if let Some(keys) = cache.keys_values.k_cache().all_data() {
            let (batch, _, heads, d) = shape.key_dims();
            let (cached, _, cached_heads, width) = dims4("the cache", keys)?;
            if (cached, cached_heads, width) != (batch, heads, d) || keys.dtype() != k.dtype() {
                return Err(Error::shape("the keys of this call do not match the cached keys")
                    .got(format!("batch {batch}, {heads} key heads of {d}, {:?}", k.dtype()))
                    .allowed(format!(
                        "batch {cached}, {cached_heads} key heads of {width}, {:?}",
                        keys.dtype()
                    ))
                    .hint("a cache belongs to one layer and one batch; `Sla2Cache::reset` empties it")
                    .into());
            }
        }
        Ok(settings)
    }

    /// Selects the blocks of keys for the block of queries that begins at token `first`. The router uses the mean of
    /// the queries in `window`, which ends with token `first`.
    fn begin_block(
        &self,
        router: &Router,
        window: &Tensor,
        first: usize,
        [keys, values]: [&Tensor; 2],
        cache: &mut Sla2Cache,
    ) -> Result<()> {
        let (batch, len, heads, d) = dims4("query", window)?;
        let key_heads = keys.dim(2)?;
        let (block, router) = (self.block.1, router.detached());
        let [of_query, of_key] = router.weights();
        let (before, candidates) = (cache.candidates, first / block);
        if candidates > before {
            let new = |x: &Tensor| x.narrow(SEQUENCE, before * block, (candidates - before) * block);
            let (keys, values) = (new(keys)?, new(values)?);
            let means =
                by_head(&keys)?.reshape((batch, key_heads, candidates - before, block, d))?.mean(3)?;
            let means = means.broadcast_matmul(&of_key.t()?.contiguous()?)?;
            let joined = |earlier: &Option<Tensor>, new: Tensor| match earlier {
                Some(earlier) => Tensor::cat(&[earlier, &new], 2),
                None => Ok(new),
            };
            cache.means = Some(joined(&cache.means, means)?);
            cache.states = match self.tail {
                None => None,
                Some(Tail::Complement) => Some(joined(&cache.states, states(&keys, &values, block)?)?),
                Some(Tail::Past) => {
                    let all = joined(&cache.states, states(&keys, &values, keys.dim(SEQUENCE)?)?)?;
                    Some(all.sum_keepdim(2)?)
                }
            };
            cache.candidates = candidates;
        }
        let Some(means) = &cache.means else {
            cache.block = Some(Block { selected: None, left: 0, tail: None });
            return Ok(());
        };
        let mean = window.to_dtype(DType::F32)?.reshape((batch, len, key_heads, heads / key_heads, d))?;
        let mean = mean.mean((1, 3))?.unsqueeze(2)?.broadcast_matmul(&of_query.t()?.contiguous()?)?;
        let scores = (mean.contiguous()?.matmul(&means.t()?.contiguous()?)? / (d as f64).sqrt())?;
        let scores = scores.reshape((batch * key_heads, candidates))?.to_vec2::<f32>()?;
        let lists: Vec<_> = scores.iter().map(|scores| chosen(scores, self.count, self.nearest)).collect();
        // All lists have the same number of blocks.
        let count = lists.first().map_or(0, Vec::len);
        let left = (candidates - count) * block;
        let tail = match (&cache.states, self.tail) {
            (Some(sum), Some(Tail::Past)) if left > 0 => Some(sum.squeeze(2)?),
            // Sums the unselected blocks' states. Subtracting the selected blocks' states from a total would lose
            // digits (cancellation).
            (Some(all), Some(Tail::Complement)) if left > 0 => {
                let in_tail =
                    |list: &Vec<u32>, at: usize| if list.contains(&(at as u32)) { 0f32 } else { 1.0 };
                let weights = lists.iter().flat_map(|list| (0..candidates).map(move |at| in_tail(list, at)));
                let weights = Tensor::from_iter(weights, &Device::Cpu)?.to_device(all.device())?;
                let weights = weights.reshape((batch * key_heads, 1, candidates))?;
                let sum = weights.matmul(&all.reshape((batch * key_heads, candidates, ()))?)?;
                Some(sum.reshape((batch, key_heads, d, d + 1))?)
            }
            _ => None,
        };
        let selected = (count > 0).then(|| cache.gather(&lists, block)).transpose()?;
        cache.block = Some(Block { selected, left, tail });
        Ok(())
    }

    /// The output of queries of the block that [`Self::begin_block`] began. The first query is token `at`.
    fn follow(
        &self,
        q: &Tensor,
        at: usize,
        [keys, values]: [&Tensor; 2],
        theta: &Tensor,
        cache: &Sla2Cache,
    ) -> Result<Tensor> {
        let Some(Block { selected, left, tail }) = &cache.block else {
            candle_core::bail!("the cache has no block for its tokens")
        };
        let (batch, len, heads, d) = dims4("query", q)?;
        let diagonal = cache.candidates * self.block.1;
        let seen = |x: &Tensor, n: usize| {
            let diagonal = x.narrow(SEQUENCE, diagonal, at + len - diagonal)?;
            match selected {
                Some(selected) => Tensor::cat(&[&selected[n], &diagonal], SEQUENCE),
                None => Ok(diagonal),
            }
        };
        let (keys, values) = (seen(keys, 0)?, seen(values, 1)?);
        let sparse = self.attention.clone().scheme(Scheme::Unquantized).apply(q, &keys, &values)?;
        let Some(state) = tail else { return Ok(sparse) };
        let key_heads = keys.dim(2)?;
        // The query heads of a group read the state of one key head, so one matmul computes the whole group.
        let sums = features(q)?.reshape((batch, key_heads, heads / key_heads * len, d))?.matmul(state)?;
        let linear = sums.narrow(3, 0, d)?.broadcast_mul(&inverse_norm(&sums.narrow(3, d, 1)?)?)?;
        let linear = linear.reshape((batch, heads, len, d))?.transpose(1, 2)?;
        let exact = keys.dim(SEQUENCE)? + 1 - len;
        let log_odds = |n: usize| match self.alpha {
            Alpha::Count => ((exact + n) as f32 / *left as f32).ln(),
            Alpha::Constant => 0.0,
        };
        let log_odds = Tensor::from_iter((0..len).map(log_odds), &Device::Cpu)?.to_device(q.device())?;
        let a =
            sigmoid(&log_odds.unsqueeze(1)?.broadcast_add(&theta.unsqueeze(0)?)?)?.unsqueeze(D::Minus1)?;
        let difference = (sparse.to_dtype(DType::F32)? - &linear)?;
        (linear + difference.broadcast_mul(&a)?)?.to_dtype(q.dtype())
    }
}
