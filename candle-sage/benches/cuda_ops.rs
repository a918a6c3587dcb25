//! Time and bandwidth of the ops on a GPU, forward and backward, except attention.
//!
//! `cargo bench --features cuda --bench cuda_ops -- [op ...]`; the shapes are those of a Llama of 325 M
//! parameters at 32768 tokens: width 1024, 16 heads of 64, 3072 hidden channels, 50304 classes, bf16. Bytes
//! are a lower bound: each input is read once, each output written once. Bandwidths are also printed in percent
//! of the bandwidth of a device-to-device copy, which is measured first. Times are medians over calls, measured with
//! CUDA events. They include host time where the host is slower than the GPU. The time of candle's own work in
//! `backward()` is measured separately and subtracted: candle fills the output's gradient with ones, and adds each
//! input's gradient to zeros.

use candle_core::{DType, Device, Result, Tensor, Var};
use candle_sage::fp8::Fp8Format;
use candle_sage::ops::{
    self, AdamW, CrossEntropy, Fp8Copies, Fp8Linear, Fp8Matrix, Fp8Scales, Fp8Sums, Muon, MuonMatrix,
    MuonPart, QkNormRopeGrad, RopeStyle,
};

const TOKENS: usize = 32 * 1024;
const SEQUENCE: usize = 4096;
const WIDTH: usize = 1024;
const HEADS: usize = 16;
const HIDDEN: usize = 3072;
const CLASSES: usize = 50304;

struct Bench {
    device: Device,
    repeats: usize,
    /// Bandwidth of a device-to-device copy in bytes per second, reads and writes together.
    copy: f64,
}

impl Bench {
    /// The median time of a call, in milliseconds.
    fn time(&self, mut call: impl FnMut() -> Result<()>) -> Result<f64> {
        let stream = self.device.as_cuda_device()?.cuda_stream();
        let event = || {
            stream.record_event(Some(cudarc::driver::sys::CUevent_flags::CU_EVENT_DEFAULT)).expect("an event")
        };
        let mut times = Vec::new();
        for _ in 0..self.repeats + 3 {
            let start = event();
            call()?;
            times.push((start, event()));
        }
        self.device.synchronize()?;
        let mut times: Vec<f32> =
            times.iter().skip(3).map(|(a, b)| a.elapsed_ms(b).expect("two events")).collect();
        times.sort_by(f32::total_cmp);
        Ok(f64::from(times[times.len() / 2]))
    }

    fn line(&self, name: &str, way: &str, ms: f64, bytes: usize) {
        let rate = bytes as f64 / ms * 1e3;
        println!("{name:22} {way:4} {ms:8.3} {:8.0} {:6.1} %", rate / 1e9, 100.0 * rate / self.copy);
    }

    /// Measures an op's forward and backward. `bytes` are the bytes that each of them reads and writes.
    fn op(
        &self,
        name: &str,
        inputs: &[&Var],
        bytes: [usize; 2],
        op: impl Fn(&[Tensor]) -> Result<Tensor>,
    ) -> Result<()> {
        let constants: Vec<Tensor> = inputs.iter().map(|var| var.as_detached_tensor()).collect();
        let forward = self.time(|| op(&constants).map(drop))?;
        self.line(name, "fwd", forward, bytes[0]);
        let leaves: Vec<Tensor> = inputs.iter().map(|var| var.as_tensor().clone()).collect();
        let out = op(&leaves)?;
        let grads = out.backward()?;
        let grads: Vec<&Tensor> = inputs.iter().filter_map(|var| grads.get(var)).collect();
        let both = self.time(|| out.backward().map(drop))?;
        let candle = self.time(|| {
            out.ones_like()?;
            grads.iter().try_for_each(|grad| grad.zeros_like()?.add(grad).map(drop))
        })?;
        self.line(name, "bwd", both - candle, bytes[1]);
        Ok(())
    }
}

