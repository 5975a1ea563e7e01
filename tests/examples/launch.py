#!/usr/bin/env python3
"""Starts the example 05_data_parallel as a user would, and compares what it says with a single process.

launch.py HOW PROGRAM [FOLDER]    HOW: processes, torchrun or mpirun; FOLDER has torchrun, beside PATH

Two ranks must end well, with the loss of one process up to the order of sums, one line about it, and bytes on the
wire. Exits with 77, as skipped, where the launcher is missing.
"""
import os
import re
import shutil
import subprocess
import sys
import tempfile

LINE = re.compile(r"^loss (\S+) nats per byte after (\d+) steps on (\d+) processes, each sent (\S+) MB$", re.M)
TOLERANCE = 2e-3  # printed with three decimals; 200 steps from other roundings


def skip(reason):
    print(f"PACER_SKIPPED: {reason}")
    sys.exit(77)


def torchrun(folder):
    path = shutil.which("torchrun", path=os.pathsep.join(filter(None, [folder, os.environ.get("PATH")])))
    if path is None:
        skip("torchrun is not installed")
    # It needs a torch that can be imported; an installation for C++ alone may lack its dependencies.
    asked = subprocess.run([path, "--help"], capture_output=True, text=True, check=False)
    if asked.returncode != 0:
        skip(f"torchrun does not start: {asked.stderr.strip().splitlines()[-1:]}")
    return [path, "--no-python", "--nproc-per-node=2", "--master-port=0", "--rdzv-backend=c10d",
            "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1"]


def mpirun():
    path = shutil.which("mpirun")
    if path is None:
        skip("mpirun is not installed (openmpi-bin)")
    return [path, "--allow-run-as-root", "--oversubscribe", "-n", "2"]


def run(command):
    with tempfile.TemporaryDirectory() as folder:  # for its metrics
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240, check=False)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    lines = LINE.findall(done.stdout)
    if len(lines) != 1:
        sys.exit(f"{' '.join(command)} said this:\n{done.stdout}{done.stderr}")
    return lines[0]


def main(how, program, folder=""):
    commands = {
        "processes": lambda: [program, "--processes", "2"],
        "torchrun": lambda: [*torchrun(folder), program],
        "mpirun": lambda: [*mpirun(), program],
    }
    command = commands[how]()
    one, two = run([program]), run(command)
    if one[1:] != (two[1], "1", "0.0") or two[2] != "2" or float(two[3]) <= 1:
        sys.exit(f"one process said {one}, two said {two}")
    if not abs(float(one[0]) - float(two[0])) <= TOLERANCE:
        sys.exit(f"the loss was {one[0]} with one process and {two[0]} with two")
    print(f"loss {one[0]} with one process, {two[0]} with two, each of which sent {two[3]} MB")


main(*sys.argv[1:])
