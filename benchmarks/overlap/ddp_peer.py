# The peer of pacer-bench overlap: PyTorch's DistributedDataParallel with fused AdamW on the same model, batch and
# precision. Start with torchrun; prints milliseconds per step of the slowest rank, the median of the rounds.
import os
import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

SHAPES = {"gpt2": (12, 768, 12, 50257, 1024, 16), "bert-large": (24, 1024, 16, 30522, 512, 16),
          "tiny": (2, 64, 2, 1000, 64, 2)}


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        parts = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1))
        y = x + self.out(F.scaled_dot_product_attention(*parts, is_causal=True).transpose(1, 2).flatten(2))
        return y + self.down(F.gelu(self.up(self.norm2(y)), approximate="tanh"))


class Model(nn.Module):
    def __init__(self, layers, width, heads, vocabulary, length):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, ids, targets):
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.tokens.weight)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def main():
    name = sys.argv[1]
    steps = int(sys.argv[2]) if len(sys.argv) > 2 else 10
    rounds = int(sys.argv[3]) if len(sys.argv) > 3 else 7
    layers, width, heads, vocabulary, length, batch = SHAPES[name]
    rank = int(os.environ["LOCAL_RANK"])
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    torch.manual_seed(1)
    ids = torch.randint(vocabulary, (batch, length), device=device)
    targets = torch.randint(vocabulary, (batch, length), device=device)
    for as_view in (True, False):
        model = Model(layers, width, heads, vocabulary, length).to(device)
        ddp = nn.parallel.DistributedDataParallel(model, device_ids=[rank] if on_gpu else None,
                                                  gradient_as_bucket_view=as_view)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

        def step():
            with torch.autocast(device.type, torch.bfloat16):
                loss = ddp(ids, targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        times = []
        for _ in range(4):
            step()
        for _ in range(rounds):
            if on_gpu:
                torch.cuda.synchronize()
            dist.barrier()
            start = time.perf_counter()
            for _ in range(steps):
                step()
            if on_gpu:
                torch.cuda.synchronize()
            taken = torch.tensor([(time.perf_counter() - start) / steps * 1e3], device=device)
            dist.all_reduce(taken, dist.ReduceOp.MAX)
            times.append(taken.item())
        if rank == 0:
            views = "gradients as bucket views" if as_view else "defaults"
            print(f"| torch {torch.__version__} DistributedDataParallel, fused AdamW, {views} | "
                  f"{sorted(times)[len(times) // 2]:.3f} |", flush=True)
        del ddp, model, optimizer
    dist.destroy_process_group()


main()