/// Ops that write FP8 matrices with delayed scaling, and cross-entropy in bf16 and in FP8.
fn fp8_ops(bench: &Bench, random: &dyn Fn(&[usize]) -> Result<Var>) -> Result<()> {
    let draw = |dims: &[usize]| Ok::<_, candle_core::Error>(random(dims)?.as_detached_tensor());
    let scales = Fp8Scales::new(&[Fp8Format::E4M3; 2], &bench.device)?;
    let (scale, other, both) = (scales.at(0), scales.at(1), Fp8Copies::Both);
    let elements = TOKENS * WIDTH;
    let (x, dy, weight) = (draw(&[TOKENS, WIDTH])?, draw(&[TOKENS, WIDTH])?, draw(&[WIDTH])?);
    let ms = bench.time(|| Fp8Matrix::quantize_with(&x, both, &scale).map(drop))?;
    bench.line("fp8 quantize, delayed", "", ms, 4 * elements);
    let ms =
        bench.time(|| ops::residual_rms_norm_fp8(&x, Some(&dy), &weight, 1e-6, both, &scale).map(drop))?;
    bench.line("fp8 rms_norm", "fwd", ms, 8 * elements);
    let ms =
        bench.time(|| ops::rms_norm_backward_fp8(&x, &weight, &dy, Some(&dy), 1e-6, &scale).map(drop))?;
    bench.line("fp8 rms_norm", "bwd", ms, 10 * elements);
    let (gate_up, dhidden) = (draw(&[TOKENS, 2 * HIDDEN])?, draw(&[TOKENS, HIDDEN])?);
    let (gate, up) = (gate_up.narrow(1, 0, HIDDEN)?, gate_up.narrow(1, HIDDEN, HIDDEN)?);
    let ms = bench.time(|| ops::swiglu_fp8(&gate, &up, both, &scale).map(drop))?;
    bench.line("fp8 swiglu", "fwd", ms, 6 * TOKENS * HIDDEN);
    let ms = bench.time(|| ops::swiglu_backward_fp8(&gate, &up, &dhidden, &scale, Some(&other)).map(drop))?;
    bench.line("fp8 swiglu", "bwd", ms, 11 * TOKENS * HIDDEN);
    drop((gate_up, gate, up, dhidden));
    for head_dim in [64, 128] {
        let dims = [TOKENS / SEQUENCE, SEQUENCE, WIDTH / head_dim, head_dim];
        let (x, dx, weight) = (draw(&dims)?, draw(&dims)?, draw(&[head_dim])?);
        let (cos, sin) = ops::rope_tables(SEQUENCE, head_dim, 1e4, &bench.device)?;
        let grad = QkNormRopeGrad { x: &x, weight: &weight, dout: &dx };
        let ms = bench.time(|| {
            let all = [grad, grad];
            ops::qk_norm_rope_backward_fp8(&all, Some(&dx), [&cos, &sin], 1e-6, RopeStyle::Halves, &scale)
                .map(drop)
        })?;
        bench.line(&format!("fp8 qk_norm_rope {head_dim}"), "bwd", ms, 16 * elements);
    }
    let table = (draw(&[CLASSES, WIDTH])? * 0.02)?;
    let dtable = Tensor::zeros((CLASSES, WIDTH), DType::F32, &bench.device)?;
    let targets: Vec<u32> = (0..TOKENS as u32).map(|n| n * 7919 % CLASSES as u32).collect();
    let (targets, settings) = (Tensor::new(targets, &bench.device)?, CrossEntropy::default());
    let ms = bench
        .time(|| ops::linear_cross_entropy_into(&dtable, &x, &table, &targets, settings, 1.0).map(drop))?;
    println!("cross-entropy of hidden states and weight, both gradients: bf16 {ms:.2} ms");
    let of_fp8 = |x: &Tensor| Fp8Matrix::quantize(x, Fp8Format::E4M3, both);
    let (x8, table8) = (of_fp8(&x)?, of_fp8(&table)?);
    let linear = Fp8Linear::default().gradient(Fp8Format::E5M2);
    let ms = bench.time(|| {
        ops::linear_cross_entropy_into_fp8(
            &dtable,
            &x8,
            &table8,
            &targets,
            settings,
            1.0,
            linear,
            DType::BF16,
        )
        .map(drop)
    })?;
    println!("the same in FP8, without its operands: {ms:.2} ms");
    Ok(())
}

