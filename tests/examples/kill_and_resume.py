#!/usr/bin/env python3
"""Kills a training program at random steps and starts it again, until it is done.

kill_and_resume.py PROGRAM [KILLS]

PROGRAM FOLDER prints "step N, weights HASH" after each step. Every hash must be the one of a run that was never
interrupted, and no checkpoint may be left half-written at the end.
"""
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

STEP = re.compile(r"^(?:step|done after step) (\d+), weights ([0-9a-f]+)$")


def run(program, folder, kill_after=None):
    """The hash of each step; the program is killed `kill_after` steps after its start."""
    hashes, seen = {}, 0
    with subprocess.Popen([program, folder], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        for line in process.stdout:
            found = STEP.match(line.rstrip("\n"))
            if not found:
                continue
            hashes[int(found[1])] = found[2]
            seen += 1
            if kill_after is not None and seen >= kill_after:
                process.send_signal(signal.SIGKILL)
                break
        process.stdout.read()
    killed = process.returncode == -signal.SIGKILL
    if process.returncode != 0 and not killed:
        sys.exit(f"{program} ended with {process.returncode}")
    return hashes, killed


def main():
    program = sys.argv[1]
    kills = int(sys.argv[2]) if len(sys.argv) > 2 else 20
    random.seed(7)
    with tempfile.TemporaryDirectory() as root:
        expected, _ = run(program, os.path.join(root, "whole"))
        folder = os.path.join(root, "killed")
        done, last, repeated = 0, 0, 0
        while True:
            left = kills - done
            # Far enough to leave the last checkpoint behind, near enough for all kills to fit in.
            kill_after = random.randint(4, 8) if left > 0 else None
            hashes, killed = run(program, folder, kill_after)
            for step, value in hashes.items():
                if expected[step] != value:
                    sys.exit(f"after {done} kills, step {step} has the weights {value} instead of {expected[step]}")
            repeated += sum(step <= last for step in hashes)
            last = max(hashes)
            if not killed:
                break
            done += 1
        stray = [path.name for path in Path(folder).iterdir() if path.name.startswith(".")]
        if done != kills:
            sys.exit(f"only {done} of {kills} kills hit the run before its end")
        if repeated == 0:
            sys.exit("no step was ever done twice, so nothing was lost by any kill: the test shows nothing")
        if stray:
            sys.exit(f"left behind: {stray}")
        print(f"killed {done} times, {repeated} steps done twice, every one of {len(expected)} steps has equal weights")


main()
