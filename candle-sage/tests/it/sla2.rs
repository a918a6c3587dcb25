//! Tests of SLA2: the tail, its mixture with exact attention, the router, and causality.

use candle_core::{DType, Device, Result, Tensor, Var};
use candle_sage::ops::{self, Alpha, Tail};
use candle_sage::reference::{self, Pair};
use candle_sage::{Packing, Router, Scheme, Selection, Sla2};

use crate::support::{Case, Normals, f64s, pattern, random_selection, relative_l2};

pub(crate) struct Problem {
    pub(crate) case: Case,
    pub(crate) selection: Selection,
    pub(crate) theta: Vec<f32>,
    pub(crate) tail: Tail,
    pub(crate) alpha: Alpha,
}

/// Output, and the gradients of query, key, value and theta.
pub(crate) type Results = [Vec<f64>; 5];

impl Problem {
    /// Whether a pair belongs to the linear tail.
    fn in_tail(&self) -> impl Fn(Pair) -> bool + '_ {
        let seen = pattern(&self.selection);
        let (query, key) = self.selection.block();
        let segments = self.case.shape().segments();
        move |at| {
            let segment = &segments[at.segment];
            let candidates = if self.case.causal {
                segment.visible_keys(at.query / query * query) / key
            } else {
                usize::MAX
            };
            at.key / key < candidates && (self.tail == Tail::Past || !seen(at))
        }
    }

    /// The weight `a` of exact attention in the output, for each (batch, token, head). The linear tail has `1 - a`.
    fn shares(&self, theta: &[f64]) -> Vec<f64> {
        let shape = self.case.shape();
        let seen = pattern(&self.selection);
        let (query_block, key_block) = self.selection.block();
        let mut shares = vec![1.0; shape.batch() * shape.query_len() * shape.query_heads()];
        for (number, segment) in shape.segments().iter().enumerate() {
            for head in 0..shape.query_heads() {
                for query in 0..segment.query.len() {
                    let first = query / query_block * query_block;
                    let candidates =
                        if self.case.causal { segment.visible_keys(first) / key_block } else { usize::MAX };
                    let (mut exact, mut left) = (0.0, 0.0);
                    for key in 0..segment.visible_keys(query) {
                        if seen(Pair { segment: number, head, query, key }) {
                            exact += 1.0;
                        } else if key / key_block < candidates {
                            left += 1.0;
                        }
                    }
                    let token = segment.batch * shape.query_len() + segment.query.start + query;
                    let odds: f64 = match self.alpha {
                        Alpha::Count => exact / left,
                        Alpha::Constant => 1.0,
                        other => panic!("no definition of {other:?}"),
                    };
                    if left > 0.0 {
                        shares[token * shape.query_heads() + head] =
                            1.0 / (1.0 + (-theta[head]).exp() / odds);
                    }
                }
            }
        }
        shares
    }

    /// The keys that the tail uses: `k`, minus its mean over the tokens of each segment unless the mask is causal.
    fn centred(&self, k: &[f64]) -> Vec<f64> {
        let shape = self.case.shape();
        let mut out = k.to_vec();
        if self.case.causal {
            return out;
        }
        let width = shape.key_heads() * shape.head_dim();
        for segment in shape.segments() {
            let first = segment.batch * shape.key_len() + segment.key.start;
            let count = segment.key.len();
            for c in 0..width {
                let mean = (0..count).map(|j| k[(first + j) * width + c]).sum::<f64>() / count as f64;
                (0..count).for_each(|j| out[(first + j) * width + c] -= mean);
            }
        }
        out
    }

    fn forward(&self, [q, k, v]: [&[f64]; 3], theta: &[f64]) -> [Vec<f64>; 3] {
        let shape = self.case.shape();
        let scale = shape.default_softmax_scale();
        let sparse = reference::sparse_forward(&shape, &pattern(&self.selection), scale, [q, k, v]).out;
        let linear = reference::linear_forward(&shape, &self.in_tail(), [q, &self.centred(k), v]);
        let d = shape.head_dim();
        let shares = self.shares(theta);
        let out = (0..sparse.len()).map(|i| shares[i / d] * sparse[i] + (1.0 - shares[i / d]) * linear[i]);
        [out.collect(), sparse, linear]
    }

    pub(crate) fn exact(&self) -> Results {
        let shape = self.case.shape();
        let scale = shape.default_softmax_scale();
        let [q, k, v, dout] = self.case.data.each_ref().map(|x| f64s(x));
        let theta = f64s(&self.theta);
        let [out, sparse, linear] = self.forward([&q, &k, &v], &theta);
        let (d, shares) = (shape.head_dim(), self.shares(&theta));
        let times = |f: &dyn Fn(f64) -> f64| -> Vec<f64> {
            dout.iter().enumerate().map(|(i, g)| f(shares[i / d]) * g).collect()
        };
        let (dsparse, dlinear) = (times(&|a| a), times(&|a| 1.0 - a));
        let mut dtheta = vec![0.0; theta.len()];
        for i in 0..dout.len() {
            let a = shares[i / d];
            dtheta[i / d % theta.len()] += a * (1.0 - a) * dout[i] * (sparse[i] - linear[i]);
        }
        let sparse =
            reference::sparse_backward(&shape, &pattern(&self.selection), scale, [&q, &k, &v], &dsparse);
        let centred = self.centred(&k);
        let linear = reference::linear_backward(&shape, &self.in_tail(), [&q, &centred, &v], &dlinear);
        let add = |a: Vec<f64>, b: Vec<f64>| -> Vec<f64> { a.iter().zip(&b).map(|(a, b)| a + b).collect() };
        // With `y = x - mean(x)`, dx is `dy - mean(dy)`.
        let dk = add(sparse.dk, self.centred(&linear.dk));
        [out, add(sparse.dq, linear.dq), dk, add(sparse.dv, linear.dv), dtheta]
    }

    fn sla2(&self, scheme: Scheme) -> Sla2 {
        let sla2 = Sla2::new(scheme)
            .causal(self.case.causal)
            .block(self.selection.block())
            .tail(Some(self.tail))
            .alpha(self.alpha);
        match &self.case.packing {
            Some(packing) => sla2.packing(packing.clone()),
            None => sla2,
        }
    }

    fn run(&self) -> Result<Results> {
        let [graph, _] = self.run_on(&Device::Cpu, DType::F32)?;
        Ok(graph)
    }

    /// Runs on a device, with and without autograd.
    pub(crate) fn run_on(&self, device: &Device, dtype: DType) -> Result<[Results; 2]> {
        let tensor = |n: usize, query| -> Result<Var> {
            let dims = self.case.dims(query);
            let x = Tensor::from_slice(&self.case.data[n], dims.as_slice(), &Device::Cpu)?.to_dtype(dtype)?;
            Var::from_tensor(&x.to_device(device)?)
        };
        let (q, k, v) = (tensor(0, true)?, tensor(1, false)?, tensor(2, false)?);
        let dout = tensor(3, true)?.as_tensor().detach();
        let theta = Var::from_slice(&self.theta, self.theta.len(), device)?;
        let selection = self.selection.to_device(device)?;
        // Gradients are reproducible, so that results with and without autograd can be compared.
        let sla2 = self.sla2(Scheme::Unquantized).deterministic(true);
        let out = sla2.apply(&q, &k, &v, &selection, &theta)?;
        let grads = (&out * &dout)?.to_dtype(DType::F32)?.sum_all()?.backward()?;
        let values =
            |x: &Tensor| -> Result<Vec<f64>> { Ok(f64s(&x.to_dtype(DType::F32)?.flatten_all()?.to_vec1()?)) };
        let grad = |x: &Tensor| values(grads.get(x).expect("a gradient"));
        let graph = [values(&out)?, grad(&q)?, grad(&k)?, grad(&v)?, grad(&theta)?];
        let (again, vjp) = sla2.vjp(&q, &k, &v, &selection, &theta)?;
        let [dq, dk, dv, dtheta] = vjp.apply(&dout)?;
        let books = [values(&again)?, values(&dq)?, values(&dk)?, values(&dv)?, values(&dtheta)?];
        if dtype == DType::F32 {
            assert_eq!(graph, books, "with and without a graph");
        } else {
            // In 16 bit, `backward` and `vjp.apply` may round gradients at different points.
            for (a, b) in graph.iter().zip(&books) {
                assert!(relative_l2(a, b) < 2f64.powi(-7), "with and without a graph");
            }
        }
        Ok([graph, books])
    }
}

