#!/usr/bin/env python3
"""Runs what needs several GPUs, each bench with its peer: part after part, for the pages of docs/measurements.

  tests/several_gpus.py build/release run/gpus                      everything, on all GPUs of this machine
  tests/several_gpus.py build/release run/gpus overlap pipeline     these parts
  tests/several_gpus.py build/release run/gpus --quick              each in its shortest form, to see that it starts

What a part prints is in FOLDER/PART.log. The last lines say how long each took and whether it failed.
"""
import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

TESTS = Path(__file__).resolve().parent
sys.path.insert(0, str(TESTS / "distributed"))
from ranks import gpus

ROOT = TESTS.parent
RANKS = ROOT / "benchmarks/run.py"
NETWORK = ROOT / "examples/07_slow_network/slow_network.py"
# Each fits beside its peer on an 80 GB GPU.
GPT = "--layers 24 --width 2048 --batch 8 --sequence 1024"
GPT2 = "--layers 12 --width 768 --batch 4 --sequence 1024"


class Plan:
    """The commands of each part, as lists of words."""

    def __init__(self, build, ranks, quick, text):
        self.build, self.ranks, self.quick, self.text = build, ranks, quick, text

    def program(self, name):
        return str(self.build / name)

    def bench(self, subcommand):
        return [self.program("benchmarks/pacer-bench"), subcommand]

    def as_ranks(self, program, arguments):
        return [sys.executable, str(RANKS), *program, "--ranks", str(self.ranks), "--arguments=" + arguments]

    def overlap(self):
        steps = ["--steps", "2", "--rounds", "1"] if self.quick else ["--steps", "10", "--rounds", "3"]
        bench = self.bench("overlap")
        yield [sys.executable, str(RANKS), *bench, "--ranks", str(self.ranks), *steps]
        for model in ("gpt2", "bert-large"):
            yield self.as_ranks(bench, f"{model} {'2 1' if self.quick else '6 3'} --onebit")

    def onebit(self):
        for model in ("gpt2", "bert-large"):
            yield self.as_ranks(self.bench("onebit"), f"{model} {'2 1' if self.quick else '20 5'}")

    def sharding(self):
        few, quick = "--modes plain,parameters", "--layers 4 --width 512 --batch 2 --sequence 256"
        modes = few if self.quick else "--modes plain,shards-state,shards,parameters,parameters+recompute"
        yield self.as_ranks(self.bench("sharding"), f"{modes} {quick if self.quick else GPT}")
        peers = "plain,fsdp" if self.quick else "plain,plain-bf16,zero1,fsdp-keep,fsdp,fsdp+recompute"
        yield self.as_ranks([sys.executable, str(ROOT / "benchmarks/sharding/peer.py")],
                            f"--modes {peers} {quick if self.quick else GPT}")

    def pipeline(self):
        """One pipeline over all ranks, a grid of two stages, and whole models beside each other."""
        bench = self.bench("pipeline")
        size = "--layers 8 --width 256 --length 128 --rows 1 --steps 2 --rounds 1" if self.quick else "--rounds 2"
        yield self.as_ranks(bench, size)
        if self.ranks % 2 == 0 and self.ranks > 2:
            yield self.as_ranks(bench, f"{size} --stages 2")
        yield self.as_ranks(bench, f"{size} --stages 1 --schedule gpipe")

    def network(self):
        """Two hosts behind links of 1 and 10 Gbit/s, each with half of the ranks; then two of one rank each."""
        modes = "--modes plain,onebit-nodes,onebit-nodes+shards,onebit-nodes+parameters"
        size = "--layers 2 --width 256 --batch 2 --sequence 128" if self.quick else GPT2
        yield [sys.executable, str(NETWORK), "--device", "cuda", "--congestion", "cubic", "--gbit", "10,1",
               "--ranks", str(self.ranks), "--ranks-per-host", str(self.ranks // 2),
               "--command", f"{' '.join(self.bench('sharding'))} {modes} {size}"]
        yield [sys.executable, str(NETWORK), "--device", "cuda", "--congestion", "cubic", "--gbit", "1", "--ranks", "2",
               "--command", f"{' '.join(self.bench('overlap'))} gpt2 {'1 1' if self.quick else '2 2'} --onebit"]

    def tests(self):
        yield [self.program("tests/pacer-nccl-tests")]
        yield [sys.executable, str(TESTS / "distributed/run_ranks.py"), self.program("tests/distributed/pacer-distributed-worker"),
               "nccl.training"]

    def study(self):
        size = ("--tokens 0.2M --layers 2 --width 128 --heads 2 --seeds 1" if self.quick else
                "--tokens 24M --layers 12 --width 512 --heads 8 --seeds 1,2")
        for rate in ("1.2e-3", "1.6e-3", "2.4e-3"):
            yield [self.program("examples/convergence"), "--device", "cuda", "--processes", str(self.ranks),
                   "--precision", "tensorfloat32", "--sequence", "256", "--batch", "64", "--learning-rate", rate,
                   "--arms", "fused-adamw,onebit-adam-refreshed", "--output", f"study-{rate}", *size.split(),
                   *(["--data", str(self.text)] if self.text else [])]


PARTS = ("overlap", "onebit", "sharding", "pipeline", "network", "tests", "study")


def run(part, plan, folder):
    """What a part prints goes to its log. Returns seconds, and the exit code of the first command that failed."""
    environment = dict(os.environ, PYTHONUNBUFFERED="1")
    if part == "tests" and not plan.quick:
        environment["PACER_TEST_LONG"] = "1"
    begin, failed = time.monotonic(), 0
    with open(folder / f"{part}.log", "w", encoding="utf-8") as log:
        for command in getattr(plan, part)():
            log.write(f"$ {' '.join(command)}\n")
            log.flush()
            code = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, env=environment, cwd=folder,
                                  check=False).returncode
            failed = failed or code
    return time.monotonic() - begin, failed


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build", type=Path, help="the build folder, such as build/release")
    parser.add_argument("folder", type=Path, help="where the logs go")
    parser.add_argument("parts", nargs="*", metavar="part", help=", ".join(PARTS) + " (all)")
    parser.add_argument("--ranks", type=int, default=0, help="GPUs to use, two at least (all)")
    parser.add_argument("--text", type=Path, help="file or folder that the study trains on (LibTorch's headers)")
    parser.add_argument("--quick", action="store_true", help="the shortest form of each")
    arguments = parser.parse_intermixed_args()
    for part in arguments.parts:
        if part not in PARTS:
            parser.error(f"there is no part '{part}'; there are {', '.join(PARTS)}")
    ranks = arguments.ranks or gpus()
    if ranks < 2:
        parser.error(f"it needs two GPUs at least, and there is {ranks}")
    arguments.folder.mkdir(parents=True, exist_ok=True)
    plan = Plan(arguments.build.resolve(), ranks, arguments.quick, arguments.text and arguments.text.resolve())
    worst = 0
    for part in arguments.parts or PARTS:
        seconds, failed = run(part, plan, arguments.folder.resolve())
        print(f"{part}: {seconds:.0f} s, {f'failed with {failed}' if failed else 'done'}", flush=True)
        worst = worst or failed
    return 1 if worst else 0


sys.exit(main())
