#!/usr/bin/env python3
"""Measures the speed of Python's tokenizers, for comparison with `sage-train data prepare`: encodes JSON lines in
batches into a file of 16-bit ids.

usage: tokenize_with_python.py TOKENIZER.json DATA.jsonl OUT.bin     (needs tokenizers, numpy)
"""
import json
import sys
import time

import numpy
import tokenizers


def main():
    began = time.time()
    tokenizer = tokenizers.Tokenizer.from_file(sys.argv[1])
    end, text, tokens, batch = tokenizer.token_to_id("<|endoftext|>"), 0, 0, []
    with open(sys.argv[2], encoding="utf-8") as lines, open(sys.argv[3], "wb") as out:

        def flush():
            nonlocal tokens
            for encoding in tokenizer.encode_batch_fast(batch, add_special_tokens=False):
                ids = numpy.array(encoding.ids + [end], numpy.uint16)
                ids.tofile(out)
                tokens += len(ids)
            batch.clear()

        for line in lines:
            batch.append(json.loads(line)["text"])
            text += len(batch[-1].encode())
            if len(batch) == 1000:
                flush()
        flush()
    seconds = time.time() - began
    print(f"{tokens} tokens, {seconds:.1f} s, {text / 1e6 / seconds:.1f} MB/s")


if __name__ == "__main__":
    main()