fn problems(block: (usize, usize), lens: [usize; 2], d: usize) -> Result<Vec<Problem>> {
    let mut cases = vec![
        Case::new(2, (lens[0], lens[0]), (4, 2), d, true),
        Case::new(1, (lens[0], lens[0]), (2, 2), d, false),
        Case::new(1, (lens[0], lens[1]), (2, 1), d, false),
    ];
    let mut packed = Case::new(1, (lens[1], lens[1]), (2, 1), d, true);
    let third = lens[1] / 3;
    packed.packing = Some(Packing::self_attention(vec![0, 1, third, third, lens[1]]));
    cases.push(packed);
    let mut problems = Vec::new();
    for (n, mut case) in cases.into_iter().enumerate() {
        for (tail, alpha) in [(Tail::Past, Alpha::Count), (Tail::Complement, Alpha::Constant)] {
            case.draw(1.0, n as u64);
            let selection = random_selection(&case.shape(), block, 1, n as u64, &Device::Cpu)?;
            let theta = Normals::new(7).vec(case.heads.0, 1.0);
            let data = case.data.clone();
            let case = Case { packing: case.packing.clone(), data, ..case.clone() };
            problems.push(Problem { case, selection, theta, tail, alpha });
        }
    }
    Ok(problems)
}

/// Central differences with step 1e-5 err by 1e-10 times the third derivative, and by 1e-16 / 1e-5 in rounding.
#[test]
fn the_formulas_are_the_gradients() -> Result<()> {
    for problem in problems((4, 4), [13, 17], 8)? {
        let exact = problem.exact();
        let dout = f64s(&problem.case.data[3]);
        let inputs: Vec<Vec<f64>> =
            problem.case.data[..3].iter().chain([&problem.theta]).map(|x| f64s(x)).collect();
        for n in 0..4 {
            let numeric: Vec<f64> = (0..inputs[n].len())
                .map(|i| {
                    let loss = |step: f64| {
                        let mut x = inputs.clone();
                        x[n][i] += step;
                        let [out, ..] = problem.forward([&x[0], &x[1], &x[2]], &x[3]);
                        out.iter().zip(&dout).map(|(o, g)| o * g).sum::<f64>()
                    };
                    (loss(1e-5) - loss(-1e-5)) / 2e-5
                })
                .collect();
            let error = relative_l2(&exact[n + 1], &numeric);
            assert!(error < 1e-8, "gradient {n} of {:?}: {error:e}", problem.case.shape());
        }
    }
    Ok(())
}

