# The peer of pacer-bench loss: the loss of torch's linear layer in chunks of rows, each computed again in its backward pass,
# and Liger's fused form where liger-kernel is installed. The same shapes, dtypes and JSON lines.
import argparse
import json

import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

parser = argparse.ArgumentParser()
for name, value in (("rows", 8192), ("hidden", 4096), ("vocabulary", 131072)):
    parser.add_argument("--" + name, type=int, default=value)
given = parser.parse_args()
options = dict(device="cuda", dtype=torch.bfloat16)
hidden = torch.randn(given.rows, given.hidden, **options).requires_grad_()
weight = (torch.randn(given.vocabulary, given.hidden, **options) * 0.02).requires_grad_()
targets = torch.randint(given.vocabulary, (given.rows,), device="cuda")


def chunked():
    def part(rows, wanted):
        return functional.cross_entropy(functional.linear(rows, weight).float(), wanted, reduction="sum")
    parts = (checkpoint(part, h, t, use_reentrant=False) for h, t in zip(hidden.chunk(8), targets.chunk(8)))
    return sum(parts) / given.rows


def liger():
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss
    return LigerFusedLinearCrossEntropyLoss()(weight, hidden, targets)


def measure(name, loss):
    loss().backward()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before, times = torch.cuda.memory_allocated(), []
    for _ in range(10):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        loss().backward()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    taken = (torch.cuda.max_memory_allocated() - before) / 1e9
    print(json.dumps({"peer": name, "ms": round(sorted(times)[5], 2), "GB_taken": round(taken, 3)}), flush=True)


for name, loss in (("torch, 8 chunks", chunked), ("liger", liger)):
    try:
        measure(name, loss)
    except (ImportError, RuntimeError) as error:
        print(json.dumps({"peer": name, "error": str(error).splitlines()[0]}), flush=True)