/// The matmuls of linear layers (y, dx and dW) in bf16 and in FP8, and the quantization to FP8 with a transposed copy.
fn fp8(bench: &Bench, random: &dyn Fn(&[usize]) -> Result<Var>) -> Result<()> {
    let quantize = |x: &Tensor| Fp8Matrix::quantize(x, Fp8Format::E4M3, Fp8Copies::Both);
    for columns in [WIDTH, HIDDEN, 2 * HIDDEN] {
        let x = random(&[TOKENS, columns])?;
        let ms = bench.time(|| quantize(&x).map(drop))?;
        // The input is read twice, and two copies are written.
        bench.line(&format!("fp8 quantize {columns}"), "", ms, 6 * TOKENS * columns);
    }
    println!("product, m x n x k           bf16 ms, TFLOP/s    fp8, sums fast    fp8, sums in f32");
    for (outputs, inputs) in [(3 * WIDTH, WIDTH), (WIDTH, WIDTH), (2 * HIDDEN, WIDTH), (WIDTH, HIDDEN)] {
        let (x, w, dy) =
            (random(&[TOKENS, inputs])?, random(&[outputs, inputs])?, random(&[TOKENS, outputs])?);
        let dw = Tensor::zeros((outputs, inputs), DType::F32, x.device())?;
        let (x8, w8, dy8) = (quantize(&x)?, quantize(&w)?, quantize(&dy)?);
        let (x, w, dy) = (x.as_detached_tensor(), w.as_detached_tensor(), dy.as_detached_tensor());
        let row =
            |name: &str, dims: [usize; 3], bf16: f64, fp8: &dyn Fn(Fp8Sums) -> Result<f64>| -> Result<()> {
                let flops = 2.0 * dims.iter().map(|&n| n as f64).product::<f64>();
                let cell = |ms: f64| format!("{ms:8.3} {:6.0}", flops / ms / 1e9);
                let [fast, wide] = [cell(fp8(Fp8Sums::Fast)?), cell(fp8(Fp8Sums::F32)?)];
                println!(
                    "{:26} {}  {fast}  {wide}",
                    format!("{name} {} x {} x {}", dims[0], dims[1], dims[2]),
                    cell(bf16)
                );
                Ok(())
            };
        let bf16 = bench.time(|| x.matmul(&w.t()?).map(drop))?;
        row("y ", [TOKENS, outputs, inputs], bf16, &|sums| {
            bench.time(|| x8.product(&w8, DType::BF16, sums).map(drop))
        })?;
        let bf16 = bench.time(|| dy.matmul(&w).map(drop))?;
        row("dx", [TOKENS, inputs, outputs], bf16, &|sums| {
            bench.time(|| dy8.product(&w8.t(), DType::BF16, sums).map(drop))
        })?;
        let bf16 = bench.time(|| ops::product_into(&dw, &dy.t()?, &x, 1.0, true))?;
        row("dW", [outputs, inputs, TOKENS], bf16, &|sums| {
            bench.time(|| dy8.t().product_into(&dw, &x8.t(), true, sums))
        })?;
    }
    Ok(())
}

