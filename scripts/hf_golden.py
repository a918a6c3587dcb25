#!/usr/bin/env python3
"""Writes the golden models of sage-train/tests/golden: a Llama and a Qwen3 of transformers with random
weights, each with the logits of random ids and a tokenizer.

usage: hf_golden.py FOLDER        (needs torch, transformers, tokenizers, safetensors)
"""
import json
import pathlib
import sys

import tokenizers
import torch
import transformers
from safetensors.torch import save_file


def tokenizer(folder):
    """Trains and saves a byte-level BPE of 300 entries, as sage-train trains its tokenizers."""
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


def main():
    out = pathlib.Path(sys.argv[1])
    shape = dict(
        vocab_size=300, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=64, rms_norm_eps=1e-5,
        tie_word_embeddings=True, initializer_range=0.2,
    )
    kinds = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM, 10_000.0),
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM, 1_000_000.0),
    }
    for name, (config, model, theta) in kinds.items():
        torch.manual_seed(7)
        folder = out / name
        folder.mkdir(parents=True)
        model = model(config(**shape, rope_theta=theta)).float().eval()
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
        print(name, "transformers", transformers.__version__, theta_kept.get("rope_parameters", theta_kept.get("rope_theta")))


if __name__ == "__main__":
    main()
