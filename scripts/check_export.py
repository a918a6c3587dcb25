#!/usr/bin/env python3
"""Loads an exported model with transformers and prints its mean loss over sequences of a shard, which must equal
the loss that `sage-train eval` prints for the same model and data.

usage: check_export.py EXPORT SHARD.bin CONTEXT SEQUENCES [DTYPE]   (needs torch, transformers)
"""
import sys

import numpy
import torch
import transformers


def main():
    export, shard, context, sequences = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    dtype = getattr(torch, sys.argv[5] if len(sys.argv) > 5 else "float32")
    header = numpy.fromfile(shard, numpy.int32, 256)
    width = {20240520: numpy.uint16, 20240801: numpy.uint32}[int(header[0])]
    tokens = torch.from_numpy(numpy.fromfile(shard, width, offset=1024).astype(numpy.int64))
    model = transformers.AutoModelForCausalLM.from_pretrained(export, dtype=dtype).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(export)
    text = "A line of text, with 'quotes' and numbers 12345.\n"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text, "the tokenizer does not return the text"
    losses = []
    with torch.no_grad():
        for n in range(sequences):
            window = tokens[n * context : n * context + context + 1]
            logits = model(window[None, :-1]).logits[0].float()
            losses.append(torch.nn.functional.cross_entropy(logits, window[1:]).item())
    print(type(model).__name__, transformers.__version__, f"loss {sum(losses) / len(losses):.6f}")


if __name__ == "__main__":
    main()