/// Muon's step on the matrices of 20 layers, with one matrix for each head of query, key and value. The
/// orthogonalization's memory throughput is not measured: it is printed as 0.
fn muon(bench: &Bench) -> Result<()> {
    const LAYERS: usize = 20;
    let mut at = 0;
    let mut matrix = |rows, columns| {
        at += rows * columns;
        MuonMatrix { at: at - rows * columns, rows, columns }
    };
    // The matrices of a layer are adjacent in memory. Matrices of one shape are orthogonalized together.
    let mut matrices = Vec::new();
    for _ in 0..LAYERS {
        matrices.extend((0..3 * HEADS).map(|_| matrix(WIDTH / HEADS, WIDTH)));
        matrices.extend(
            [(WIDTH, WIDTH), (HIDDEN, WIDTH), (HIDDEN, WIDTH), (WIDTH, HIDDEN)].map(|(r, c)| matrix(r, c)),
        );
    }
    matrices.sort_by_key(|matrix| (matrix.rows > WIDTH / HEADS, matrix.shape(), matrix.at));
    let mut to = 0;
    let parts = matrices.iter().map(|matrix| {
        to += matrix.elements();
        MuonPart { at: matrix.at, to: to - matrix.elements(), len: matrix.elements(), shape: matrix.shape() }
    });
    let parts: Vec<MuonPart> = parts.collect();
    let state = (Tensor::randn(0f32, 1.0, (2, at), &bench.device)? * 0.02)?;
    let gradient = Tensor::randn(0f32, 1.0, at, &bench.device)?;
    let squares = ops::sum_of_squares(&gradient)?;
    let copy = Tensor::zeros(at, DType::BF16, &bench.device)?;
    let muon = Muon::new(0.01);
    let ms = bench.time(|| muon.directions(&state, &gradient, &squares, &parts, at).map(drop))?;
    bench.line("muon momentum", "", ms, 14 * at);
    let directions = muon.directions(&state, &gradient, &squares, &parts, at)?;
    let mut first = 0;
    for same in matrices.chunk_by(|a, b| a.shape() == b.shape()) {
        let shapes: Vec<_> = same.iter().map(MuonMatrix::shape).collect();
        let len = same.len() * same[0].elements();
        let x = directions.narrow(0, first, len)?;
        first += len;
        let ms = bench.time(|| muon.orthogonalize(&x, &shapes))?;
        bench.line(&format!("muon {} of {:?}", same.len(), shapes[0]), "", ms, 0);
    }
    let ms = bench.time(|| muon.apply(&state, &directions, &squares, &parts, Some(&copy)))?;
    bench.line("muon apply", "", ms, 12 * at);
    let state = Tensor::zeros((3, at), DType::F32, &bench.device)?;
    let adamw = AdamW::new(0.01);
    let ms = bench.time(|| adamw.step(&state, &gradient, &squares, Some(&copy)))?;
    bench.line("adamw of these", "", ms, 30 * at);
    Ok(())
}