/// The limit is 2.5 times that of `unquantized_is_exact_up_to_f32_rounding`, because the tail also sums over tokens in
/// f32.
#[test]
fn the_cpu_follows_the_formulas() -> Result<()> {
    let small = problems((16, 16), [150, 203], 16)?;
    let large = problems((128, 64), [300, 600], 64)?;
    for problem in small.into_iter().chain(large) {
        let (got, exact) = (problem.run()?, problem.exact());
        for (n, name) in ["O", "dQ", "dK", "dV", "dtheta"].iter().enumerate() {
            let error = relative_l2(&got[n], &exact[n]);
            assert!(error < 1e-5, "{name} of {:?} {:?}: {error:e}", problem.case.shape(), problem.tail);
        }
    }
    Ok(())
}

pub(crate) fn tensors(case: &Case) -> Result<[Tensor; 3]> {
    let tensor =
        |n: usize, query| Tensor::from_slice(&case.data[n], case.dims(query).as_slice(), &Device::Cpu);
    Ok([tensor(0, true)?, tensor(1, false)?, tensor(2, false)?])
}

/// A router that is not an identity.
pub(crate) fn some_router(key_heads: usize, d: usize) -> Result<Router> {
    let mut normals = Normals::new(3);
    let mut tensor =
        || Tensor::from_vec(normals.vec(key_heads * d * d, 0.3), (key_heads, d, d), &Device::Cpu);
    Router::from_tensors(tensor()?, tensor()?)
}

