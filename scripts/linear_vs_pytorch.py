#!/usr/bin/env python3
"""Measures a training step with linear layers in 16 bit and in FP8, in sage-train and in PyTorch, on one GPU.

  linear_vs_pytorch.py SAGE_TRAIN [--rows 325m:4096,325m-128:4096,1.2b:4096] [--tokens 32k]

A row is a model and a context; 325m-128 has 8 heads of 128 channels instead of 16 of 64. The columns are the
milliseconds of a step: sage-train in bf16, with `--linear fp8`, and with the output matrix in FP8 too; PyTorch
in bf16, and in FP8. Both programs train the Llama of several_gpus_vs_pytorch.py on random tokens. PyTorch's FP8
layers have E4M3 operands, E5M2 gradients, and a scale from each matrix's largest value; their casts are compiled
(`torch.compile`), and the output matrix stays in bf16. Times are medians over steps.

Needs torch, numpy and an NVIDIA GPU with FP8 units.
"""
import argparse
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
from types import SimpleNamespace

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import several_gpus_vs_pytorch as peers

peers.SHAPES["325m-128"] = peers.Shape(20, 1024, 8, 128, 3072)
WARM_UP = peers.WARM_UP
STEPS = WARM_UP + 16


def quantize(x, dtype):
    """The quantized values, and the factor that dequantizes them."""
    most = torch.finfo(dtype).max
    scale = most / x.abs().amax().float().clamp(min=1e-12)
    return (x.float() * scale).clamp(-most, most).to(dtype), scale.reciprocal()


def product(a, b, sums_in_f32):
    """a (rows, inner) times the transpose of b (columns, inner), both as quantized values and factor."""
    return torch._scaled_mm(
        a[0], b[0].t(), scale_a=a[1], scale_b=b[1], out_dtype=torch.bfloat16, use_fast_accum=not sums_in_f32
    )


class Fp8Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        rows, matrix = (quantize(t, torch.float8_e4m3fn) for t in (x.flatten(0, -2), weight))
        ctx.save_for_backward(*rows, *matrix)
        return product(rows, matrix, False).unflatten(0, x.shape[:-1])

    @staticmethod
    def backward(ctx, dy):
        x, x_factor, weight, weight_factor = ctx.saved_tensors
        gradient, factor = quantize(dy.flatten(0, -2), torch.float8_e5m2)
        dx = product((gradient, factor), (weight.t().contiguous(), weight_factor), True)
        turned = gradient.t().contiguous(), factor
        return dx.unflatten(0, dy.shape[:-1]), product(turned, (x.t().contiguous(), x_factor), True)


class Fp8Linear(nn.Linear):
    def forward(self, x):
        return Fp8Product.apply(x, self.weight.bfloat16())


def pytorch(name, context, micro_batch, fp8):
    """The milliseconds of a step."""
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    model = peers.Llama(peers.SHAPES[name], context)
    for layer in model.modules():
        if fp8 and isinstance(layer, nn.Linear):
            layer.__class__ = Fp8Linear
    model = model.cuda()
    compiled = torch.compile(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    ids = torch.randint(0, peers.VOCAB, (micro_batch, context + 1), device="cuda")
    events = []
    for _ in range(STEPS + 1):
        events.append(torch.cuda.Event(enable_timing=True))
        events[-1].record()
        with torch.autocast("cuda", torch.bfloat16), sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            loss = compiled(ids)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    torch.cuda.synchronize()
    times = [a.elapsed_time(b) for a, b in zip(events, events[1:])]
    print(statistics.median(times[WARM_UP:]))


def of_pytorch(*values):
    """Runs `pytorch` in a separate process, which frees its memory at exit."""
    code = "import linear_vs_pytorch as l, sys; n, c, m, f = sys.argv[1:]; l.pytorch(n, int(c), int(m), f == 'True')"
    here = {**os.environ, "PYTHONPATH": str(pathlib.Path(__file__).resolve().parent), "PYTHONWARNINGS": "ignore"}
    words = [sys.executable, "-c", code, *map(str, values)]
    run = subprocess.run(words, env=here, capture_output=True, text=True)
    return float(run.stdout) if run.returncode == 0 else float("nan")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", type=os.path.abspath)
    parser.add_argument("--rows", default="325m:4096,325m-128:4096,1.2b:4096", help="[default: %(default)s]")
    parser.add_argument("--tokens", default="32k", help="tokens per step; 1.2b uses half as many [default: %(default)s]")
    parser.add_argument("--side", choices=["sage-train", "PyTorch"], help="measure only one of the two [default: both]")
    args = parser.parse_args()
    columns = {"bf16": "", "fp8": "--linear fp8", "and the head": "--linear fp8 --linear-head fp8"}
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}; ms a step")
    heads = [*columns, "PyTorch bf16", "PyTorch FP8"]
    print(f"{'model':<10}{'context':>8}" + "".join(f"{head:>14}" for head in heads))
    with tempfile.TemporaryDirectory() as folder:
        scratch = pathlib.Path(folder)
        peers.random_tokens(scratch / "tokens", 1 << 24)
        for row in args.rows.split(","):
            name, context = row.split(":")
            tokens = int(args.tokens.removesuffix("k")) * 1024 // (2 if name == "1.2b" else 1)
            micro_batch = tokens // int(context)
            run = SimpleNamespace(program=args.program, model=name, steps=STEPS)
            times = []
            if args.side != "PyTorch":
                for flags in columns.values():
                    steps = peers.sage_train([0], micro_batch, run, scratch, flags, int(context))
                    times.append(statistics.median(steps[WARM_UP:]))
            times += [float("nan")] * (len(columns) - len(times))
            if args.side != "sage-train":
                times += [of_pytorch(name, context, micro_batch, fp8) for fp8 in (False, True)]
            print(f"{name:<10}{context:>8}" + "".join(f"{time:>14.1f}" for time in times), flush=True)


if __name__ == "__main__":
    main()
