#!/usr/bin/env python3
# Starts pacer-bench overlap and its peer, DistributedDataParallel, one after the other on all GPUs (or on CPUs):
#   run.py build/release/benchmarks/pacer-bench overlap --ranks 4 --models gpt2 bert-large
# or another subcommand, or any program, as ranks:
#   run.py build/release/benchmarks/pacer-bench pipeline --ranks 2 "--arguments=--schedule 1f1b --rows 2"
import argparse
import os
import socket
import subprocess
import sys


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def start(command, rank, ranks, port):
    environment = dict(os.environ, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks),
                       LOCAL_WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    return subprocess.Popen(command, env=environment)


def run(command, ranks):
    port = free_port()
    processes = [start(command, rank, ranks, port) for rank in range(ranks)]
    return max(abs(process.wait()) for process in processes)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("program", nargs="+", help="the program, and its subcommand")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--models", nargs="+", default=["gpt2", "bert-large"])
    parser.add_argument("--steps", default="10")
    parser.add_argument("--rounds", default="7")
    parser.add_argument("--python", default=sys.executable, help="a python3 that can import torch")
    parser.add_argument("--no-peer", action="store_true", help="the program alone, once")
    parser.add_argument("--arguments", help="what the program is given, once, without a peer")
    arguments = parser.parse_args()
    if arguments.arguments is not None:
        sys.exit(run(arguments.program + arguments.arguments.split(), arguments.ranks))
    peer = os.path.join(os.path.dirname(os.path.abspath(__file__)), "overlap/ddp_peer.py")
    worst = 0
    for model in arguments.models:
        rest = [model, arguments.steps, arguments.rounds]
        worst = max(worst, run(arguments.program + rest, arguments.ranks))
        if arguments.no_peer:
            continue
        worst = max(worst, run([arguments.python, peer] + rest, arguments.ranks))
        worst = max(worst, run(arguments.program + rest, arguments.ranks))  # again, to see drift
    sys.exit(worst)


main()
