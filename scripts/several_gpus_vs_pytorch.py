#!/usr/bin/env python3
"""Measures how the training of sage-train and of PyTorch's DistributedDataParallel scales from one GPU to several.

  several_gpus_vs_pytorch.py SAGE_TRAIN [--gpus 8,4] [--tokens 32k,8k,4k] [--model 325m] [--repeats 3]

For each number of tokens per GPU and step, the script prints the milliseconds of a step on one GPU and on
several, and the parallel efficiency: the throughput of N GPUs divided by N times the throughput of one GPU. The
time of one GPU is the median over all GPUs of the machine, which run independently at the same time; the times of
the fastest and the slowest GPU follow. Both programs train the same model on random tokens: a Llama with SwiGLU,
QK-norm, context 4096, bf16 compute with f32 weights, and AdamW with gradient clipping. PyTorch runs with
torch.compile, cuDNN's attention and fused AdamW. Times are medians over steps, then over repeats.

Needs torch, numpy, at least two NVIDIA GPUs, and NCCL where sage-train finds it (SAGE_TRAIN_NCCL).
"""
import argparse
import concurrent.futures
import json
import os
import pathlib
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from typing import NamedTuple

import numpy
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

VOCAB, TOKENIZER_VOCAB, CONTEXT = 50304, 50257, 4096
WARM_UP = 8


class Shape(NamedTuple):
    layers: int
    width: int
    heads: int
    head_dim: int
    hidden: int


SHAPES = {"325m": Shape(20, 1024, 16, 64, 3072), "1.2b": Shape(24, 2048, 16, 128, 5632)}


class Layer(nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.shape = shape
        _, width, heads, head_dim, hidden = shape
        self.attention_norm = nn.RMSNorm(width, eps=1e-6)
        self.mlp_norm = nn.RMSNorm(width, eps=1e-6)
        self.head_norms = nn.ModuleList(nn.RMSNorm(head_dim, eps=1e-6) for _ in "qk")
        self.projection = nn.Linear(width, 3 * heads * head_dim, bias=False)
        self.output = nn.Linear(heads * head_dim, width, bias=False)
        self.gate_up = nn.Linear(width, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def attend(self, x, angles):
        batch, tokens = x.shape[:2]
        heads = self.projection(x).view(batch, tokens, 3 * self.shape.heads, -1).transpose(1, 2)
        query, key, value = heads.split(self.shape.heads, dim=1)
        query, key = (rotate(norm(x), angles).to(value.dtype) for norm, x in zip(self.head_norms, (query, key)))
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.output(out.transpose(1, 2).flatten(2))

    def forward(self, x, angles):
        x = x + self.attend(self.attention_norm(x), angles)
        gate, up = self.gate_up(self.mlp_norm(x)).split(self.shape.hidden, dim=-1)
        return x + self.down(F.silu(gate) * up)


def rotate(x, angles):
    first, second = x.chunk(2, dim=-1)
    cos, sin = angles
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class Llama(nn.Module):
    def __init__(self, shape, context=CONTEXT):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, shape.width)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width, eps=1e-6)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)
        frequencies = 10_000.0 ** (torch.arange(0, shape.head_dim, 2) / -shape.head_dim)
        angle = torch.arange(context)[:, None] * frequencies
        self.register_buffer("angles", torch.stack([angle.cos(), angle.sin()]))

    def forward(self, ids):
        x = self.embedding(ids[:, :-1]).bfloat16()
        for layer in self.layers:
            x = layer(x, self.angles)
        logits = F.linear(self.norm(x), self.embedding.weight)
        return F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())


def pytorch_rank(name, rank, ranks, port, micro_batch, steps, results):
    """Trains as one rank; rank 0 writes the milliseconds of its steps to `results`."""
    torch.cuda.set_device(rank)
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    model = Llama(SHAPES[name]).cuda()
    wrapped = model
    if ranks > 1:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(ranks))
        torch.distributed.init_process_group("nccl", device_id=torch.device("cuda", rank))
        wrapped = nn.parallel.DistributedDataParallel(
            model, device_ids=[rank], gradient_as_bucket_view=True, static_graph=True
        )
    wrapped = torch.compile(wrapped)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    ids = torch.randint(0, VOCAB, (micro_batch, CONTEXT + 1), device="cuda")
    events = []
    for _ in range(steps + 1):
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        events.append(event)
        with torch.autocast("cuda", torch.bfloat16), sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            loss = wrapped(ids)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=ranks == 1)
    torch.cuda.synchronize()
    if rank == 0:
        times = [a.elapsed_time(b) for a, b in zip(events, events[1:])]
        pathlib.Path(results).write_text(json.dumps(times))
    if ranks > 1:
        torch.distributed.destroy_process_group()


def visible(gpus):
    return {**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))}


def pytorch(gpus, micro_batch, args, scratch):
    results = scratch / f"pytorch-{gpus[0]}-{time.monotonic_ns()}.json"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    run = "import sys, several_gpus_vs_pytorch as s; _, name, *n, out = sys.argv; s.pytorch_rank(name, *map(int, n), out)"
    words = [sys.executable, "-c", run, args.model]
    numbers = [[rank, len(gpus), port, micro_batch, args.steps] for rank in range(len(gpus))]
    here = {"PYTHONPATH": str(pathlib.Path(__file__).resolve().parent), "PYTHONWARNINGS": "ignore"}
    children = [
        subprocess.Popen([*words, *map(str, n), str(results)], env=visible(gpus) | here, stderr=subprocess.DEVNULL)
        for n in numbers
    ]
    assert not any([child.wait() for child in children]), "a rank of PyTorch failed"
    return json.loads(results.read_text())


