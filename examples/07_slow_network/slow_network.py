#!/usr/bin/env python3
"""Measures the step time of optimizers over slow links, on one Linux machine, as root.

  sudo examples/07_slow_network/slow_network.py --model small               a first look: a minute
  sudo examples/07_slow_network/slow_network.py --model gpt2 --ranks 2,4    GPT-2's 124 M parameters
  sudo examples/07_slow_network/slow_network.py --device cuda --ranks 4     one GPU a rank
  sudo examples/07_slow_network/slow_network.py --ranks 4 --ranks-per-host 2 --optimizers fp32,onebit,onebit-nodes
  sudo examples/07_slow_network/slow_network.py --gbit 1 --command "build/release/my_trainer --steps 10"

Each host is a network namespace, a machine of its own as far as programs can see, with a link to a switch; the program
07_slow_network runs on all of them, first with links as fast as they go, then with links of each bandwidth. Writes
measurements.csv and a chart for each number of ranks, and prints tables. With --command another program runs instead,
as the same ranks with torchrun's variables, and what rank 0 prints is shown. Needs ip and tc (Debian: iproute2).

Whatever happens, also after Ctrl-C, the network is taken down again; only kill -9 leaves it, then
'ip netns list' shows namespaces named pacer-*, and 'ip netns del NAME' deletes one.

Exit code 1: a rank failed; 2: an option cannot work; 77: this machine cannot do it.
"""
import argparse
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from network import Network, Unavailable, congestion_here, require_tools

ROOT = Path(__file__).resolve().parents[2]
PORT = 29500  # nobody else is in these namespaces
FAREWELL = 10  # seconds that ranks get to end by themselves after one of them failed


class Failed(Exception):
    pass


class Interrupted(Exception):
    """A signal asked for the end."""


class Signals:
    """Notes that a signal asked for the end, for those that look between two steps. A handler that throws could do so while
    Popen.poll holds its lock, which then nobody would release, and Popen.wait would wait for it for ever."""

    def __init__(self):
        self.noted = None
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self.note)

    def note(self, number, _):
        self.noted = self.noted or number

    def check(self):
        if self.noted:
            raise Interrupted


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
    parser.add_argument("--ranks", type=lambda text: numbers(text, int, 2, 64), default=[2], help="how many in all (2)")
    parser.add_argument("--ranks-per-host", type=int, default=1, help="which share a link (1)")
    parser.add_argument("--model", default="small", help="small, gpt2 or bert-large (small)")
    parser.add_argument("--device", default="cpu", help="cpu: over Gloo; cuda: over NCCL, one GPU a rank (cpu)")
    parser.add_argument("--optimizers", default="fp32,bf16,onebit",
                        help="of fp32, bf16, muon, onebit, onebit-nodes, onebit-buckets, onebit-muon, lamb, onebit-lamb, onebit-lamb-nodes, "
                             "onebit-lamb-buckets, shards, shards-nodes, shards-blocks (fp32,bf16,onebit)")
    parser.add_argument("--congestion", metavar="NAME",
                        help="what controls congestion of TCP on the hosts, such as cubic or bbr (as on this machine)")
    parser.add_argument("--seconds", default="10", help="to measure each for; at least three steps (10)")
    parser.add_argument("--output", type=Path, default=Path("run/07_slow_network"),
                        help="folder for measurements.csv and charts (run/07_slow_network)")
    parser.add_argument("--program", type=Path, default=ROOT / "build/release/examples/07_slow_network",
                        help="the program to run (that of ./examples/run.sh)")
    parser.add_argument("--command", type=shlex.split, metavar="COMMAND",
                        help="a program and its options, to run on all ranks in place of 07_slow_network")
    arguments = parser.parse_args()
    for ranks in arguments.ranks:
        if arguments.ranks_per_host < 1 or ranks % arguments.ranks_per_host or ranks == arguments.ranks_per_host:
            parser.error(f"{ranks} ranks cannot be on two or more hosts of {arguments.ranks_per_host} each")
    if arguments.command is not None and not (arguments.command and shutil.which(arguments.command[0])):
        parser.error(f"--command does not begin with a program: '{' '.join(arguments.command)}'")
    if arguments.command is None and not os.access(arguments.program, os.X_OK):
        parser.error(f"{arguments.program} is no program; build it with ./cmake/build.sh release examples")
    return arguments


