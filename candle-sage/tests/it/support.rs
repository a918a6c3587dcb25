//! Random inputs, exact results and error measures that tests and benchmarks share.
#![allow(dead_code)] // each target uses only some items

use candle_core::{DType, Device, Result, Tensor, Var};
use candle_sage::{Attention, AttentionShape, Int8Products, Packing, SageBwd, Scheme, Selection, reference};
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use rand_distr::{Distribution, Normal};

/// Table 1 of arXiv 2603.02170: sigma, and the relative L2 errors of O, dQ, dK, dV.
pub(crate) const PUBLISHED: [(f32, [f64; 4]); 5] = [
    (1., [0.0160, 0.0184, 0.0220, 0.0159]),
    (3., [0.0389, 0.0758, 0.0777, 0.0387]),
    (5., [0.0603, 0.2014, 0.2007, 0.0605]),
    (8., [0.0972, 0.4666, 0.4699, 0.0973]),
    (10., [0.1161, 0.6648, 0.6684, 0.1157]),
];

/// Every scheme with its default settings, and SageBwd with each of three other sets of INT8 matmuls.
pub(crate) fn schemes() -> Vec<Scheme> {
    let sets = [Int8Products::FORWARD_AND_S, Int8Products::SCORES, Int8Products::FORWARD];
    let sets = sets.map(|products| SageBwd::default().products(products).into());
    Scheme::all().into_iter().chain(sets).collect()
}

/// The GPU, the same device for all tests: candle treats two separately created devices as different.
#[cfg(feature = "cuda")]
pub(crate) fn gpu() -> Device {
    static GPU: std::sync::OnceLock<Device> = std::sync::OnceLock::new();
    GPU.get_or_init(|| Device::new_cuda(0).expect("a GPU")).clone()
}

pub(crate) struct Normals(ChaCha8Rng);

impl Normals {
    pub(crate) fn new(seed: u64) -> Self {
        Self(ChaCha8Rng::seed_from_u64(seed))
    }

    pub(crate) fn vec(&mut self, len: usize, sigma: f32) -> Vec<f32> {
        let normal = Normal::new(0.0, sigma).expect("a finite sigma");
        (0..len).map(|_| normal.sample(&mut self.0)).collect()
    }
}

/// `||a - b|| / ||b||`, or the root mean square of `a` if `b` is zero. (Over one key, the exact dQ and dK are zero.)
pub(crate) fn relative_l2(a: &[f64], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len());
    let difference: f64 = a.iter().zip(b).map(|(x, y)| (x - y).powi(2)).sum();
    let norm: f64 = b.iter().map(|y| y * y).sum();
    (difference / if norm == 0.0 { a.len() as f64 } else { norm }).sqrt()
}

pub(crate) fn cosine(a: &[f64], b: &[f64]) -> f64 {
    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(x, y)| x * y).sum::<f64>();
    dot(a, b) / (dot(a, a) * dot(b, b)).sqrt()
}

pub(crate) fn f64s(values: &[f32]) -> Vec<f64> {
    values.iter().map(|&x| f64::from(x)).collect()
}

#[derive(Clone)]
pub(crate) struct Case {
    pub(crate) batch: usize,
    pub(crate) lens: (usize, usize),
    pub(crate) heads: (usize, usize),
    pub(crate) head_dim: usize,
    pub(crate) causal: bool,
    /// The numbers of keys that a query sees before and after its own position.
    pub(crate) window: (Option<usize>, Option<usize>),
    pub(crate) packing: Option<Packing>,
    pub(crate) softmax_scale: Option<f64>,
    pub(crate) softcap: Option<f64>,
    /// A slope for each query head; empty: no ALiBi.
    pub(crate) alibi_slopes: Vec<f32>,
    /// Query, key, value and output gradient.
    pub(crate) data: [Vec<f32>; 4],
}

/// The output, then the gradients of query, key and value.
pub(crate) type Results = [Vec<f64>; 4];

