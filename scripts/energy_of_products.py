#!/usr/bin/env python3
"""Measures the energy of matmuls in bf16, FP8 and INT8: the difference is an upper bound on the energy that 8-bit
matmuls can save in a training step.

    python3 scripts/energy_of_products.py [--size 8192] [--seconds 3]

Each matmul of two random square matrices runs for some seconds through PyTorch (cuBLAS). Energy is read from the GPU's
counter (NVML), and includes idle power. Needs torch, nvidia-ml-py and a GPU with FP8 (compute capability 8.9 or later).
"""
import argparse
import time

import pynvml
import torch


def products(size):
    """Names of types, and functions that multiply two matrices of the type."""
    a, b = (torch.randn(size, size, device="cuda") for _ in range(2))
    one = torch.ones((), device="cuda")
    bf16 = a.bfloat16(), b.bfloat16()
    fp8 = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).t()
    int8 = (a * 32).clamp(-127, 127).to(torch.int8), (b * 32).clamp(-127, 127).to(torch.int8).t()
    yield "bf16", lambda: torch.mm(*bf16)
    yield "FP8", lambda: torch._scaled_mm(*fp8, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
    yield "INT8", lambda: torch._int_mm(*int8)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=8192, help="rows and columns of the matrices")
    parser.add_argument("--seconds", type=float, default=3.0, help="how long each type runs")
    args = parser.parse_args()
    pynvml.nvmlInit()
    # Uses the UUID, because NVML numbers GPUs regardless of CUDA_VISIBLE_DEVICES.
    uuid = f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"
    gpu = pynvml.nvmlDeviceGetHandleByUUID(uuid)
    print(f"{torch.cuda.get_device_name()}, {args.size} x {args.size} x {args.size}, random values")
    print(f"{'type':<6}{'TFLOP/s':>9}{'W':>7}{'pJ a FLOP':>11}")
    for name, product in products(args.size):
        for _ in range(20):
            product()
        torch.cuda.synchronize()
        energy, start, count = pynvml.nvmlDeviceGetTotalEnergyConsumption(gpu), time.time(), 0
        while time.time() - start < args.seconds:
            for _ in range(20):
                product()
            count += 20
            torch.cuda.synchronize()
        seconds = time.time() - start
        joules = (pynvml.nvmlDeviceGetTotalEnergyConsumption(gpu) - energy) / 1e3
        flops = 2 * args.size**3 * count
        print(f"{name:<6}{flops / seconds / 1e12:>9.0f}{joules / seconds:>7.0f}{joules / flops * 1e12:>11.3f}", flush=True)


if __name__ == "__main__":
    main()
