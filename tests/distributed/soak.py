#!/usr/bin/env python3
"""Trains for long with everything in use, and judges whether each rank's memory, descriptors, threads and files stay
flat after the first quarter.

soak.py WORKER [--steps N] [--ranks N] [--nccl]     N steps of each way to train; without --steps 100,000 in all,
                                                    and 10,000 in all on GPUs
"""
import argparse
import importlib
import re
import sys
import time

from ranks import Failure, Ranks, expect

MIB = 1 << 20
# How much more than at the end of the first quarter a rank may hold at any later look.
LIMITS = {"resident": MIB, "heap": MIB // 8, "device": MIB, "descriptors": 0, "threads": 0, "files": 0}
# NCCL takes 2 MB more now and then, once.
NCCL_RESIDENT_LIMIT = 4 * MIB
PLANS = 3


def judge(holdings, limits):
    """Says what a rank held over one phase, and returns what grew. `holdings` are dictionaries, in order."""
    settled = holdings[len(holdings) // 4:]
    grown = []
    words = []
    for name, limit in limits.items():
        values = [held[name] for held in settled]
        growth = max(values) - values[0]
        words.append(f"{name} {values[0]:,} + {growth:,}")
        if growth > limit:
            grown.append(f"{name} grew from {values[0]:,} by {growth:,}: {values}")
    return ", ".join(words), grown


def soak(worker, steps, ranks=2, looks=20, patience=100_000, **arguments):
    """`steps` steps of each plan. Fails where anything grew."""
    # c10d's flight recorder remembers the last 2,000 operations, about 1 KB each, and for ever each process group
    # that there was. That is not pacer's.
    # NCCL makes each communicator on a thread of its own, and glibc gives new threads arenas, up to eight a core,
    # which keep about 2 MB each: with one arena resident memory is what the communicators hold.
    environment = {"TORCH_FR_BUFFER_SIZE": "0", "MALLOC_ARENA_MAX": "1"}
    phases = {}
    with Ranks(worker, "soak", ranks, environment, folder="{folder}", steps=steps, looks=looks, timeout=120_000,
               **arguments) as processes:
        processes.end(patience=patience)
        for rank in processes:
            for found in rank.said(r"^holds (\S+) \d+ (.*)$"):
                held = {name: int(value) for name, value in re.findall(r"(\w+)=(\d+)", found[2])}
                phases.setdefault((found[1], rank.number), []).append(held)
    expect(phases, "no rank said what it holds")
    failures = []
    limits = dict(LIMITS, resident=NCCL_RESIDENT_LIMIT) if arguments.get("nccl") else LIMITS
    for (phase, number), holdings in phases.items():
        words, grown = judge(holdings, limits)
        print(f"  {phase}, rank {number}, {len(holdings)} looks: {words}")
        failures += [f"{phase}, rank {number}: {text}" for text in grown]
    expect(not failures, "; ".join(failures))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("worker")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--nccl", action="store_true")
    parser.add_argument("--plan", help="one plan alone: compressed, refreshed or sharded")
    chosen = parser.parse_args()
    if chosen.nccl and importlib.import_module("cases_nccl").gpus() < chosen.ranks:
        print(f"PACER_SKIPPED: needs {chosen.ranks} GPUs")
        return 0
    steps = chosen.steps or -(-(10_000 if chosen.nccl else 100_000) // PLANS)
    arguments = {name: value for name, value in (("nccl", chosen.nccl), ("plan", chosen.plan)) if value}
    start = time.monotonic()
    try:
        soak(chosen.worker, steps, chosen.ranks, **arguments)
    except Failure as failure:
        print(f"FAILED: {failure}")
        return 1
    print(f"flat over {steps:,} steps of each plan, in {time.monotonic() - start:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
