# The peer of pacer-bench muon: torch.optim.Muon for the hidden matrices and torch.optim.AdamW(fused=True) for the rest,
# over the same shapes and dtype. Prints a JSON line of the same times: device, whole and host, on a CPU only the whole.
# torch keeps the momentum and moments of bf16 parameters in bf16 and no digits beyond theirs, so a step of it moves
# fewer bytes than pacer's. With --check it compares values of pacer.Muon with those of torch.optim.Muon instead.
import argparse
import json
import statistics
import sys
import time

import torch

UNCOUNTED = 3
SMALL, LARGE = [(64, 64), (64, 256), (256, 64), (96, 160)], [(768, 768), (2304, 768), (768, 3072)]  # of the check
OPTIONS = {"lr": 1e-3, "weight_decay": 0.1, "momentum": 0.95, "nesterov": True, "ns_steps": 5,
           "adjust_lr_fn": "match_rms_adamw"}


def gpt(layers, width, length, vocabulary):
    """Returns the shapes of hidden matrices and of the rest, as benchmarks/muon/models.cpp has them."""
    hidden = [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)] * layers
    vectors = [(width,)] * 4 + [(3 * width,), (width,), (4 * width,), (width,)]
    rest = [(vocabulary, width), (length, width), *vectors * layers, (width,), (width,), (vocabulary, width)]
    return hidden, rest


def gpt2():
    """Returns those of GPT-2, whose weights lie as (in, out) and whose head is its embedding."""
    hidden, rest = gpt(12, 768, 1024, 50257)
    return [(columns, rows) for rows, columns in hidden], rest[:-1]


MODELS = {"gpt": lambda: gpt(24, 2048, 1024, 32768), "gpt2": gpt2, "tiny": lambda: gpt(2, 128, 64, 256)}


def parameters_of(shapes, device, dtype):
    params = [torch.nn.Parameter(torch.empty(shape, device=device, dtype=dtype).normal_(0, 0.02)) for shape in shapes]
    for parameter in params:
        parameter.grad = torch.empty_like(parameter).normal_(0, 0.1)
    return params


def count(params):
    return sum(parameter.numel() for parameter in params)


def host_milliseconds(step):
    start = time.perf_counter()
    step()
    return (time.perf_counter() - start) * 1e3


def device_milliseconds(step, spin):
    """Returns the time between two events around a step, behind a kernel that spins so many milliseconds."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(int(spin * 1.7e6))
    begin.record()
    step()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def measure(device, dtype):
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    torch.manual_seed(1)
    hidden, rest = (parameters_of(shapes, device, dtype) for shapes in MODELS[given.model]())
    muon = torch.optim.Muon(hidden, **OPTIONS)
    adamw = torch.optim.AdamW(rest, lr=OPTIONS["lr"], weight_decay=OPTIONS["weight_decay"], fused=True)

    def step():
        muon.step()
        adamw.step()

    times = {"device_ms": [], "whole_ms": [], "host_ms": []}
    for _ in range(UNCOUNTED):
        wait()
        host = host_milliseconds(step)
    for _ in range(given.rounds):
        wait()
        start = time.perf_counter()
        times["host_ms"].append(host_milliseconds(step))
        wait()
        times["whole_ms"].append((time.perf_counter() - start) * 1e3)
        if device == "cuda":
            times["device_ms"].append(device_milliseconds(step, 0.1 + 1.5 * host))
    if device == "cpu":
        del times["device_ms"], times["host_ms"]
    where = torch.cuda.get_device_name() if device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    medians = {name: round(statistics.median(values), 3) for name, values in times.items()}
    return {"peer": "torch.optim.Muon and AdamW(fused=True)", "model": given.model, "dtype": given.dtype,
            "hidden": len(hidden), "hidden_M": round(count(hidden) * 1e-6, 2), "others": len(rest),
            "others_M": round(count(rest) * 1e-6, 2), "device": where, "torch": torch.__version__,
            "rounds": given.rounds, **medians}


def matrix(shape, generator, device):
    return torch.randn(shape, generator=generator).to(device)


def trained(optimizer_of, shape, device):
    """Returns a matrix after 200 steps, whose gradients are noise that fades and a drift that stays."""
    generator = torch.Generator().manual_seed(1)
    parameter = torch.nn.Parameter(matrix(shape, generator, device))
    drift, optimizer = 0.1 * matrix(shape, generator, device), optimizer_of([parameter])
    for i in range(200):
        parameter.grad = 0.98**i * matrix(shape, generator, device) + drift
        optimizer.step()
    return parameter.detach().double()


def check():
    """Prints a line for each device, precision of pacer's products (torch's are in bf16), and shape."""
    try:
        import pacer
    except ImportError as error:
        print(f"the check is skipped, as there is no Python package of pacer here: {error}")
        return
    for device in ["cpu"] + ["cuda"] * torch.cuda.is_available():
        for precision in ("bf16", "fp32"):
            for shape in SMALL + LARGE * (device == "cuda"):
                start = matrix(shape, torch.Generator().manual_seed(1), device).double()
                mine = trained(lambda params: pacer.Muon(params, precision=precision, **OPTIONS), shape, device)
                theirs = trained(lambda params: torch.optim.Muon(params, **OPTIONS), shape, device)
                off = (mine - theirs).norm()
                print(json.dumps({"check": device, "precision": precision, "shape": shape,
                                  "of_parameters": float(f"{(off / theirs.norm()).item():.3g}"),
                                  "of_movement": float(f"{(off / (theirs - start).norm()).item():.3g}")}), flush=True)


on_gpu = torch.cuda.is_available()
parser = argparse.ArgumentParser(description="Times torch.optim.Muon and AdamW over the shapes of pacer-bench muon.")
parser.add_argument("--model", choices=MODELS, help="whose parameters; without it gpt on a GPU, tiny on a CPU")
parser.add_argument("--dtype", choices=["bf16", "fp32"], default="bf16", help="of parameters and gradients")
parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if on_gpu else "cpu")
parser.add_argument("--rounds", type=int, default=25, help="whose median counts")
parser.add_argument("--check", action="store_true", help="compare values of 200 steps with those of pacer.Muon instead")
given = parser.parse_args()
given.model = given.model or ("gpt" if given.device == "cuda" else "tiny")
if not hasattr(torch.optim, "Muon"):
    sys.exit(f"torch {torch.__version__} has no torch.optim.Muon, which came with 2.9")
if given.check:
    check()
else:
    print(json.dumps(measure(given.device, torch.bfloat16 if given.dtype == "bf16" else torch.float32)), flush=True)
