"""Times a training step of a transformers model with the shapes of Qwen3 0.6B, by attention implementation, on one GPU.

    python benches/transformers_step.py [--sequence 8192] [--compile]

Random tokens, bf16 weights, AdamW. Implementations take turns; times are medians. `--compile` compiles the model, and
counts graph breaks.
"""

import argparse
import time

import torch
from transformers import AutoConfig, AutoModelForCausalLM

import candle_sage

SHAPES = {
    "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True,
}


def graph_breaks(model, ids):
    torch._dynamo.reset()
    return torch._dynamo.explain(model)(input_ids=ids).graph_break_count


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sequence", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--attn", default="sdpa,candle_sage,sagebwd_scores,sagebwd")
    parser.add_argument("--compile", action="store_true")
    args = parser.parse_args()
    candle_sage.register_transformers()
    config = AutoConfig.for_model("qwen3", max_position_embeddings=args.sequence, **SHAPES)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    ids = torch.randint(config.vocab_size, (1, args.sequence), device="cuda")
    names, times, forward = args.attn.split(","), {}, {}
    for name in names:
        model.set_attn_implementation(name)
        if args.compile:
            print(f"{name}: {graph_breaks(model, ids[:, :256])} graph breaks")
            torch._dynamo.reset()
    for turn in range(args.rounds + 1):
        for name in names:
            model.set_attn_implementation(name)
            if args.compile and name not in forward:
                forward[name] = torch.compile(model, dynamic=False)
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(2):
                forward.get(name, model)(input_ids=ids, labels=ids).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            torch.cuda.synchronize()
            if turn:
                times.setdefault(name, []).append((time.perf_counter() - start) / 2)
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}, {time.strftime('%Y-%m-%d')}, context {args.sequence}")
    base = sorted(times[names[0]])[args.rounds // 2]
    for name in names:
        middle = sorted(times[name])[args.rounds // 2]
        print(f"{name:16} {middle * 1e3:8.1f} ms a step, {base / middle:5.2f}x {names[0]}")


if __name__ == "__main__":
    main()