/// Later tokens must not affect earlier tokens: a run on only the first tokens gives these tokens the same selection
/// and the same outputs.
#[test]
fn nothing_leaks_from_later_tokens() -> Result<()> {
    let case = Case::new(1, (320, 320), (4, 2), 32, true);
    let [q, k, v] = tensors(&case)?;
    let router = some_router(2, 32)?;
    let theta = Tensor::new(&[2f32, 1.0, 0.0, -1.0], &Device::Cpu)?;
    for tail in [Some(Tail::Past), Some(Tail::Complement), None] {
        for (block, pool, count, nearest) in
            [((32, 32), None, 2, 0), ((32, 16), Some(1), 3, 2), ((16, 64), Some(50), 1, 1)]
        {
            let mut sla2 = Sla2::new(Scheme::Unquantized)
                .blocks(count)
                .nearest(nearest)
                .block(block)
                .causal(true)
                .tail(tail);
            if let Some(pool) = pool {
                sla2 = sla2.pool(pool);
            }
            let whole = sla2.select(&router, &q, &k)?;
            let out = sla2.apply(&q, &k, &v, &whole, &theta)?;
            for len in [1, 33, 65, 129, 200, 319] {
                let [q, k, v] = [&q, &k, &v].map(|x| x.narrow(1, 0, len));
                let (q, k, v) = (q?, k?, v?);
                let part = sla2.select(&router, &q, &k)?;
                for key_head in 0..2 {
                    for row in 0..len.div_ceil(block.0) {
                        let visible =
                            (row * block.0 + 1..=len).last().map_or(0, |last| last.div_ceil(block.1));
                        let expected: Vec<usize> =
                            whole.list(0, key_head, row)?.into_iter().filter(|&at| at < visible).collect();
                        assert_eq!(part.list(0, key_head, row)?, expected, "{len} {block:?}");
                    }
                }
                let prefix = sla2.apply(&q, &k, &v, &part, &theta)?;
                let difference = (prefix - out.narrow(1, 0, len)?)?.abs()?.max_all()?.to_scalar::<f32>()?;
                assert!(difference < 1e-6, "{len} tokens, {block:?}, {tail:?}: {difference:e}");
            }
        }
    }
    Ok(())
}

