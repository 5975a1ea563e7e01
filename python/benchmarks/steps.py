#!/usr/bin/env python3
"""Times one step of pacer's AdamW and Adam beside torch's with fused=True, on BERT-large's 398 parameter tensors.

    PYTHONPATH=build/release/python python3 python/benchmarks/steps.py --device cuda

Contenders take turns in each round, and the fastest round of each counts. "host" is the time of the call, without
waiting for the GPU; "device" is the time of a step where many follow one another. Ratios are torch's time over pacer's.
"""
import argparse
import platform
import time

import torch

import pacer


def bert_large(layers=24, width=1024, vocabulary=30522):
    """Returns the shapes of BERT-large with its pooler and its two pre-training heads' own parameters."""
    def linear(inputs, outputs):
        return [(outputs, inputs), (outputs,)]

    norm = [(width,), (width,)]
    embeddings = [(vocabulary, width), (512, width), (2, width), *norm]
    attention = linear(width, width) * 4 + norm
    feed_forward = linear(width, 4 * width) + linear(4 * width, width) + norm
    heads = linear(width, width) + norm + [(vocabulary,)] + linear(width, 2)
    return embeddings + (attention + feed_forward) * layers + linear(width, width) + heads


def seconds_of(step, count, device):
    """Returns host and device seconds of one step."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    wait()
    start = time.perf_counter()
    for _ in range(count):
        step()
    host = time.perf_counter() - start
    wait()
    return host / count, (time.perf_counter() - start) / count


def main():
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    arguments.add_argument("--layers", type=int, default=24, help="BERT-large has 24")
    arguments.add_argument("--width", type=int, default=1024, help="BERT-large has 1024")
    arguments.add_argument("--steps", type=int, default=20, help="a round")
    arguments.add_argument("--rounds", type=int, default=5)
    options = arguments.parse_args()
    device, dtype = torch.device(options.device), getattr(torch, options.dtype)

    shapes = bert_large(options.layers, options.width)
    params = [torch.nn.Parameter(torch.randn(shape, device=device, dtype=dtype)) for shape in shapes]
    for parameter in params:
        parameter.grad = torch.randn_like(parameter)
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    print(f"{where}; torch {torch.__version__}, pacer {pacer.__version__}, Python {platform.python_version()}")
    print(f"{len(params)} tensors, {sum(p.numel() for p in params):,} parameters, {options.dtype}")
    if dtype == torch.bfloat16:
        print("pacer keeps fp32 moments and 16-bit remainders here, and torch bf16 moments: not the same work")

    print("| optimizer | torch, host ms | pacer, host ms | ratio | torch, device ms | pacer, device ms | ratio |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for peer, own in [(torch.optim.AdamW, pacer.FusedAdamW), (torch.optim.Adam, pacer.FusedAdam)]:
        contenders = [peer(params, lr=1e-4, fused=True), own(params, lr=1e-4)]
        for optimizer in contenders:
            seconds_of(optimizer.step, 3, device)
        best = [[float("inf")] * 2 for _ in contenders]
        for _ in range(options.rounds):
            for figures, optimizer in zip(best, contenders):
                figures[:] = map(min, figures, seconds_of(optimizer.step, options.steps, device))
        (torch_host, torch_device), (own_host, own_device) = best
        print(
            f"| {peer.__name__} | {1e3 * torch_host:.3f} | {1e3 * own_host:.3f} | {torch_host / own_host:.2f} "
            f"| {1e3 * torch_device:.3f} | {1e3 * own_device:.3f} | {torch_device / own_device:.2f} |",
            flush=True,
        )
        del contenders


if __name__ == "__main__":
    main()
