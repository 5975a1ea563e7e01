#!/usr/bin/env python3
"""Kills a training program at random moments and starts it again, until it is done.

kill_and_resume.py PROGRAM [KILLS]

PROGRAM FOLDER prints "step N, weights HASH" after each step, and saves a checkpoint every third step, written beside
training. The kills fall into steps, into that writing, and between the two. Every hash must be the one of a run that
was never interrupted, no kill may cost more than the checkpoint in the making, and none may be left half-written at
the end. Without KILLS there are 20, or 200 with PACER_TEST_LONG=1, in runs of at most 20.
"""
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

EVERY = 3  # steps between checkpoints
KILLS_OF_A_RUN = 20  # more do not fit into its steps

STEP = re.compile(r"^(?:step|done after step) (\d+), weights ([0-9a-f]+)$")


def run(program, folder, kill_after=None, delay=0):
    """The hash of each step; the program is killed `delay` seconds after it has said its step number `kill_after`."""
    hashes, seen = {}, 0
    with subprocess.Popen([program, folder], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        for line in process.stdout:
            found = STEP.match(line.rstrip("\n"))
            if not found:
                continue
            hashes[int(found[1])] = found[2]
            seen += 1
            if kill_after is not None and seen >= kill_after:
                time.sleep(delay)
                process.send_signal(signal.SIGKILL)
                break
        for line in process.stdout:  # what it said while the signal came
            if found := STEP.match(line.rstrip("\n")):
                hashes[int(found[1])] = found[2]
    killed = process.returncode == -signal.SIGKILL
    if process.returncode != 0 and not killed:
        sys.exit(f"{program} ended with {process.returncode}")
    return hashes, killed


def suffer(program, folder, expected, kills):
    """Steps that were done twice in a run with so many kills."""
    done, last, repeated = 0, 0, 0
    while True:
        # Far enough to leave the last checkpoint behind, near enough for all kills to fit in; then within the next
        # steps, which take milliseconds, as the writing of a checkpoint does.
        kill_after = random.randint(4, 8) if done < kills else None
        hashes, killed = run(program, folder, kill_after, random.choice((0, random.uniform(0, 0.03))))
        for step, value in hashes.items():
            if expected[step] != value:
                sys.exit(f"after {done} kills, step {step} has the weights {value} instead of {expected[step]}")
        # A save begins only when the one before it is complete.
        complete = max(0, (last // EVERY - 1) * EVERY)
        if last < len(expected) and min(hashes) > 0 and min(hashes) <= complete:
            sys.exit(f"after {done} kills, a run that was killed after step {last} went on from before step {complete}")
        repeated += sum(step <= last for step in hashes)
        last = max(hashes)
        if not killed:
            break
        done += 1
    if done != kills:
        sys.exit(f"only {done} of {kills} kills hit the run before its end")
    stray = [path.name for path in Path(folder).rglob(".*") if path.name.startswith(".")]
    if stray:
        sys.exit(f"left behind: {stray}")
    return repeated


def main():
    program = sys.argv[1]
    long = os.environ.get("PACER_TEST_LONG") == "1"
    kills = int(sys.argv[2]) if len(sys.argv) > 2 else 200 if long else 20
    random.seed(7)
    with tempfile.TemporaryDirectory() as root:
        expected, _ = run(program, os.path.join(root, "whole"))
        repeated = 0
        for first in range(0, kills, KILLS_OF_A_RUN):
            folder = os.path.join(root, f"killed-{first}")
            repeated += suffer(program, folder, expected, min(KILLS_OF_A_RUN, kills - first))
        if repeated == 0:
            sys.exit("no step was ever done twice, so nothing was lost by any kill: the test shows nothing")
        print(f"killed {kills} times, {repeated} steps done twice, every one of {len(expected)} steps has equal weights")


main()