/// The blocks of keys nearest to a block of queries, in the same document, are selected whatever their scores. The
/// router chooses the other selected blocks.
#[test]
fn the_nearest_blocks_are_always_listed() -> Result<()> {
    let mut case = Case::new(1, (300, 300), (4, 2), 32, true);
    case.packing = Some(Packing::self_attention(vec![0, 20, 20, 150, 300]));
    let [q, k, _] = tensors(&case)?;
    let k =
        Tensor::cat(&[k.narrow(1, 0, 40)?, (k.narrow(1, 40, 10)? * f64::NAN)?, k.narrow(1, 50, 250)?], 1)?;
    let router = some_router(2, 32)?;
    let packing = case.packing.clone().expect("documents");
    let sla2 = Sla2::new(Scheme::Unquantized).block((16, 16)).causal(true).packing(packing);
    for nearest in 0..=3 {
        let with = sla2.clone().blocks(3).nearest(nearest).select(&router, &q, &k)?;
        for (number, segment) in case.shape().segments().iter().enumerate() {
            for (key_head, block) in
                (0..2).flat_map(|head| (0..segment.query.len().div_ceil(16)).map(move |n| (head, n)))
            {
                let list = with.list(number, key_head, block)?;
                let first = block - block.min(nearest);
                assert!((first..=block).all(|near| list.contains(&near)), "{nearest}: {list:?}");
                assert_eq!(list.len(), block.min(3) + 1, "{nearest}: {list:?}");
                // The `3 - nearest` earlier blocks of keys with the router's highest scores are in `list`.
                let best = sla2.clone().blocks(3 - nearest.min(3)).select(&router, &q, &k)?;
                let best = best.list(number, key_head, block)?;
                assert!(best.iter().all(|at| list.contains(at)), "{nearest}: {list:?}, best {best:?}");
            }
        }
    }
    Ok(())
}

/// Shows that `nothing_leaks_from_later_tokens` could fail: on random inputs, a selection by the mean of the whole
/// query block depends on later tokens.
#[test]
fn a_mean_over_the_block_would_leak() -> Result<()> {
    let case = Case::new(1, (256, 256), (1, 1), 16, true);
    let [q, k, _] = tensors(&case)?;
    let lists = |len: usize| -> Result<Vec<usize>> {
        let mean = |x: &Tensor, first: usize, count: usize| x.narrow(1, first, count)?.mean(1)?.flatten_all();
        let query = mean(&q, 224, len - 224)?;
        let scores: Vec<f32> = (0..7)
            .map(|block| (&query * mean(&k, block * 32, 32)?)?.sum_all()?.to_scalar::<f32>())
            .collect::<Result<_>>()?;
        let mut order: Vec<usize> = (0..7).collect();
        order.sort_by(|&a, &b| scores[b].total_cmp(&scores[a]));
        Ok(order[..2].to_vec())
    };
    let whole = lists(256)?;
    assert!((225..256).any(|len| lists(len).is_ok_and(|part| part != whole)), "no leak seen: {whole:?}");
    Ok(())
}

#[test]
fn first_blocks_are_dense_attention() -> Result<()> {
    let case = Case::new(1, (300, 300), (2, 1), 32, true);
    let [q, k, v] = tensors(&case)?;
    let dense = case.attention(Scheme::Unquantized).apply(&q, &k, &v)?.narrow(1, 0, 96)?;
    for theta in [-5f32, 0.0, 5.0] {
        let theta = Tensor::new(&[theta, -theta], &Device::Cpu)?;
        let sla2 = Sla2::new(Scheme::Unquantized).blocks(2).block((32, 32)).causal(true);
        let selection = sla2.select(&some_router(1, 32)?, &q, &k)?;
        let out = sla2.apply(&q, &k, &v, &selection, &theta)?.narrow(1, 0, 96)?;
        // The tiles are smaller than in dense attention, so f32 sums are rounded differently.
        let difference = (out - &dense)?.abs()?.max_all()?.to_scalar::<f32>()?;
        assert!(difference < 1e-6, "{difference:e}");
    }
    Ok(())
}