impl Case {
    pub(crate) fn new(
        batch: usize,
        lens: (usize, usize),
        heads: (usize, usize),
        head_dim: usize,
        causal: bool,
    ) -> Self {
        let mut case = Self {
            batch,
            lens,
            heads,
            head_dim,
            causal,
            window: (None, None),
            packing: None,
            softmax_scale: None,
            softcap: None,
            alibi_slopes: Vec::new(),
            data: Default::default(),
        };
        case.draw(1.0, 0);
        case
    }

    /// Draws query and key with standard deviation `sigma`, value and output gradient with 1.
    pub(crate) fn draw(&mut self, sigma: f32, seed: u64) {
        let mut normals = Normals::new(seed);
        let (q, k) = (self.dims(true).iter().product(), self.dims(false).iter().product());
        self.data = [normals.vec(q, sigma), normals.vec(k, sigma), normals.vec(k, 1.0), normals.vec(q, 1.0)];
    }

    /// Adds `times(token) * vector` to every key.
    pub(crate) fn add_to_keys(&mut self, vector: &[f32], times: impl Fn(usize) -> f32) {
        self.add_to(1, vector, times);
    }

    pub(crate) fn add_to_values(&mut self, vector: &[f32]) {
        self.add_to(2, vector, |_| 1.0);
    }

    fn add_to(&mut self, tensor: usize, vector: &[f32], times: impl Fn(usize) -> f32) {
        for (token, row) in self.data[tensor].chunks_exact_mut(self.head_dim).enumerate() {
            row.iter_mut().zip(vector).for_each(|(y, x)| *y += times(token) * x);
        }
    }

    pub(crate) fn mean_of_keys(&self) -> Vec<f32> {
        let keys = self.data[1].chunks_exact(self.head_dim);
        let (count, mut mean) = (keys.len() as f32, vec![0.0; self.head_dim]);
        keys.for_each(|key| mean.iter_mut().zip(key).for_each(|(mean, k)| *mean += k / count));
        mean
    }

    pub(crate) fn dims(&self, query: bool) -> [usize; 4] {
        if query {
            [self.batch, self.lens.0, self.heads.0, self.head_dim]
        } else {
            [self.batch, self.lens.1, self.heads.1, self.head_dim]
        }
    }

    pub(crate) fn shape(&self) -> AttentionShape {
        let dims = |query| <(usize, usize, usize, usize)>::from(self.dims(query));
        AttentionShape::new(dims(true), dims(false), dims(false), self.causal, self.packing.clone())
            .expect("a valid case")
            .with_window(self.window.0, if self.causal { Some(0) } else { self.window.1 })
    }

    /// Rounds the inputs to values that `dtype` can represent.
    pub(crate) fn round_to(&mut self, dtype: DType) -> Result<()> {
        for values in &mut self.data {
            let rounded = Tensor::from_slice(values, values.len(), &Device::Cpu)?.to_dtype(dtype)?;
            *values = rounded.to_dtype(DType::F32)?.to_vec1()?;
        }
        Ok(())
    }

    pub(crate) fn exact(&self) -> Results {
        self.exact_over(reference::DENSE)
    }

    /// The exact results over only the (query, key) pairs that `pattern` selects.
    pub(crate) fn exact_over(&self, pattern: reference::Pattern<'_>) -> Results {
        let shape = self.shape();
        let logits = reference::Logits {
            scale: self.softmax_scale.unwrap_or_else(|| shape.default_softmax_scale()),
            softcap: self.softcap,
            alibi_slopes: f64s(&self.alibi_slopes),
        };
        let [q, k, v, dout] = self.data.each_ref().map(|x| f64s(x));
        let inputs = [&*q, &*k, &*v];
        let out = reference::sparse_forward(&shape, pattern, logits.clone(), inputs).out;
        let grads = reference::sparse_backward(&shape, pattern, logits, inputs, &dout);
        [out, grads.dq, grads.dk, grads.dv]
    }

