# The peer of pacer-bench kernels --filter cuda/gpt2-xl/: steps of optimizers in Python with moments in 8 bits over the same 580
# tensors, FlashOptim's and bitsandbytes' where these are installed, and torch's own with 32 bits.
import argparse
import json

import torch

parser = argparse.ArgumentParser()
for name, value in (("width", 1600), ("blocks", 48), ("steps", 25)):
    parser.add_argument("--" + name, type=int, default=value)
given = parser.parse_args()
width = given.width
shapes = [(50257, width), (1024, width)]
for _ in range(given.blocks):
    for weight, bias in (((width,), width), ((width, 3 * width), 3 * width), ((width, width), width), ((width,), width),
                         ((width, 4 * width), 4 * width), ((4 * width, width), width)):
        shapes += [weight, (bias,)]
shapes += [(width,), (width,)]


def parameters(dtype):
    parameters = [torch.randn(shape, device="cuda", dtype=dtype).mul_(0.02).requires_grad_() for shape in shapes]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter).mul_(1e-4)
    return parameters


def torch_fused():
    return torch.optim.AdamW(parameters(torch.float32), lr=1e-4, fused=True)


def flash(**options):
    from flashoptim import FlashAdamW
    return FlashAdamW(parameters(torch.bfloat16), lr=1e-4, **options)


def bitsandbytes():
    from bitsandbytes.optim import AdamW8bit
    return AdamW8bit(parameters(torch.float32), lr=1e-4)


def measure(name, make):
    before = torch.cuda.memory_allocated()
    optimizer = make()
    count = sum(p.numel() for group in optimizer.param_groups for p in group["params"])
    for _ in range(3):
        optimizer.step()
    torch.cuda.synchronize()
    held, times = torch.cuda.memory_allocated() - before, []
    for _ in range(given.steps):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        optimizer.step()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    median = sorted(times)[len(times) // 2]
    print(json.dumps({"peer": name, "params_M": round(count / 1e6, 1), "ms": round(median, 3), "least": round(min(times), 3),
                      "bytes_each_with_gradient": round(held / count, 2)}), flush=True)


for name, make in (("torch.optim.AdamW fused, fp32", torch_fused), ("flashoptim, bf16 in 24 bits", flash),
                   ("flashoptim, bf16 and fp32", lambda: flash(master_weight_bits=32)),
                   ("bitsandbytes AdamW8bit, fp32", bitsandbytes)):
    try:
        measure(name, make)
    except (ImportError, RuntimeError, ValueError) as error:
        print(json.dumps({"peer": name, "error": str(error).splitlines()[0]}), flush=True)
    torch.cuda.empty_cache()
