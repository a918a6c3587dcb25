#!/usr/bin/env python3
"""Trains PyTorch and sage-train from the same initial weights on the same batches, and compares the gradients
of the first step and the losses of all steps.

  train_beside_pytorch.py init FOLDER TOKENIZER.json [layers width heads head_dim ffn vocab]
      writes a Qwen3 model of transformers with random weights, for --init-from (default: the 325M preset's shape)
  train_beside_pytorch.py compare FOLDER BATCHES.bin CONTEXT ONE_STEP_RUN RUN [RUN ...]
      BATCHES.bin      the file that --write-batches writes for the runs' settings
      ONE_STEP_RUN     a run with --steps 1 --clip 0, whose first moment is the gradient times 1 - beta1
      RUN ...          the runs to compare; the first one determines the steps and the learning rates

Needs torch, transformers, safetensors and a GPU.
"""
import json
import pathlib
import shutil
import sys
import tomllib

import numpy
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file

STATE = "checkpoints/step-%08d/state.safetensors"


def init(folder, tokenizer, *shape):
    layers, width, heads, head_dim, ffn, vocab = [int(n) for n in shape] or [20, 1024, 16, 64, 3072, 50304]
    torch.manual_seed(1)
    config = transformers.Qwen3Config(
        vocab_size=vocab, hidden_size=width, intermediate_size=ffn, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=heads, head_dim=head_dim, rms_norm_eps=1e-6,
        rope_theta=10_000.0, max_position_embeddings=16384, tie_word_embeddings=True, initializer_range=0.02,
    )
    transformers.Qwen3ForCausalLM(config).float().save_pretrained(folder)
    shutil.copy(tokenizer, pathlib.Path(folder) / "tokenizer.json")


def sequences(path, context):
    header = numpy.fromfile(path, numpy.int32, 256)
    width = {20240520: numpy.uint16, 20240801: numpy.uint32}[int(header[0])]
    tokens = numpy.fromfile(path, width, offset=1024).astype(numpy.int64)
    return torch.from_numpy(tokens).view(-1, context + 1)


def model_of(folder):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    return model.cuda().train()


def loss_of(model, batch, autocast):
    batch = batch.cuda()
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        hidden = model.model(batch[:, :-1]).last_hidden_state
        logits = F.linear(hidden, model.lm_head.weight)
    return F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())


def gradients(model, batch, micro, autocast):
    model.zero_grad(set_to_none=True)
    for part in batch.split(micro):
        (loss_of(model, part, autocast) * (len(part) / len(batch))).backward()
    return {name: p.grad.detach().clone() for name, p in model.named_parameters()}


def relative(a, b):
    return ((a - b).norm() / b.norm()).item()


def compare_gradients(folder, batch, run, beta1):
    """Compares the errors of both programs' gradients, relative to f32. The error of sage-train may be at most twice
    the error of PyTorch plus 2^-9, one rounding to bf16."""
    torch.backends.cuda.matmul.allow_tf32 = False
    model = model_of(folder)
    exact = gradients(model, batch, 1, False)
    theirs = gradients(model, batch, 4, True)
    ours = load_file(str(run / (STATE % 1)))
    worst, rows = 0.0, []
    for name, reference in exact.items():
        got = ours["adamw.mean/" + name].cuda() / (1 - beta1)
        errors = relative(got, reference), relative(theirs[name], reference)
        rows.append((name, *errors))
        worst = max(worst, errors[0] / (2 * errors[1] + 2**-9))
    rows.sort(key=lambda row: -row[1])
    print(f"{'gradient of the first step, relative L2 error against f32':<60} {'ours':>9} {'PyTorch':>9}")
    for name, a, b in rows[:6] + rows[len(rows) // 2 : len(rows) // 2 + 2] + rows[-2:]:
        print(f"{name:<60} {a:9.2e} {b:9.2e}")
    print(f"worst of {len(rows)}: {worst:.2f} of the bound (2 x PyTorch's + 2^-9)", flush=True)
    assert worst < 1.0


def train(folder, all_sequences, rates, per_step, micro, settings):
    model = model_of(folder)
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": settings["weight-decay"]}, {"params": others, "weight_decay": 0.0}]
    betas, eps = (settings["beta1"], settings["beta2"]), settings["adam-eps"]
    optimizer = torch.optim.AdamW(groups, lr=0.0, betas=betas, eps=eps, fused=True)
    losses = []
    for step, rate in enumerate(rates):
        batch = all_sequences[step * per_step : (step + 1) * per_step]
        total = 0.0
        for part in batch.split(micro):
            loss = loss_of(model, part, True) * (len(part) / len(batch))
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings["clip"])
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(total)
    return torch.stack(losses).tolist()


def compare(folder, batches, context, one_step, *runs):
    context, one_step, runs = int(context), pathlib.Path(one_step), [pathlib.Path(run) for run in runs]
    # Settings are in tables with distinct keys; config files without tables work too.
    settings = tomllib.loads((runs[0] / "config.toml").read_text())
    for table in [value for value in settings.values() if isinstance(value, dict)]:
        settings = settings | table
    points = {run.name: [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()] for run in runs}
    first = points[runs[0].name]
    per_step = first[0]["tokens"] // context
    all_sequences = sequences(batches, context)
    assert len(all_sequences) == per_step * len(first)
    compare_gradients(folder, all_sequences[:per_step], one_step, settings["beta1"])
    rates = [point["lr"] for point in first]
    curves = {f"PyTorch, micro-batch {micro}": train(folder, all_sequences, rates, per_step, micro, settings) for micro in (4, 2)}
    curves |= {run: [point["loss"] for point in run_points] for run, run_points in points.items()}
    names = list(curves)
    base = numpy.array(curves[names[0]])
    print(f"\nlosses of {len(base)} steps against {names[0]}: mean of |difference|, largest, mean difference of the last 50")
    for name in names[1:]:
        d = numpy.array(curves[name]) - base
        print(f"{name:<28} {abs(d).mean():.5f} {abs(d).max():.5f} {d[-50:].mean():+.5f}")
    print("\nstep  " + "  ".join(names))
    for step in sorted({0, 1, 2, 4, 9, 19, 49, 99, 149, len(base) - 1} & set(range(len(base)))):
        print(f"{step + 1:<5} " + "  ".join(f"{curves[name][step]:.5f}" for name in names))


if __name__ == "__main__":
    {"init": init, "compare": compare}[sys.argv[1]](*sys.argv[2:])
