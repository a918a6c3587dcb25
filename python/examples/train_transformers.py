"""Trains a small transformers model from a configuration, once with each attention, on the same batches.

    python examples/train_transformers.py --model qwen3 --attn sdpa,sagebwd,sagebwd_scores --text book.txt

Prints the losses side by side, and their mean difference from the losses of the first attention.
"""

import argparse
import contextlib
import pathlib

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AutoConfig, AutoModelForCausalLM

import candle_sage

SIZES = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}


# Each of these runs uses one implementation of PyTorch's sdpa, to see how much these implementations differ.
BACKENDS = {"sdpa-flash": SDPBackend.FLASH_ATTENTION, "sdpa-cudnn": SDPBackend.CUDNN_ATTENTION, "sdpa-math": SDPBackend.MATH}


def batches(text, sequence, batch, steps, device):
    """Random windows of bytes, the same for every run."""
    data = torch.tensor(list(text), dtype=torch.long)
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        starts = torch.randint(len(data) - sequence - 1, (batch,), generator=generator)
        yield torch.stack([data[at : at + sequence] for at in starts]).to(device)


def train(model_type, attn, text, args, device):
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, vocab_size=256, max_position_embeddings=args.sequence, **SIZES)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa" if attn in BACKENDS else attn).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
    losses = []
    for ids in batches(text, args.sequence, args.batch, args.steps, device):
        with torch.autocast(device, dtype=dtype, enabled=device == "cuda"):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses).tolist()


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="qwen3", help="a model type of transformers: llama, qwen3, ..")
    parser.add_argument("--attn", default="sdpa,sagebwd,sagebwd_scores,candle_sage", help="attention implementations; the first is the reference; sdpa-flash, sdpa-cudnn, sdpa-math: one of PyTorch's")
    parser.add_argument("--text", type=pathlib.Path, help="a file to train on; by default this script")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--sequence", type=int, default=512)
    args = parser.parse_args()
    candle_sage.register_transformers()
    text = (args.text or pathlib.Path(__file__)).read_bytes()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    runs = {}
    for attn in args.attn.split(","):
        with sdpa_kernel(BACKENDS[attn]) if attn in BACKENDS else contextlib.nullcontext():
            runs[attn] = train(args.model, attn, text, args, device)
    print("step".rjust(6) + "".join(attn.rjust(16) for attn in runs))
    for step in range(0, args.steps, max(1, args.steps // 10)):
        print(f"{step:6}" + "".join(f"{losses[step]:16.4f}" for losses in runs.values()))
    first, *_ = runs.values()
    for attn, losses in runs.items():
        mean = sum(abs(a - b) for a, b in zip(losses, first, strict=True)) / len(first)
        print(f"{attn}: last loss {losses[-1]:.4f}, mean absolute difference {mean:.5f}")


if __name__ == "__main__":
    main()