def environment(network, rank, per_host, device):
    """What torchrun would tell a rank."""
    ranks = network.hosts * per_host
    host, local = divmod(rank, per_host)
    cores = len(os.sched_getaffinity(0))
    variables = dict(os.environ, RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(local),
                     LOCAL_WORLD_SIZE=str(per_host), MASTER_ADDR=network.address(0), MASTER_PORT=str(PORT))
    variables.setdefault("OMP_NUM_THREADS", str(max(1, cores // ranks)))
    if device == "cuda":
        gpus = [gpu for gpu in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu]
        gpus = gpus or [str(gpu) for gpu in range(ranks)]
        if len(gpus) < ranks:
            raise Failed(f"{ranks} ranks need as many GPUs, but CUDA_VISIBLE_DEVICES names {len(gpus)}")
        # Between hosts there is only the network: no direct access, no shared memory, no InfiniBand.
        variables.update(CUDA_VISIBLE_DEVICES=",".join(gpus[host * per_host:(host + 1) * per_host]),
                         NCCL_IB_DISABLE="1", NCCL_NVLS_ENABLE="0", NCCL_SOCKET_IFNAME="eth0",
                         NCCL_HOSTID=network.host(host))
        if per_host == 1:
            variables.update(NCCL_P2P_DISABLE="1", NCCL_SHM_DISABLE="1")
    return variables


def run_ranks(network, command, per_host, device, signals):
    """All ranks; the first one writes to our output. Raises Failed with what the first failed one said."""
    ranks = network.hosts * per_host
    processes, errors = [], [tempfile.TemporaryFile("w+") for _ in range(ranks)]
    try:
        for rank in range(ranks):
            processes.append(subprocess.Popen(
                [*network.inside(rank // per_host), *command],
                env=environment(network, rank, per_host, device), stdin=subprocess.DEVNULL,
                stdout=None if rank == 0 else subprocess.DEVNULL, stderr=errors[rank], start_new_session=True))
        deadline = None
        while any(process.poll() is None for process in processes):
            signals.check()
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


def over_networks(arguments, command_for, signals):
    """command_for(gbit) on all ranks of each network, first with links as fast as they go."""
    for ranks in arguments.ranks:
        with Network(ranks // arguments.ranks_per_host, arguments.congestion) as network:
            for gbit in [0.0, *arguments.gbit]:
                network.shape(gbit)
                signals.check()
                run_ranks(network, command_for(gbit), arguments.ranks_per_host, arguments.device, signals)
                signals.check()


def run_command(arguments, signals):
    def command_for(gbit):
        print(f"links of {gbit:g} Gbit/s:" if gbit else "links as fast as they go:", flush=True)
        return arguments.command

    over_networks(arguments, command_for, signals)
    print(f"{arguments.congestion} controlled TCP's congestion.")


def measure(arguments, signals):
    program = str(arguments.program.resolve())
    arguments.output.mkdir(parents=True, exist_ok=True)
    csv = (arguments.output / "measurements.csv").resolve()
    csv.unlink(missing_ok=True)
    over_networks(arguments, lambda gbit: [
        program, "--model", arguments.model, "--device", arguments.device, "--optimizers", arguments.optimizers,
        "--seconds", arguments.seconds, "--gbit", f"{gbit:g}", "--csv", str(csv)], signals)
    subprocess.run([program, "--report", str(csv)], check=True)
    print(f"{arguments.congestion} controlled TCP's congestion. Measurements: {csv}")


def main():
    arguments = read_arguments()
    signals = Signals()
    try:
        require_tools()
        arguments.congestion = arguments.congestion or congestion_here()
        run_command(arguments, signals) if arguments.command else measure(arguments, signals)
    except (Interrupted, Unavailable, Failed, OSError, subprocess.CalledProcessError) as error:
        if signals.noted:  # whatever else failed, a program that the same Ctrl-C reached has failed of it
            print("slow_network: interrupted", file=sys.stderr)
            return 128 + signals.noted
        print(f"slow_network: {error}", file=sys.stderr)
        return 77 if isinstance(error, Unavailable) else 1
    return 0


sys.exit(main())