    pub(crate) fn attention(&self, scheme: Scheme) -> Attention {
        let mut attention = Attention::new(scheme).causal(self.causal).window(self.window.0, self.window.1);
        if let Some(scale) = self.softmax_scale {
            attention = attention.softmax_scale(scale);
        }
        if let Some(cap) = self.softcap {
            attention = attention.softcap(cap);
        }
        if let Some(packing) = &self.packing {
            attention = attention.packing(packing.clone());
        }
        attention
    }

    /// Runs attention forward and backward on the CPU, with inputs in `dtype`.
    pub(crate) fn run(&self, scheme: Scheme, dtype: DType) -> Result<Results> {
        self.run_on(&Device::Cpu, &self.attention(scheme), dtype)
    }

    pub(crate) fn run_on(&self, device: &Device, attention: &Attention, dtype: DType) -> Result<Results> {
        let tensor = |n: usize, query| -> Result<Tensor> {
            Tensor::from_slice(&self.data[n], self.dims(query).as_slice(), &Device::Cpu)?
                .to_dtype(dtype)?
                .to_device(device)
        };
        let (q, k, v) = (
            Var::from_tensor(&tensor(0, true)?)?,
            Var::from_tensor(&tensor(1, false)?)?,
            Var::from_tensor(&tensor(2, false)?)?,
        );
        let attention = match self.alibi_slopes.len() {
            0 => attention.clone(),
            heads => attention.clone().alibi(&Tensor::from_slice(&self.alibi_slopes, heads, device)?),
        };
        let out = attention.apply(&q, &k, &v)?;
        let grads = (&out * tensor(3, true)?)?.to_dtype(DType::F32)?.sum_all()?.backward()?;
        let values =
            |t: &Tensor| -> Result<Vec<f64>> { Ok(f64s(&t.to_dtype(DType::F32)?.flatten_all()?.to_vec1()?)) };
        let grad = |t: &Tensor| values(grads.get(t).expect("a gradient"));
        Ok([values(&out)?, grad(&q)?, grad(&k)?, grad(&v)?])
    }

    /// Relative L2 errors of O, dQ, dK, dV.
    pub(crate) fn errors(&self, scheme: Scheme, dtype: DType) -> Result<[f64; 4]> {
        let (got, exact) = (self.run(scheme, dtype)?, self.exact());
        Ok(std::array::from_fn(|n| relative_l2(&got[n], &exact[n])))
    }
}

/// The errors of `scheme` on the inputs of Table 1 of arXiv 2603.02170: causal, N 1024, one head, Q and K of standard
/// deviation `sigma`.
pub(crate) fn sigma_errors(scheme: Scheme, head_dim: usize, sigma: f32, seed: u64) -> Result<[f64; 4]> {
    let mut case = Case::new(1, (1024, 1024), (1, 1), head_dim, true);
    case.draw(sigma, seed);
    case.errors(scheme, DType::F32)
}

/// A selection of `count` random blocks of keys for each block of queries.
pub(crate) fn random_selection(
    shape: &AttentionShape,
    blocks: (usize, usize),
    count: usize,
    seed: u64,
    device: &Device,
) -> Result<Selection> {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    Selection::from_lists(shape, blocks, device, |at| {
        rand::seq::index::sample(&mut rng, at.candidates, count.min(at.candidates)).into_vec()
    })
}

/// The pattern of pairs that a selection sees.
pub(crate) fn pattern(selection: &Selection) -> impl Fn(reference::Pair) -> bool {
    let (query, key) = selection.block();
    let group = selection.shape().group();
    let lists: Vec<Vec<Vec<Vec<usize>>>> = (0..selection.shape().segments().len())
        .map(|segment| {
            let blocks = selection.shape().segments()[segment].query.len().div_ceil(query);
            let of_head =
                |head| (0..blocks).map(|b| selection.list(segment, head, b).expect("a list")).collect();
            (0..selection.shape().key_heads()).map(of_head).collect()
        })
        .collect();
    move |at| lists[at.segment][at.head / group][at.query / query].contains(&(at.key / key))
}
