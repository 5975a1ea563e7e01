# The peer of pacer-bench sharding: the same models, options and JSON lines with PyTorch's own means. One process
# (python3 peer.py) or several (torchrun --nproc-per-node 4 peer.py; plain is DistributedDataParallel then). Weights are
# fp32, under bf16 autocast or, with FSDP2, gathered in bf16; fsdp-keep is FSDP2 without reshard_after_forward. Those of
# plain-bf16 and recompute-bf16 are bf16 without autocast, as in pacer's modes.
import argparse
import gc
import json
import os
import time

import torch
from torch import distributed as dist, nn, optim
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.utils.checkpoint import checkpoint

VOCABULARY, SMALL, POLICY = 32768, 724, MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
parser = argparse.ArgumentParser()
for name, value in (("layers", 24), ("width", 2048), ("batch", 8), ("sequence", 1024)):
    parser.add_argument("--" + name, type=int, default=value)
parser.add_argument("--modes", default="plain,recompute,plain-bf16,recompute-bf16,zero1,zero1+recompute,"
                                       "fsdp-keep,fsdp-keep+recompute,fsdp,fsdp+recompute")
parser.add_argument("--small-blocks", action="store_true")
parser.add_argument("--peak", action="store_true")
parser.add_argument("--memory", type=float)
given = parser.parse_args()
if "RANK" not in os.environ:
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29511")
rank, local_rank, world = (int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        heads = (part.unflatten(-1, (-1, 128)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1))
        x = x + self.out(nn.functional.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class SmallBlock(nn.Sequential):
    def forward(self, x):
        return x + super().forward(x)


class Model(nn.Module):
    def __init__(self, recompute):
        super().__init__()
        self.recompute, width = recompute, given.width
        if given.small_blocks:
            layers = ((nn.Linear(SMALL, SMALL), nn.ReLU(), nn.Linear(SMALL, SMALL)) for _ in range(64))
            self.blocks = nn.ModuleList(SmallBlock(*block) for block in layers)
        else:
            self.tokens, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(given.sequence, width)
            self.blocks = nn.ModuleList(Block(width) for _ in range(given.layers))
            self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)
        for parameter in (p for p in self.parameters() if p.dim() > 1):
            nn.init.normal_(parameter, std=0.02)

    def forward(self, x, y):
        h = x if given.small_blocks else self.tokens(x) + self.positions.weight
        for block in self.blocks:
            h = checkpoint(block, h, use_reentrant=False) if self.recompute else block(h)
        if given.small_blocks:
            return nn.functional.mse_loss(h.float(), y.float())
        return nn.functional.cross_entropy(self.head(self.norm(h)).flatten(0, 1).float(), y.flatten())


def memory_at_peak():
    """What fills this GPU when most of it is taken, by the line of this file or of PyTorch's parts that took it."""
    trace = torch.cuda.memory._snapshot()["device_traces"][local_rank]
    torch.cuda.memory._record_memory_history(None)
    live, total, most, at_peak = {}, 0, 0, {}
    for entry in trace:
        if entry["action"] == "alloc":
            live[entry["addr"]] = entry
            total += entry["size"]
        elif entry["action"] == "free_completed" and live.pop(entry["addr"], None):
            total -= entry["size"]
        if total > most:
            most, at_peak = total, dict(live)
    kinds = {}
    for entry in at_peak.values():
        frames = [f"{os.path.basename(f['filename'])}:{f['name']}" for f in entry.get("frames", [])]
        known = [name for name in frames if name.startswith(("peer.py", "_fsdp", "adamw", "adam", "_functions"))]
        key = (known or frames or ["autograd"])[0], entry["size"]
        kinds[key] = kinds.get(key, 0) + 1
    for (where, size), count in sorted(kinds.items(), key=lambda kind: -kind[0][1] * kind[1]):
        if size * count >= 1 << 24:
            yield {"peak_of": where, "GB": round(size * count / 1e9, 3), "tensors": count, "MB_each": round(size / 1e6, 2)}


def run(mode):
    torch.cuda.reset_peak_memory_stats()
    if given.peak:
        torch.cuda.memory._record_memory_history(max_entries=1 << 20, context="alloc", stacks="python")
    torch.manual_seed(0)
    is_fsdp, dtype = mode.startswith("fsdp"), torch.bfloat16 if "bf16" in mode else torch.float32
    with torch.device("cuda"):
        model = Model("recompute" in mode).to(dtype)
    if is_fsdp:
        for part in (*model.blocks, model):
            fully_shard(part, mp_policy=POLICY, reshard_after_forward="keep" not in mode)
    elif world > 1:
        model = nn.parallel.DistributedDataParallel(model, device_ids=[local_rank], gradient_as_bucket_view=True)
    zero1 = dict(optimizer_class=optim.AdamW, parameters_as_bucket_view=True) if mode.startswith("zero1") else {}
    optimizer = (ZeroRedundancyOptimizer if zero1 else optim.AdamW)(model.parameters(), lr=1e-4, fused=True, **zero1)
    torch.manual_seed(rank)
    ids = torch.randint(VOCABULARY, (given.batch, given.sequence + 1), device="cuda")
    x, y = torch.randn(2, 32, SMALL, device="cuda", dtype=dtype) if given.small_blocks else (ids[:, :-1], ids[:, 1:])
    times = []
    for _ in range(11):
        dist.barrier()
        torch.cuda.synchronize()
        start = time.perf_counter()
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16, enabled=dtype == torch.float32 and not is_fsdp):
            loss = model(x, y)
        loss.backward()
        optimizer.step()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e3)
    slowest = torch.tensor(times[3:], device="cuda").quantile(0.5)  # the median
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    ms, tokens = slowest.item(), 32 if given.small_blocks else x.numel()
    peak, reserved = torch.cuda.max_memory_allocated() / 1e9, torch.cuda.max_memory_reserved() / 1e9
    return {"params_M": round(sum(p.numel() for p in model.parameters()) / 1e6), "world": world, "ms": round(ms, 2),
            "peak_GB": round(peak, 2), "reserved_GB": round(reserved, 2),
            "loss": round(loss.item(), 4), "tokens_s_gpu": round(tokens / ms * 1e3)}


torch.cuda.set_device(local_rank)
if given.memory:
    torch.cuda.set_per_process_memory_fraction(given.memory * 1e9 / torch.cuda.get_device_properties(local_rank).total_memory)
dist.init_process_group("nccl", device_id=torch.device("cuda", local_rank))
for mode in given.modes.split(","):
    try:
        line = run(mode)
    except torch.OutOfMemoryError as error:
        line = {"error": str(error)}
    if rank == 0:
        print(json.dumps({"mode": f"torch {mode}" + " small-blocks" * given.small_blocks, **line}), flush=True)
    for kind in memory_at_peak() if given.peak else ():
        if rank == 0:
            print(json.dumps({"mode": f"torch {mode}", **kind}), flush=True)
    gc.collect()
    torch.cuda.empty_cache()
dist.destroy_process_group()
