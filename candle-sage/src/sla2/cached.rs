//! SLA2 for tokens that follow others: keys, values and the tail's running sums are kept from call to call.

use candle_core::{D, DType, Device, Result, Tensor};
use candle_nn::kv_cache::KvCache;
use candle_nn::ops::{sigmoid, softmax};

use super::{Router, Sla2, Tail};
use crate::error::Error;
use crate::ops::{Alpha, chosen, dims4};
use crate::scheme::Scheme;

/// The dimension of tokens: tensors are (batch, sequence, heads, head_dim).
const SEQUENCE: usize = 1;

/// What [`Sla2::apply_cached`] keeps of the tokens before.
#[derive(Debug, Clone)]
pub struct Sla2Cache {
    keys_values: KvCache,
    /// The last queries, of which a block's selection needs the mean.
    recent: Option<Tensor>,
    /// The blocks of keys that are candidates of the current block of queries: their number, the router's projections of their
    /// means, (batch, key heads, blocks, head_dim), and the sums of the tail over all of them.
    candidates: usize,
    means: Option<Tensor>,
    sums: Option<Sums>,
    block: Option<QueryBlock>,
}

/// The sums of linear attention over some keys: `h = sum phi(k)^T v`, (batch, key heads, head_dim, head_dim), and `z = sum phi(k)`,
/// (batch, key heads, head_dim, 1), in f32.
#[derive(Debug, Clone)]
struct Sums {
    h: Tensor,
    z: Tensor,
}

impl Sums {
    /// The sums over the keys of a part of a sequence.
    fn of(k: &Tensor, v: &Tensor) -> Result<Self> {
        let phi = features(k)?.transpose(2, 3)?.contiguous()?;
        let v = by_head(v)?;
        Ok(Self { h: phi.matmul(&v)?, z: phi.sum_keepdim(D::Minus1)? })
    }

    fn plus(&self, other: &Self, sign: f64) -> Result<Self> {
        Ok(Self { h: (&self.h + (&other.h * sign)?)?, z: (&self.z + (&other.z * sign)?)? })
    }
}

/// What the queries of the current block attend to besides the diagonal.
#[derive(Debug, Clone)]
struct QueryBlock {
    /// Keys and values of the selected blocks, (batch, keys, key heads, head_dim).
    selected: Option<[Tensor; 2]>,
    /// Candidate keys that are not selected.
    left: usize,
    /// The tail's sums, unless nothing is left to it.
    tail: Option<Sums>,
}

/// (batch, sequence, heads, head_dim) as (batch, heads, sequence, head_dim) in f32.
fn by_head(x: &Tensor) -> Result<Tensor> {
    x.to_dtype(DType::F32)?.transpose(1, 2)?.contiguous()
}

/// `phi`: the softmax over channels, (batch, heads, sequence, head_dim).
fn features(x: &Tensor) -> Result<Tensor> {
    softmax(&by_head(x)?, D::Minus1)
}

impl Sla2Cache {
    /// An empty cache. It allocates memory for `len` tokens at its first use, and for `len` more whenever it is full.
    pub fn new(len: usize) -> Self {
        let keys_values = KvCache::new(SEQUENCE, len.max(1));
        Self { keys_values, recent: None, candidates: 0, means: None, sums: None, block: None }
    }

    /// The number of tokens in the cache.
    pub fn tokens(&self) -> usize {
        self.keys_values.current_seq_len()
    }

    /// The last `count` of the recent queries and those of `q`.
    fn last_queries(&self, q: &Tensor, count: usize) -> Result<Tensor> {
        let all = match &self.recent {
            Some(recent) => Tensor::cat(&[recent, q], SEQUENCE)?,
            None => q.clone(),
        };
        let len = all.dim(SEQUENCE)?;
        all.narrow(SEQUENCE, len.saturating_sub(count), len.min(count))
    }

