#!/usr/bin/env python3
"""Compares the speed and memory of sage-train's attention and PyTorch's attention, on one GPU in one run.

    cargo build --release -p sage-train --features cuda
    python3 scripts/attention_vs_pytorch.py [--binary target/release/sage-train] [D:N:CAUSAL[:WINDOW] ...]

D is the head_dim, or 192/128 for queries and keys of 192 channels with values of 128. WINDOW is the number of tokens
that a query sees, including its own: tokens before it and, without a causal mask, as many tokens after it.
PyTorch's scaled_dot_product_attention runs with its FlashAttention-2 backend (mma.sync instructions) and with
its cuDNN backend. FlashAttention-4 runs if `flash_attn.cute` can be imported (pip install flash-attn-4). cuDNN's FP8
attention (cudnn_fp8.py), with casts from and to bf16, runs if `cudnn` can be imported (pip install
nvidia-cudnn-frontend).
Times are medians between CUDA events, of the forward (which stores nothing for a backward) and of forward + backward.
Inputs are in bf16, with 16384 tokens and 2048 / D heads; several sets of inputs take turns. A speedup is the time of
FlashAttention-2 divided by the row's time: above 1 the row is faster. Memory is the peak in addition to the inputs
during forward + backward; its ratio is the row's memory divided by that of FlashAttention-2.

Under load a GPU is power-limited and slows down by up to a fifth, so that a measurement after a rest looks faster.
Therefore every series of calls, ours and theirs, begins after the same --rest, and the series of a row are measured one
after the other. `--rest 1 --repeats 10` measures short bursts, `--rest 0 --repeats 200` the speed during training.
"""
import argparse
import csv
import os
import subprocess
import tempfile
import time

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

USUAL = [f"{d}:{n}:1" for d in (64, 128) for n in (1024, 8192, 16384)]


def ours(binary, row, repeats, rest):
    """Measures sage-train on a row. Returns a list of (name, *result), with results as in `theirs`."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "bench.csv")
        command = [binary, "bench", "attention", row, "--device", "cuda", "--repeats", str(repeats), "--rest", str(rest), "--csv", path]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        with open(path) as file:
            lines = csv.DictReader(line for line in file if not line.startswith("#"))
            return [(r["attn"], float(r["forward_ms"]), float(r["both_ms"]), int(r["extra_bytes"])) for r in lines]


def provenance(args):
    """How and where times were measured, in the format of the docs' figures."""
    driver = subprocess.run(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], capture_output=True, text=True)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    about = {
        "command": " ".join(["python3", "scripts/attention_vs_pytorch.py", *args.rows, f"--rest {args.rest} --repeats {args.repeats}"]),
        "device": f"one {torch.cuda.get_device_name()}",
        "date": time.strftime("%Y-%m-%d"),
        "driver": driver.stdout.split("\n")[0].strip(),
        "commit": commit.stdout.strip(),
        "note": f"PyTorch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}; bf16, 16384 tokens, heads = 2048 / D",
    }
    return [f"# {key}: {value}\n" for key, value in about.items() if value]


def median_ms(call, repeats, rest):
    for n in range(3):
        call(n)
    torch.cuda.synchronize()
    time.sleep(rest)
    events = []
    for n in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call(n)
        end.record()
        events.append((start, end))
    torch.cuda.synchronize()
    times = sorted(start.elapsed_time(end) for start, end in events)
    return times[len(times) // 2]


class WindowedFa2(torch.autograd.Function):
    """PyTorch's FlashAttention-2 with a window, which scaled_dot_product_attention does not support."""

    @staticmethod
    def forward(ctx, q, k, v, causal, before):
        lengths, after = (None, None, q.shape[1], k.shape[1]), 0 if causal else before
        out, lse, *random, _ = torch.ops.aten._flash_attention_forward(q, k, v, *lengths, 0.0, causal, False, window_size_left=before, window_size_right=after)
        ctx.save_for_backward(q, k, v, out, lse, *random)
        ctx.arguments = (*lengths, 0.0, causal), before, after
        return out

    @staticmethod
    def backward(ctx, dout):
        arguments, before, after = ctx.arguments
        q, k, v, out, lse, *random = ctx.saved_tensors
        grads = torch.ops.aten._flash_attention_backward(dout, q, k, v, out, lse, *arguments, *random, window_size_left=before, window_size_right=after)
        return (*grads, None, None)


def sdpa(backend):
    """PyTorch's attention with a backend, on (batch, sequence, heads, head_dim). Only FlashAttention-2 supports
    windows."""

    def attention(q, k, v, causal, before=None):
        if before is not None:
            return WindowedFa2.apply(q, k, v, causal, before)
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=causal).transpose(1, 2)

    return attention