/// A router that starts with a wrong query matrix (permuted channels) learns which blocks of keys queries attend to.
#[test]
fn the_router_learns_where_the_mass_is() -> Result<()> {
    let (len, d) = (512, 16);
    let mut normals = Normals::new(11);
    // A key is its block's direction plus noise. A query is 3 times the direction of block `looked_for`, plus noise.
    let blocks = len / 32;
    let (directions, turned) = (normals.vec(blocks * d, 1.0), |c: usize| (c + d / 2) % d);
    let noise = normals.vec(2 * len * d, 0.3);
    let (mut q, mut k) = (vec![0f32; len * d], vec![0f32; len * d]);
    for token in 0..len {
        let looked_for = (token / 32 * 7) % blocks;
        for c in 0..d {
            k[token * d + c] = directions[token / 32 * d + c] + noise[token * d + c];
            q[token * d + c] = 3.0 * directions[looked_for * d + c] + noise[(len + token) * d + c];
        }
    }
    let tensor = |x: Vec<f32>| Tensor::from_vec(x, (1, len, 1, d), &Device::Cpu);
    let (q, k) = (tensor(q)?, tensor(k)?);
    let sla2 = Sla2::new(Scheme::Unquantized).blocks(2).block((32, 32)).causal(true);
    let identity = Router::new(1, d, &Device::Cpu)?;
    let caught = |router: &Router| sla2.mass_caught(&sla2.select(router, &q, &k)?, &q, &k);
    let turn: Vec<f32> = (0..d * d).map(|i| f32::from(u8::from(turned(i / d) == i % d))).collect();
    let weight = Var::from_vec(turn, (1, d, d), &Device::Cpu)?;
    let key = Var::from_tensor(identity.weights()[1])?;
    let router = Router::from_tensors(weight.as_tensor().clone(), key.as_tensor().clone())?;
    let before = (sla2.router_loss(&router, &q, &k)?.to_scalar::<f32>()?, caught(&router)?);
    for _ in 0..60 {
        let grads = sla2.router_loss(&router, &q, &k)?.backward()?;
        for var in [&weight, &key] {
            let gradient = grads.get(var).expect("a gradient");
            let step = (gradient / gradient.abs()?.max_all()?.to_scalar::<f32>()? as f64)?;
            var.set(&(var.as_tensor() - (step * 0.05)?)?)?;
        }
    }
    let after = (sla2.router_loss(&router, &q, &k)?.to_scalar::<f32>()?, caught(&router)?);
    println!("loss and mass caught: {before:?}, trained {after:?}, identity {}", caught(&identity)?);
    assert!(after.0 < before.0 - 0.3, "loss {} -> {}", before.0, after.0);
    assert!(after.1 > before.1 + 0.2, "mass {} -> {}", before.1, after.1);
    Ok(())
}

#[test]
fn what_does_not_fit_is_an_error() -> Result<()> {
    let case = Case::new(1, (64, 64), (2, 1), 16, false);
    let [q, k, v] = tensors(&case)?;
    let theta = Tensor::zeros(2, DType::F32, &Device::Cpu)?;
    let router = Router::new(1, 16, &Device::Cpu)?;
    let sla2 = Sla2::new(Scheme::Unquantized).block((16, 16));
    let message = |error: candle_core::Error| error.to_string();
    let none = sla2.clone().blocks(0).select(&router, &q, &k);
    assert!(message(none.expect_err("nothing")).contains("`blocks` must be at least 1"));
    let near = sla2.clone().nearest(1).select(&router, &q, &k);
    assert!(message(near.expect_err("not causal")).contains("no causal mask"));
    let near = sla2.clone().causal(true).blocks(1).nearest(2).select(&router, &q, &k);
    assert!(message(near.expect_err("too many")).contains("nearest 2, blocks 1"));
    let router = Router::new(2, 16, &Device::Cpu)?;
    assert!(message(sla2.select(&router, &q, &k).expect_err("heads")).contains("numbers of heads"));
    let selection = Selection::all(&case.shape(), (16, 16), &Device::Cpu)?;
    let short = theta.narrow(0, 0, 1)?;
    let wrong = sla2.apply(&q, &k, &v, &selection, &short).expect_err("one theta of two");
    assert!(message(wrong).contains("blend"));
    let half = ops::past_linear(&q, &k, &v.narrow(1, 0, 63)?, &selection, Tail::Past);
    assert!(message(half.expect_err("lengths")).contains("do not fit the selection"));
    Ok(())
}