def random_tokens(folder, tokens):
    """Writes shards of random tokens in nanoGPT's format, and the tokenizer that sage-train needs."""
    folder.mkdir()
    for name, size in (("train", tokens), ("val", 100 * CONTEXT)):
        ids = numpy.random.default_rng(0).integers(0, TOKENIZER_VOCAB, size, dtype=numpy.uint16)
        ids.tofile(folder / f"{name}.bin")
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = [chr(byte) for byte in printable] + [chr(256 + n) for n in range(len(others))]
    names = letters + [f"<{n}>" for n in range(TOKENIZER_VOCAB - 257)] + ["<|endoftext|>"]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [
            {"id": len(names) - 1, "content": names[-1], "special": True, "single_word": False, "lstrip": False,
             "rstrip": False, "normalized": False}
        ],
        "pre_tokenizer": byte_level,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": {name: id for id, name in enumerate(names)}, "merges": []},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


def sage_train(gpus, micro_batch, args, scratch, flags, context=CONTEXT):
    """The milliseconds of steps."""
    name = f"run-{gpus[0]}-{time.monotonic_ns()}"
    tokens = micro_batch * context * len(gpus)
    shape = SHAPES[args.model]._asdict()
    shape["ffn"] = shape.pop("hidden")
    words = ["--preset", "325m", "--attn", "fpa", "--device", "cuda", "--data", "tokens", "--lr", "3e-4"]
    words += [text for key, value in shape.items() for text in (f"--{key.replace('_', '-')}", str(value))]
    words += ["--context", str(context), "--micro-batch", str(micro_batch), "--tokens-per-step", str(tokens)]
    words += ["--eval-every", "0", "--eval-tokens", str(context), "--checkpoint-minutes", "0", "--sample-tokens", "0"]
    words += ["--name", name, "--steps", "100000", *flags.split()]
    words += ["--gpus", str(len(gpus))] if len(gpus) > 1 else []
    # The run is killed after its measured steps: validation and checkpoints at its end are not measured.
    log = (scratch / f"{name}.log").open("w")
    child = subprocess.Popen(
        [args.program, *words], cwd=scratch, env=visible(gpus), stdout=log, stderr=log, start_new_session=True
    )
    metrics = scratch / "runs" / name / "metrics.jsonl"
    while child.poll() is None and not (metrics.exists() and len(metrics.read_text().splitlines()) >= args.steps):
        time.sleep(0.05)
    assert child.poll() is None, (scratch / f"{name}.log").read_text()
    os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    points = [json.loads(line) for line in metrics.read_text().splitlines()[: args.steps]]
    return [1e3 * tokens / point["tokens_per_second"] for point in points]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", type=os.path.abspath)
    parser.add_argument("--gpus", help="numbers of GPUs, e.g. 8,4 [default: all of the machine]")
    parser.add_argument("--tokens", default="32k,8k,4k", help="tokens per GPU and step [default: %(default)s]")
    parser.add_argument("--model", choices=SHAPES, default="325m", help="[default: %(default)s]")
    parser.add_argument("--repeats", type=int, default=3, help="[default: %(default)s]")
    parser.add_argument("--steps", type=int, default=24, help="[default: %(default)s]")
    parser.add_argument(
        "--flags", action="append", help="additional flags for sage-train on several GPUs, in one string; each use adds a row"
    )
    parser.add_argument("--common", default="", help="additional flags for sage-train on any number of GPUs, in one string")
    parser.add_argument("--side", choices=["sage-train", "PyTorch"], help="measure only one of the two [default: both]")
    args = parser.parse_args()
    present = torch.cuda.device_count()
    assert present > 1, "at least two GPUs are needed"
    several = [int(count) for count in (args.gpus or str(present)).split(",")]
    sides = [args.side] if args.side else ["sage-train", "PyTorch"]
    print(f"{present} x {torch.cuda.get_device_name()}, PyTorch {torch.__version__}, {args.model}; ms a step")
    print(f"{'tokens a GPU':<14}{'one GPU':>9}{'fastest, slowest':>20}{'GPUs':>6}{'':>9}{'efficiency':>12}")
    with tempfile.TemporaryDirectory() as folder:
        scratch = pathlib.Path(folder)
        random_tokens(scratch / "tokens", 1 << 24)
        for tokens in args.tokens.split(","):
            micro_batch = int(tokens.removesuffix("k")) * 1024 // CONTEXT

            def measure(side, gpus, flags=""):
                if side == "PyTorch":
                    times = pytorch(gpus, micro_batch, args, scratch)
                else:
                    times = sage_train(gpus, micro_batch, args, scratch, f"{args.common} {flags}")
                return statistics.median(times[WARM_UP:])

            rows = {(side, flags): {n: [] for n in several} for side in sides for flags in variants(side, args)}
            alone = {side: [] for side in sides}
            for _ in range(args.repeats):
                for side in sides:
                    with concurrent.futures.ThreadPoolExecutor(present) as pool:
                        alone[side] += pool.map(lambda gpu: measure(side, [gpu]), range(present))
                for (side, flags), together in rows.items():
                    for n in several:
                        together[n].append(measure(side, list(range(n)), flags))
            for (side, flags), together in rows.items():
                for n, times in together.items():
                    one, all_ = statistics.median(alone[side]), statistics.median(times)
                    spread = f"{min(alone[side]):.1f}, {max(alone[side]):.1f}"
                    row = f"{tokens:<14}{one:>9.1f}{spread:>20}{n:>6}{all_:>9.1f}{one / all_:>12.1%}  {side} {flags}"
                    print(row, flush=True)


def variants(side, args):
    return [""] if side == "PyTorch" or not args.flags else args.flags


if __name__ == "__main__":
    main()