    /// Keys and values of blocks of `block` keys, which `lists` names for each batch entry and key head.
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
    /// As [`Sla2::apply`] for tokens that follow those in `cache`, to which they are added: first a prompt, then one token at a time, or
    /// several. Query, key and value are those of the new tokens alone; all calls have the same router and `theta`.
    ///
    /// The prompt is computed as [`Sla2::select`] and [`Sla2::apply`] compute it. Later tokens attend to the selected blocks and the diagonal in full
    /// precision, because a scheme would quantize all of these keys again for each token. A token costs the keys that it sees exactly and
    /// head_dim^2 for the tail, however long the sequence is; the first token of a block of queries also selects the block's keys. The
    /// output is detached. After an error the cache is not to be used again.
    ///
    /// ```
    /// use candle_core::{Device, Tensor};
    /// use candle_sage::{Router, Scheme, Sla2, sla2::Sla2Cache};
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
    /// As [`Sla2::apply`]; without a causal mask or with packed documents; and when the new tokens do not fit those in the cache.
    pub fn apply_cached(
        &self,
        router: &Router,
        [q, k, v]: [&Tensor; 3],
        theta: &Tensor,
        cache: &mut Sla2Cache,
    ) -> Result<Tensor> {
        let (shape, _) = self.shape(q, k)?;
        if !shape.causal() || shape.is_packed() {
            return Err(Error::new("SLA2 with a cache needs one causal sequence for each batch entry")
                .got(if shape.causal() { "packed documents" } else { "no causal mask" })
                .allowed("`Sla2::causal(true)`, without `Sla2::packing`")
                .hint("`Sla2::apply` computes whole sequences")
                .into());
        }
        let (batch, tokens, key_heads, d) = shape.key_dims();
        if let Some(keys) = cache.keys_values.k_cache().all_data() {
            let (cached, _, heads, width) = dims4("the cache", keys)?;
            if (cached, heads, width) != (batch, key_heads, d) || keys.dtype() != k.dtype() {
                return Err(Error::shape("the cache has keys of another shape")
                    .got(format!("batch {batch}, {key_heads} key heads of {d}, {:?}", k.dtype()))
                    .allowed(format!("batch {cached}, {heads} key heads of {width}, {:?}", keys.dtype()))
                    .hint("a cache belongs to one layer and one batch")
                    .into());
            }
        }
        let [q, k, v, theta] = [q, k, v, theta].map(Tensor::detach);
        let past = cache.tokens();
        let (keys, values) = cache.keys_values.append(&k.contiguous()?, &v.contiguous()?)?;
        let pool = self.pool_of_block();
        if past == 0 {
            let out = self.apply(&q, &k, &v, &self.select(router, &q, &k)?, &theta)?;
            let first = tokens / self.block.0 * self.block.0;
            if first < tokens {
                let begin = (first + 1).saturating_sub(pool);
                let window = q.narrow(SEQUENCE, begin, first + 1 - begin)?;
                self.begin_block(router, &window, first, [&keys, &values], cache)?;
            }
            cache.recent = Some(cache.last_queries(&q, pool)?);
            return Ok(out.detach());
        }
        let mut outputs = Vec::new();
        let mut done = 0;
        while done < tokens {
            let at = past + done;
            let len = (self.block.0 - at % self.block.0).min(tokens - done);
            let q = q.narrow(SEQUENCE, done, len)?;
            if at.is_multiple_of(self.block.0) {
                let window = cache.last_queries(&q.narrow(SEQUENCE, 0, 1)?, pool)?;
                self.begin_block(router, &window, at, [&keys, &values], cache)?;
            }
            outputs.push(self.follow(&q, at, [&keys, &values], &theta, cache)?);
            cache.recent = Some(cache.last_queries(&q, pool)?);
            done += len;
        }
        Ok(Tensor::cat(&outputs, SEQUENCE)?.detach())
    }

    /// Selects what the block of queries whose first token is at `first` attends to. `window` has the queries up to that token whose
    /// mean the router takes.
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
            let sums = Sums::of(&keys, &values)?;
            cache.means = Some(match &cache.means {
                Some(earlier) => Tensor::cat(&[earlier, &means], 2)?,
                None => means,
            });
            cache.sums = Some(match &cache.sums {
                Some(earlier) => earlier.plus(&sums, 1.0)?,
                None => sums,
            });
            cache.candidates = candidates;
        }
        let (Some(means), Some(sums)) = (&cache.means, &cache.sums) else {
            cache.block = Some(QueryBlock { selected: None, left: 0, tail: None });
            return Ok(());
        };
        let mean = window.to_dtype(DType::F32)?.reshape((batch, len, key_heads, heads / key_heads, d))?;
        let mean = mean.mean((1, 3))?.unsqueeze(2)?.broadcast_matmul(&of_query.t()?.contiguous()?)?;
        let scores = (mean.contiguous()?.matmul(&means.t()?.contiguous()?)? / (d as f64).sqrt())?;
        let scores = scores.reshape((batch * key_heads, candidates))?.to_vec2::<f32>()?;
        let lists: Vec<_> = scores.iter().map(|scores| chosen(scores, self.count, self.nearest)).collect();
        // Each list has as many blocks.
        let count = lists.first().map_or(0, Vec::len);
        let selected = (count > 0).then(|| cache.gather(&lists, block)).transpose()?;
        let left = (candidates - count) * block;
        let tail = match self.tail.filter(|_| left > 0) {
            None => None,
            Some(Tail::Past) => Some(sums.clone()),
            Some(Tail::Complement) => Some(match &selected {
                Some([keys, values]) => sums.plus(&Sums::of(keys, values)?, -1.0)?,
                None => sums.clone(),
            }),
        };
        cache.block = Some(QueryBlock { selected, left, tail });
        Ok(())
    }

    /// The output of queries of the current block, of which the first is at `at`.
    fn follow(
        &self,
        q: &Tensor,
        at: usize,
        [keys, values]: [&Tensor; 2],
        theta: &Tensor,
        cache: &Sla2Cache,
    ) -> Result<Tensor> {
        let Some(QueryBlock { selected, left, tail }) = &cache.block else {
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
        let Some(Sums { h, z }) = tail else { return Ok(sparse) };
        let key_heads = keys.dim(2)?;
        // The heads of a group are queries of the same key head.
        let phi = features(q)?.reshape((batch, key_heads, heads / key_heads * len, d))?;
        let linear = phi.matmul(h)?.broadcast_div(&phi.matmul(z)?)?;
        let linear = linear.reshape((batch, heads, len, d))?.transpose(1, 2)?;
        let exact = keys.dim(SEQUENCE)? + 1 - len;
        let odds = |n: usize| match self.alpha {
            Alpha::Count => ((exact + n) as f32 / *left as f32).ln(),
            Alpha::Constant => 0.0,
        };
        let odds = Tensor::from_iter((0..len).map(odds), &Device::Cpu)?.to_device(q.device())?;
        let a = sigmoid(&odds.unsqueeze(1)?.broadcast_add(&theta.unsqueeze(0)?)?)?.unsqueeze(D::Minus1)?;
        let difference = (sparse.to_dtype(DType::F32)? - &linear)?;
        (linear + difference.broadcast_mul(&a)?)?.to_dtype(q.dtype())
    }
}
