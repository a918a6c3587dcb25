#!/usr/bin/env python3
"""Writes the golden models of sage-train/tests/golden: transformers models with random weights (a Llama, a Qwen3, a
Qwen2 with biases, a Llama 3 with scaled RoPE frequencies and an untied output matrix), each with the logits of random
ids and a tokenizer. Then trains each model in f64 with PyTorch's AdamW, and writes the results of the training
(training.safetensors) and its tokens (training/train.bin, val.bin). A model that already exists in the folder is
kept, and trained.

usage: hf_golden.py FOLDER        (needs torch, transformers, tokenizers, safetensors)
"""
import json
import math
import pathlib
import sys

import tokenizers
import torch
import transformers
from safetensors.torch import load_file, save_file

# The settings of the training, the same as in sage-train/tests/it/hf/training.rs.
SEQUENCES, CONTEXT, STEPS = 8, 32, 6
PEAK, FLOOR, WARMUP = 1e-2, 1e-3, 2
BETAS, EPS, WEIGHT_DECAY, CLIP = (0.9, 0.95), 1e-4, 0.5, 1.25
# Every STRIDE-th element of each tensor is written.
STRIDE = 11


def tokenizer(folder):
    """Trains and saves a byte-level BPE of 300 entries, in the way sage-train trains its tokenizers."""
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    text = "the quick brown fox jumps over the lazy dog and the dog does not mind at all. " * 50
    bpe.train_from_iterator([text], trainer)
    bpe.save(str(folder / "tokenizer.json"))


def frequencies(config):
    """Radians per token of each pair of channels, in f64."""
    rope, d = config.rope_parameters, config.head_dim
    plain = rope["rope_theta"] ** -(torch.arange(0, d, 2).double() / d)
    if rope["rope_type"] == "default":
        return plain
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    turns = rope["original_max_position_embeddings"] * plain / (2 * math.pi)
    share = ((turns - low) / (high - low)).clamp(0, 1)
    return plain * (share + (1 - share) / rope["factor"])


def in_f64(model):
    """The model in f64. transformers computes norms and angles in f32 whatever the model's type is."""
    model = model.double()

    def norm(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon) * self.weight

    def angles(self, x, position_ids):
        turns = position_ids[..., None].double() * frequencies(self.config)
        turns = torch.cat((turns, turns), -1)
        return turns.cos(), turns.sin()

    for module in model.modules():
        kind = type(module).__name__
        if kind.endswith("RMSNorm"):
            module.forward = norm.__get__(module)
        elif kind.endswith("RotaryEmbedding"):
            module.forward = angles.__get__(module)
    return model


def rate(step):
    """The learning rate of a step, counted from 0: a linear warm-up, then half a cosine to FLOOR at the last step."""
    if step < WARMUP:
        return PEAK * (step + 1) / WARMUP
    done = (step - WARMUP) / (STEPS - 1 - WARMUP)
    return FLOOR + (PEAK - FLOOR) * 0.5 * (1 + math.cos(math.pi * done))


def train(folder, kind, tokens):
    """Trains on all sequences in every step, so that their order does not matter. Weight decay applies to matrices, not
    to norms and biases."""
    model = in_f64(kind.from_pretrained(folder, attn_implementation="sdpa"))
    expected = load_file(str(folder / "logits.safetensors"))
    with torch.no_grad():
        error = (model(expected["ids"]).logits - expected["logits"]).abs().max() / expected["logits"].abs().max()
    assert error < 5e-6, error
    matrices = [p for p in model.parameters() if p.dim() == 2]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [dict(params=matrices, weight_decay=WEIGHT_DECAY), dict(params=vectors, weight_decay=0.0)]
    adamw = torch.optim.AdamW(groups, betas=BETAS, eps=EPS)
    ids = tokens[: SEQUENCES * CONTEXT].view(SEQUENCES, CONTEXT)
    targets = tokens[1:].view(SEQUENCES, CONTEXT)
    kept = {"loss": [], "grad_norm": []}
    for step in range(STEPS):
        for group in adamw.param_groups:
            group["lr"] = rate(step)
        adamw.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(ids).logits.flatten(0, 1), targets.flatten())
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        adamw.step()
        kept["loss"].append(loss.item())
        kept["grad_norm"].append(norm.item())
    print(folder.name, "losses", kept["loss"], "norms", kept["grad_norm"], "torch", torch.__version__)
    kept = {name: torch.tensor(values, dtype=torch.float64) for name, values in kept.items()}
    for name, parameter in model.named_parameters():
        state = adamw.state[parameter]
        values = {"": parameter, "adamw.mean/": state["exp_avg"], "adamw.square/": state["exp_avg_sq"]}
        for prefix, value in values.items():
            kept[prefix + name] = value.detach().flatten()[::STRIDE].float()
    save_file(kept, str(folder / "training.safetensors"))


def main():
    out = pathlib.Path(sys.argv[1])
    shape = dict(
        vocab_size=300, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=64, rms_norm_eps=1e-5,
        tie_word_embeddings=True, initializer_range=0.2, bos_token_id=0, eos_token_id=0,
    )
    scaled = dict(rope_type="llama3", rope_theta=10_000.0, factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0,
                  original_max_position_embeddings=24)
    kinds = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM, dict(rope_theta=10_000.0)),
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM, dict(rope_theta=1_000_000.0)),
        "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM, dict(rope_theta=1_000_000.0)),
        "llama3": (transformers.LlamaConfig, transformers.LlamaForCausalLM,
                   dict(rope_parameters=scaled, tie_word_embeddings=False)),
    }
    torch.manual_seed(11)
    train_tokens = torch.randint(0, 300, (SEQUENCES * CONTEXT + 1,))
    val_tokens = torch.randint(0, 300, (2 * CONTEXT + 1,))
    (out / "training").mkdir(parents=True, exist_ok=True)
    for name, ids in [("train", train_tokens), ("val", val_tokens)]:
        # nanoGPT's format: 16 bits per token, without a header.
        (out / "training" / f"{name}.bin").write_bytes(ids.numpy().astype("<u2").tobytes())
    for name, (config, kind, own) in kinds.items():
        folder = out / name
        if not folder.exists():
            make(folder, kind, config(**{**shape, **own}))
        train(folder, kind, train_tokens)


def make(folder, kind, config):
    """Saves a model with random weights, its tokenizer, and its logits of random ids."""
    torch.manual_seed(7)
    folder.mkdir(parents=True)
    model = kind(config).float().eval()
    with torch.no_grad():
        # Weights of norms differ from 1, so that a missing factor shows.
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.uniform_(0.5, 1.5)
    model.save_pretrained(folder, safe_serialization=True)
    (folder / "generation_config.json").unlink(missing_ok=True)
    tokenizer(folder)
    ids = torch.randint(0, 300, (2, 40))
    with torch.no_grad():
        logits = model(ids).logits
    save_file({"ids": ids, "logits": logits.contiguous()}, str(folder / "logits.safetensors"))
    theta_kept = json.loads((folder / "config.json").read_text())
    print(folder.name, "transformers", transformers.__version__, theta_kept.get("rope_parameters", theta_kept.get("rope_theta")))


if __name__ == "__main__":
    main()