fn main() -> Result<()> {
    let wanted: Vec<String> = std::env::args().skip(1).filter(|arg| !arg.starts_with('-')).collect();
    let wants = |name: &str| wanted.is_empty() || wanted.iter().any(|w| w == name);
    let repeats = std::env::var("REPEATS").ok().and_then(|n| n.parse().ok()).unwrap_or(20);
    let device = Device::new_cuda(0)?;
    let random = |dims: &[usize]| -> Result<Var> {
        Var::from_tensor(&Tensor::randn(0f32, 1.0, dims, &device)?.to_dtype(DType::BF16)?)
    };
    let mut bench = Bench { device: device.clone(), repeats, copy: 0.0 };
    let bytes = 512 << 20;
    let source = Tensor::zeros(bytes, DType::U8, &device)?;
    let ms = bench.time(|| source.copy().map(drop))?;
    bench.copy = 2.0 * bytes as f64 / ms * 1e3;
    drop(source);
    println!("copy: {:.0} GB/s\nop                     way        ms     GB/s   copy", bench.copy / 1e9);

    let activations = 2 * TOKENS * WIDTH;
    if wants("rms_norm") {
        let (x, weight) = (random(&[TOKENS, WIDTH])?, random(&[WIDTH])?);
        bench.op("rms_norm", &[&x, &weight], [2 * activations, 3 * activations], |x| {
            ops::rms_norm(&x[0], &x[1], 1e-6)
        })?;
    }
    if wants("fp8") {
        fp8(&bench, &random)?;
        fp8_ops(&bench, &random)?;
    }
    if wants("muon") {
        muon(&bench)?;
    }
    let heads = [TOKENS / SEQUENCE, SEQUENCE, HEADS, WIDTH / HEADS];
    let (cos, sin) = ops::rope_tables(SEQUENCE, WIDTH / HEADS, 1e4, &device)?;
    if wants("rope") {
        let x = random(&heads)?;
        bench.op("rope", &[&x], [2 * activations; 2], |x| ops::rope(&x[0], &cos, &sin, RopeStyle::Halves))?;
    }
    if wants("qk_norm_rope") {
        let (x, weight) = (random(&heads)?, random(&heads[3..])?);
        bench.op("qk_norm_rope", &[&x, &weight], [2 * activations, 3 * activations], |x| {
            ops::qk_norm_rope(&x[0], &x[1], &cos, &sin, 1e-6, RopeStyle::Halves)
        })?;
    }
    if wants("swiglu") {
        let (gate, up) = (random(&[TOKENS, HIDDEN])?, random(&[TOKENS, HIDDEN])?);
        let one = 2 * TOKENS * HIDDEN;
        bench.op("swiglu", &[&gate, &up], [3 * one, 5 * one], |x| ops::swiglu(&x[0], &x[1]))?;
    }
    // Ids with the frequencies of words (Zipf's law): the frequency of id n is about proportional to 1 / (n + 1).
    let ids: Vec<u32> = (0..TOKENS as u32)
        .map(|n| {
            let uniform = f64::from(n.wrapping_mul(2_654_435_761)) / 2f64.powi(32);
            ((CLASSES as f64).powf(uniform) - 1.0) as u32
        })
        .collect();
    let ids = Tensor::new(ids, &device)?;
    if wants("embedding") {
        let table = random(&[CLASSES, WIDTH])?;
        let bytes = [2 * activations, activations + 2 * CLASSES * WIDTH];
        bench.op("embedding", &[&table], bytes, |x| ops::embedding(&x[0], &ids))?;
    }
    if wants("cross_entropy") {
        let rows = TOKENS / 8;
        let logits = random(&[rows, CLASSES])?;
        let (one, targets) = (2 * rows * CLASSES, ids.narrow(0, 0, rows)?);
        bench.op("cross_entropy", &[&logits], [one, 2 * one], |x| {
            ops::cross_entropy(&x[0], &targets, CrossEntropy::default())
        })?;
    }
    if wants("linear_cross_entropy") {
        let (hidden, weight) = (random(&[TOKENS, WIDTH])?, random(&[CLASSES, WIDTH])?);
        let weight = Var::from_tensor(&(weight.as_tensor() * 0.03)?)?;
        let (outputs, flops) = (2 * CLASSES * WIDTH, 2.0 * (TOKENS * WIDTH * CLASSES) as f64);
        let settings = CrossEntropy::default();
        let run =
            |hidden: &Tensor, weight: &Tensor| ops::linear_cross_entropy(hidden, weight, &ids, settings);
        let bytes = activations + outputs;
        bench.op("linear_cross_entropy", &[&hidden, &weight], [bytes, 2 * bytes], |x| run(&x[0], &x[1]))?;
        // Without gradients a forward is one matmul, with gradients three matmuls. The backward only scales the
        // gradients.
        let forward = bench.time(|| run(&hidden, &weight).map(drop))?;
        bench.line("  with gradients", "fwd", forward, 2 * bytes);
        println!("  three products: {:.0} TFLOP/s", 3.0 * flops / forward / 1e9);
    }
    Ok(())
}
