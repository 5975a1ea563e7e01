#!/usr/bin/env python3
"""Measures the step time of optimizers over slow links, on one Linux machine, as root.

  sudo examples/07_slow_network/slow_network.py --model small               a first look: a minute
  sudo examples/07_slow_network/slow_network.py --model gpt2 --ranks 2,4    GPT-2's 124 M parameters
  sudo examples/07_slow_network/slow_network.py --device cuda --ranks 4     one GPU a rank

Each rank gets a network namespace, a host of its own as far as programs can see, and a link to a switch; the program
07_slow_network runs on all of them, first with links as fast as they go, then with links of each bandwidth. Writes
measurements.csv and a chart for each number of ranks, and prints tables. Needs ip and tc (Debian: iproute2).

Whatever happens, also after Ctrl-C, the network is taken down again; only kill -9 leaves it, then
'ip netns list' shows namespaces named pacer-*, and 'ip netns del NAME' deletes one.

Exit code 1: a rank failed; 2: an option cannot work; 77: this machine cannot do it.
"""
import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from network import Network, Unavailable, require_tools

ROOT = Path(__file__).resolve().parents[2]
PORT = 29500  # nobody else is in these namespaces
FAREWELL = 10  # seconds that ranks get to end by themselves after one of them failed


class Failed(Exception):
    pass


def numbers(text, kind, least, most):
    values = []
    for word in text.split(","):
        try:
            values.append(kind(word))
        except ValueError:
            raise argparse.ArgumentTypeError(f"'{word}' is no number") from None
        if not least <= values[-1] <= most:
            raise argparse.ArgumentTypeError(f"{word} is not from {least} to {most}")
    return values


def read_arguments():
    parser = argparse.ArgumentParser(description=__doc__, usage="slow_network.py [options]",
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gbit", type=lambda text: numbers(text, float, 0.001, 1000), default=[1.0, 10.0],
                        help="bandwidths of a link, each way, in Gbit/s (1,10)")
    parser.add_argument("--ranks", type=lambda text: numbers(text, int, 2, 64), default=[2], help="hosts (2)")
    parser.add_argument("--model", default="small", help="small, gpt2 or bert-large (small)")
    parser.add_argument("--device", default="cpu", help="cpu: over Gloo; cuda: over NCCL, one GPU a rank (cpu)")
    parser.add_argument("--optimizers", default="fp32,bf16,onebit", help="which ones (fp32,bf16,onebit)")
    parser.add_argument("--seconds", default="10", help="to measure each for; at least three steps (10)")
    parser.add_argument("--output", type=Path, default=Path("run/07_slow_network"),
                        help="folder for measurements.csv and charts (run/07_slow_network)")
    parser.add_argument("--program", type=Path, default=ROOT / "build/release/examples/07_slow_network",
                        help="the program to run (that of ./examples/run.sh)")
    arguments = parser.parse_args()
    if not os.access(arguments.program, os.X_OK):
        parser.error(f"{arguments.program} is no program; build it with ./cmake/build.sh release examples")
    return arguments


def environment(network, rank, device):
    """What torchrun would tell a rank that is alone on its host."""
    cores = len(os.sched_getaffinity(0))
    variables = dict(os.environ, RANK=str(rank), WORLD_SIZE=str(network.ranks), LOCAL_RANK="0", LOCAL_WORLD_SIZE="1",
                     MASTER_ADDR=network.address(0), MASTER_PORT=str(PORT))
    variables.setdefault("OMP_NUM_THREADS", str(max(1, cores // network.ranks)))
    if device == "cuda":
        gpus = [gpu for gpu in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu]
        if gpus and len(gpus) < network.ranks:
            raise Failed(f"{network.ranks} ranks need as many GPUs, but CUDA_VISIBLE_DEVICES names {len(gpus)}")
        # Between hosts there is only the network: no direct access, no shared memory, no InfiniBand.
        variables.update(CUDA_VISIBLE_DEVICES=gpus[rank] if gpus else str(rank), NCCL_P2P_DISABLE="1",
                         NCCL_SHM_DISABLE="1", NCCL_IB_DISABLE="1", NCCL_NVLS_ENABLE="0", NCCL_SOCKET_IFNAME="eth0")
    return variables


def run_ranks(network, command, device):
    """One process a host; rank 0 writes to our output. Raises Failed with what the first failed rank said."""
    processes, errors = [], [tempfile.TemporaryFile("w+") for _ in range(network.ranks)]
    try:
        for rank in range(network.ranks):
            processes.append(subprocess.Popen(
                [*network.inside(rank), *command], env=environment(network, rank, device), stdin=subprocess.DEVNULL,
                stdout=None if rank == 0 else subprocess.DEVNULL, stderr=errors[rank], start_new_session=True))
        deadline = None
        while any(process.poll() is None for process in processes):
            if deadline is None and any(process.poll() for process in processes):
                deadline = time.monotonic() + FAREWELL
            if deadline is not None and time.monotonic() > deadline:
                break
            time.sleep(0.05)
        # The rank that failed by itself, not one that ended because of it (exit code 3).
        failed = [rank for rank, process in enumerate(processes) if process.poll()]
        if failed:
            rank = min(failed, key=lambda rank: processes[rank].returncode == 3)
            errors[rank].seek(0)
            raise Failed(f"rank {rank} ended with {processes[rank].returncode}:\n{errors[rank].read().strip()}")
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait()
        for file in errors:
            file.close()


def measure(arguments, csv):
    for ranks in arguments.ranks:
        with Network(ranks) as network:
            for gbit in [0.0, *arguments.gbit]:
                network.shape(gbit)
                run_ranks(network, [
                    str(arguments.program.resolve()), "--model", arguments.model, "--device", arguments.device,
                    "--optimizers", arguments.optimizers, "--seconds", arguments.seconds, "--gbit", f"{gbit:g}",
                    "--csv", str(csv)], arguments.device)
    subprocess.run([str(arguments.program.resolve()), "--report", str(csv)], check=True)


def main():
    arguments = read_arguments()
    # An exit like any other, which takes the network down.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    try:
        require_tools()
        arguments.output.mkdir(parents=True, exist_ok=True)
        csv = (arguments.output / "measurements.csv").resolve()
        csv.unlink(missing_ok=True)
        measure(arguments, csv)
        print(f"Measurements: {csv}")
    except Unavailable as missing:
        print(f"slow_network: {missing}", file=sys.stderr)
        return 77
    except (Failed, OSError, subprocess.CalledProcessError) as error:
        print(f"slow_network: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("slow_network: interrupted", file=sys.stderr)
        return 130
    return 0


sys.exit(main())
