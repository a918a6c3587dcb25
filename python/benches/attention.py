"""Speed of attention through PyTorch, compared with the backends of scaled_dot_product_attention, on one GPU.

    python benches/attention.py [--csv PREFIX] [head_dim:sequence ...]

Device times are medians of calls between CUDA events: forward + backward, causal, bf16, 16384 tokens and 2048 channels
in total. Implementations take turns, with a rest between them, and times include quantization. FlashAttention-4 is
included if `flash_attn.cute` can be imported. Host times are the times to issue a forward and a backward on 128 tokens,
at the 10th percentile of batches of calls.
"""

import argparse
import csv
import subprocess
import time

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import candle_sage

ROUNDS, CALLS, REST = 12, 3, 0.1


def ours(scheme, **settings):
    return lambda q, k, v: candle_sage.attention(q, k, v, scheme, causal=True, **settings)


def sdpa(q, k, v):
    heads_first = (x.transpose(1, 2) for x in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(*heads_first, is_causal=True).transpose(1, 2)


def backend(which):
    def call(q, k, v):
        with sdpa_kernel(which):
            return sdpa(q, k, v)

    return call


def flash_attention_4():
    try:
        from flash_attn.cute import flash_attn_func
    except ImportError:
        return {}

    def call(q, k, v):
        out = flash_attn_func(q, k, v, causal=True)
        return out[0] if isinstance(out, tuple) else out

    return {"FlashAttention-4": call}


IMPLEMENTATIONS = {
    "sdpa, FlashAttention-2": backend(SDPBackend.FLASH_ATTENTION),
    "sdpa, cuDNN": backend(SDPBackend.CUDNN_ATTENTION),
    "sdpa": sdpa,
    **flash_attention_4(),
    "16 bit": ours("fpa"),
    "SageBwd `scores`, sample-64": ours("sagebwd", products="scores", key_mean="sample-64"),
    "SageBwd": ours("sagebwd"),
    "Attn-QAT": ours("attn-qat"),
}


def tensors(head_dim, sequence, tokens=16384, channels=2048):
    heads, batch = channels // head_dim, max(1, tokens // sequence)
    draw = lambda: torch.randn(batch, sequence, heads, head_dim, device="cuda", dtype=torch.bfloat16)
    return [draw().requires_grad_() for _ in range(3)], draw()


def step(call, inputs, grad):
    for x in inputs:
        x.grad = None
    call(*inputs).backward(grad)


def device_times(head_dim, sequence):
    """The median time of each implementation, in milliseconds."""
    inputs, grad = tensors(head_dim, sequence)
    times = {name: [] for name in IMPLEMENTATIONS}
    for rounds in range(ROUNDS + 1):
        for name, call in IMPLEMENTATIONS.items():
            torch.cuda.synchronize()
            time.sleep(REST)
            events = [torch.cuda.Event(enable_timing=True) for _ in range(CALLS + 1)]
            step(call, inputs, grad)
            events[0].record()
            for event in events[1:]:
                step(call, inputs, grad)
                event.record()
            torch.cuda.synchronize()
            if rounds:
                times[name] += [a.elapsed_time(b) for a, b in zip(events, events[1:], strict=False)]
    return {name: sorted(each)[len(each) // 2] for name, each in times.items()}


def host_time(call, calls=20, batches=200):
    """Microseconds of a forward and a backward."""
    inputs, grad = tensors(64, 128, tokens=128, channels=256)
    times = []
    for _ in range(batches):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            step(call, inputs, grad)
        times.append((time.perf_counter() - start) / calls * 1e6)
    return sorted(times)[batches // 10]


def write(path, shapes, note, head, rows):
    """Writes results in the format of the docs' figures: how and where they were measured, and a table."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    about = {
        "command": "python benches/attention.py " + " ".join(f"{d}:{n}" for d, n in shapes),
        "device": f"one {torch.cuda.get_device_name()}",
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit,
        "note": f"PyTorch {torch.__version__}; {note}",
    }
    with open(path, "w", newline="") as file:
        file.writelines(f"# {key}: {value}\n" for key, value in about.items() if value)
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(head)
        writer.writerows(rows)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="*", metavar="head_dim:sequence", help="default: 64 and 128, 1024 to 16384")
    parser.add_argument("--csv", metavar="PREFIX", help="also write PREFIX-speed.csv and PREFIX-host.csv")
    args = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}, {time.strftime('%Y-%m-%d')}\n")
    shapes = [tuple(map(int, shape.split(":"))) for shape in args.shapes]
    shapes = shapes or [(d, n) for d in (64, 128) for n in (1024, 4096, 16384)]
    columns = [device_times(*shape) for shape in shapes]
    base = "sdpa, FlashAttention-2"
    print(f"{'ms, speedup over ' + base[6:]:42}" + "".join(f"{f'{d}:{n}':>16}" for d, n in shapes) + f"{'host, us':>10}")
    host = {}
    for name, call in IMPLEMENTATIONS.items():
        host[name] = host_time(call)
        cells = (f"{column[name]:8.3f} {column[base] / column[name]:5.2f}x" for column in columns)
        print(f"{name:42}" + "".join(f"{cell:>16}" for cell in cells) + f"{host[name]:10.1f}")
    if args.csv:
        note = "bf16, causal, batch x N = 16384 tokens, heads x D = 2048 channels; all cells from one call of the command"
        rows = [(*shape, name, f"{x:.3f}") for shape, column in zip(shapes, columns, strict=True) for name, x in column.items()]
        write(f"{args.csv}-speed.csv", shapes, note, ("D", "N", "implementation", "both_ms"), rows)
        write(f"{args.csv}-host.csv", shapes, "128 tokens", ("implementation", "forward + backward, us"), [(k, f"{x:.0f}") for k, x in host.items()])


if __name__ == "__main__":
    main()