def peers():
    """The attention functions to compare with, by name. Inputs are (batch, sequence, heads, head_dim)."""
    found = {"FlashAttention-2": sdpa(SDPBackend.FLASH_ATTENTION), "cuDNN": sdpa(SDPBackend.CUDNN_ATTENTION)}
    try:
        from flash_attn.cute import flash_attn_func

        def fa4(q, k, v, causal, before=None):
            window = (None, None) if before is None else (before, 0 if causal else before)
            out = flash_attn_func(q, k, v, causal=causal, window_size=window)
            return out[0] if isinstance(out, tuple) else out

        found["FlashAttention-4"] = fa4
    except ImportError:
        pass
    try:
        from cudnn_fp8 import Attention

        found["cuDNN, FP8"] = lambda q, k, v, causal, before=None: Attention.apply(q, k, v, causal)
    except ImportError:
        pass
    return found


def theirs(attention, d, v, n, causal, before, repeats, rest):
    """Measures a peer. Returns (forward ms, forward + backward ms, peak extra bytes)."""
    batch, heads = max(1, 16384 // n), 2048 // d
    new = lambda channels, grad: torch.randn(batch, n, heads, channels, device="cuda", dtype=torch.bfloat16, requires_grad=grad)
    sets = [([new(channels, True) for channels in (d, d, v)], new(v, False)) for _ in range(3)]

    def forward(i):
        with torch.no_grad():
            attention(*sets[i % 3][0], bool(causal), before)

    def both(i):
        inputs, dout = sets[i % 3]
        torch.autograd.grad(attention(*inputs, bool(causal), before), inputs, dout)

    times = median_ms(forward, repeats, rest), median_ms(both, repeats, rest)
    torch.cuda.synchronize()
    allocated = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    both(0)
    torch.cuda.synchronize()
    return (*times, torch.cuda.max_memory_allocated() - allocated)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", metavar="D:N:CAUSAL", help="shapes [default: %s]" % " ".join(USUAL))
    parser.add_argument("--binary", default="target/release/sage-train")
    parser.add_argument("--csv", help="also write the results to this file")
    parser.add_argument("--repeats", type=int, default=30, help="timed calls of a series [default: 30]")
    parser.add_argument("--rest", type=float, default=0.0, help="seconds of rest before each series [default: 0]")
    args = parser.parse_args()
    rows, results = args.rows or USUAL, []
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}\n")
    print(f"{'D':>7} {'N':>7} {'causal':>6} {'window':>6}  {'attn':<31} {'fwd ms':>8} {'f+b ms':>8} {'fwd TF':>7} {'f+b TF':>7} {'MiB':>6}"
          f"  {'fwd/fa2':>8} {'f+b/fa2':>8} {'mem/fa2':>8}")
    for row in rows:
        channels, n, causal, *window = row.split(":")
        (d, *narrower), n, causal = map(int, channels.split("/")), int(n), int(causal)
        v = narrower[0] if narrower else d
        before = int(window[0]) - 1 if window else None
        hidden = max(n - before - 1, 0) if window else 0
        unit = 2 * max(1, 16384 // n) * (2048 // d) * (n * n - hidden * hidden) / (2 if causal else 1)
        lines = []
        for name, attention in peers().items():
            if window and name.startswith("cuDNN"):
                continue  # neither PyTorch nor cudnn_fp8.py supports windows with cuDNN
            if name == "cuDNN, FP8" and (d, v) != (128, 128):
                continue  # the only head_dim on Hopper
            try:
                lines.append((name, *theirs(attention, d, v, n, causal, before, args.repeats, args.rest)))
            except Exception as error:  # any error: the row reports it, and the other rows are measured
                print(f"{channels:>7} {n:>7} {causal:>6} {window[0] if window else '-':>6}  {name:<31} failed: {str(error)[:80]}")
            torch.cuda.empty_cache()
        lines += ours(args.binary, row, args.repeats, args.rest)
        base = lines[0]  # FlashAttention-2, or the first attention that ran
        for name, forward, both, extra in lines:
            results.append((d, v, n, causal, *(window or [""]), name, f"{forward:.4f}", f"{both:.4f}", extra))
            print(f"{channels:>7} {n:>7} {causal:>6} {window[0] if window else '-':>6}  {name:<31} {forward:>8.3f} {both:>8.3f} {unit * (d + v) / forward / 1e9:>7.0f}"
                  f" {unit * (4 * d + 3 * v) / both / 1e9:>7.0f} {extra / 2**20:>6.0f}"
                  f"  {base[1] / forward:>7.2f}x {base[2] / both:>7.2f}x {extra / base[3]:>7.2f}x", flush=True)
    if args.csv:
        with open(args.csv, "w", newline="") as file:
            file.writelines(provenance(args))
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow("head_dim value_dim tokens causal window attn forward_ms both_ms extra_bytes".split())
            writer.writerows(results)


if __name__ == "__main__":
    main()
