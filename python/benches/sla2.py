"""Speed of SLA2 through PyTorch, compared with dense attention in 16 bit, on one GPU.

    python benches/sla2.py [--scheme fpa] [--blocks 8] [batch:sequence ...]

Forward + backward, causal, bf16, 8 heads of 128 channels. Times are medians of calls between CUDA events; the first
compiled call is not timed. `--blocks` is the number of selected blocks for each block of queries, in addition to the
diagonal.
"""

import argparse
import time

import torch

import candle_sage

HEADS, HEAD_DIM, CALLS, REST = 8, 128, 10, 0.2


def milliseconds(call, inputs, grad):
    def step():
        for x in inputs:
            x.grad = None
        call(*inputs).backward(grad)

    for _ in range(3):
        step()
    torch.cuda.synchronize()
    time.sleep(REST)
    times = []
    for _ in range(CALLS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        step()
        end.record()
        times.append((start, end))
    torch.cuda.synchronize()
    return sorted(start.elapsed_time(end) for start, end in times)[CALLS // 2]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--scheme", default="fpa", help="scheme of the selected blocks [default: %(default)s]")
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("rows", nargs="*", default=["4:4096", "1:16384", "1:32768"], metavar="batch:sequence")
    args = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}, {time.strftime('%Y-%m-%d')}, {args.blocks} blocks")
    print("batch  sequence   dense, 16 bit       SLA2   compiled   ms; and dense / SLA2")
    for row in args.rows:
        batch, sequence = map(int, row.split(":"))
        draw = lambda: torch.randn(batch, sequence, HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
        inputs, grad = [draw().requires_grad_() for _ in range(3)], draw()
        attend = candle_sage.SLA2(HEADS, HEADS, HEAD_DIM, args.scheme, blocks=args.blocks, causal=True).cuda()
        torch.compiler.reset()
        dense = milliseconds(lambda q, k, v: candle_sage.attention(q, k, v, causal=True), inputs, grad)
        eager = milliseconds(attend, inputs, grad)
        compiled = milliseconds(torch.compile(attend, fullgraph=True), inputs, grad)
        print(f"{batch:5} {sequence:9} {dense:15.2f} {eager:10.2f} {compiled:10.2f}   {dense / eager:.2f}x, {dense / compiled:.2f}x")


if __name__ == "__main__":
    main()
