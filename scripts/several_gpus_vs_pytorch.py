#!/usr/bin/env python3
"""Compares the scaling of sage-train with that of PyTorch's DistributedDataParallel, on the 325M preset: on
one GPU and on all GPUs of this machine, by turns.

  several_gpus_vs_pytorch.py SAGE_TRAIN [--tokens 32k,8k,4k] [--repeats 3] [--steps 24]

For each number of tokens per GPU and step it prints the milliseconds of a step on one GPU and on all, and
their ratio, which is the parallel efficiency. Both programs do the same work: a Llama of 20 layers, 16 heads
of 64, width 1024, SwiGLU 3072, 50,304 tokens, QK-norm, context 4096, bf16 on f32 weights, clipped AdamW.
PyTorch runs with torch.compile, cuDNN's attention and fused AdamW. Times are medians over steps, then over
repeats.

Needs torch, at least two NVIDIA GPUs, and NCCL where sage-train finds it (SAGE_TRAIN_NCCL).
"""
import argparse
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

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

LAYERS, WIDTH, HEADS, HEAD_DIM, HIDDEN, VOCAB, CONTEXT = 20, 1024, 16, 64, 3072, 50304, 4096
WARM_UP = 8


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention_norm = nn.RMSNorm(WIDTH, eps=1e-6)
        self.mlp_norm = nn.RMSNorm(WIDTH, eps=1e-6)
        self.head_norms = nn.ModuleList(nn.RMSNorm(HEAD_DIM, eps=1e-6) for _ in "qk")
        self.projection = nn.Linear(WIDTH, 3 * HEADS * HEAD_DIM, bias=False)
        self.output = nn.Linear(HEADS * HEAD_DIM, WIDTH, bias=False)
        self.gate_up = nn.Linear(WIDTH, 2 * HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def attend(self, x, angles):
        batch, tokens = x.shape[:2]
        heads = self.projection(x).view(batch, tokens, 3 * HEADS, HEAD_DIM).transpose(1, 2)
        query, key, value = heads.split(HEADS, dim=1)
        query, key = (rotate(norm(x), angles).to(value.dtype) for norm, x in zip(self.head_norms, (query, key)))
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.output(out.transpose(1, 2).flatten(2))

    def forward(self, x, angles):
        x = x + self.attend(self.attention_norm(x), angles)
        gate, up = self.gate_up(self.mlp_norm(x)).split(HIDDEN, dim=-1)
        return x + self.down(F.silu(gate) * up)


def rotate(x, angles):
    first, second = x.split(HEAD_DIM // 2, dim=-1)
    cos, sin = angles
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class Llama(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(WIDTH, eps=1e-6)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)
        frequencies = 10_000.0 ** (torch.arange(0, HEAD_DIM, 2) / -HEAD_DIM)
        angle = torch.arange(CONTEXT)[:, None] * frequencies
        self.register_buffer("angles", torch.stack([angle.cos(), angle.sin()]))

    def forward(self, ids):
        x = self.embedding(ids[:, :-1]).bfloat16()
        for layer in self.layers:
            x = layer(x, self.angles)
        logits = F.linear(self.norm(x), self.embedding.weight)
        return F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())


def pytorch_rank(rank, ranks, port, micro_batch, steps, results):
    """Trains as one rank; rank 0 writes the milliseconds of its steps to `results`."""
    torch.cuda.set_device(rank)
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    model = Llama().cuda()
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


def pytorch(ranks, micro_batch, steps, scratch):
    results = scratch / f"pytorch-{time.monotonic_ns()}.json"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    run = "import sys, several_gpus_vs_pytorch as s; s.pytorch_rank(*map(int, sys.argv[1:6]), sys.argv[6])"
    words = [sys.executable, "-c", run]
    numbers = [[rank, ranks, port, micro_batch, steps] for rank in range(ranks)]
    here = {**os.environ, "PYTHONPATH": str(pathlib.Path(__file__).resolve().parent), "PYTHONWARNINGS": "ignore"}
    children = [subprocess.Popen([*words, *map(str, n), str(results)], env=here) for n in numbers]
    assert not any([child.wait() for child in children]), "a rank of PyTorch failed"
    return json.loads(results.read_text())


def sage_train(program, ranks, micro_batch, steps, scratch):
    name = f"run-{time.monotonic_ns()}"
    tokens = micro_batch * CONTEXT * ranks
    words = ["--preset", "325m", "--attn", "fpa", "--device", "cuda", "--corpus-mb", "16", "--lr", "3e-4"]
    words += ["--micro-batch", str(micro_batch), "--tokens-per-step", str(tokens), "--name", name]
    words += ["--eval-every", "0", "--eval-tokens", "4096", "--checkpoint-minutes", "0", "--sample-tokens", "0"]
    # The first run makes the tokenizer, of fewer entries than the embedding has rows; later ones read it.
    tokenizer = scratch / "tokenizer.json"
    words += ["--vocab-size", "50257"] + (["--tokenizer", str(tokenizer)] if tokenizer.exists() else [])
    words += ["--gpus", str(ranks)] if ranks > 1 else []
    # The run is killed after its measured steps: validation and checkpoints at its end are not measured.
    one = {} if ranks > 1 else {"CUDA_VISIBLE_DEVICES": "0"}
    log = (scratch / f"{name}.log").open("w")
    child = subprocess.Popen(
        [program, *words, "--steps", "100000"], cwd=scratch, env={**os.environ, **one}, stdout=log, stderr=log,
        start_new_session=True,
    )
    metrics = scratch / "runs" / name / "metrics.jsonl"
    while child.poll() is None and not (metrics.exists() and len(metrics.read_text().splitlines()) >= steps):
        time.sleep(0.05)
    assert child.poll() is None, (scratch / f"{name}.log").read_text()
    os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    if not tokenizer.exists():
        tokenizer.write_text((scratch / "runs" / name / "tokenizer.json").read_text())
    points = [json.loads(line) for line in metrics.read_text().splitlines()[:steps]]
    return [1e3 * tokens / point["tokens_per_second"] for point in points]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", type=os.path.abspath)
    parser.add_argument("--tokens", default="32k,8k,4k")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=24)
    args = parser.parse_args()
    ranks = torch.cuda.device_count()
    assert ranks > 1, "one GPU"
    print(f"{ranks} x {torch.cuda.get_device_name()}, PyTorch {torch.__version__}; ms a step", flush=True)
    print(f"{'tokens a GPU':<14}{'':<12}{'one GPU':>9}{f'{ranks} GPUs':>9}{'part of as many':>17}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        scratch = pathlib.Path(folder)
        sides = {
            "sage-train": lambda *work: sage_train(args.program, *work, scratch),
            "PyTorch": lambda *work: pytorch(*work, scratch),
        }
        for tokens in args.tokens.split(","):
            micro_batch = int(tokens.removesuffix("k")) * 1024 // CONTEXT
            times = {(side, n): [] for side in sides for n in (1, ranks)}
            for _ in range(args.repeats):
                for side, n in times:
                    median = statistics.median(sides[side](n, micro_batch, args.steps)[WARM_UP:])
                    times[side, n].append(median)
                    print(f"  {tokens} {side} on {n}: {median:.1f} ms", file=sys.stderr, flush=True)
            for side in sides:
                one, all_ = (statistics.median(times[side, n]) for n in (1, ranks))
                print(f"{tokens:<14}{side:<12}{one:>9.1f}{all_:>9.1f}{one / all_:>16.1%}", flush=True)


if __name__ == "__main__":
    main()
