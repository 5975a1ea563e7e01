#!/usr/bin/env python3
"""Kills a training program some times and starts it again, and has TensorBoard's own reader read its curves.

tensorboard_resumed.py PROGRAM [KILLS]   exits with 77, as skipped, where TensorBoard is not installed

PROGRAM FOLDER prints "step N, weights HASH" after each step, saves a checkpoint every third step and writes curves
to FOLDER/curves. Each curve must have one point for every step, in order, with the value of a run that was never
interrupted.
"""
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from read_tensorboard import curves

STEPS_OF_A_PART = 10  # before it is killed: the steps behind its last checkpoint are done twice
SAME = ("loss", "tokens", "learning_rate", "gradient_norm")  # what does not depend on the clock


def part(program, folder, is_last):
    """Runs the program, and kills it after some steps unless `is_last`; its number of steps."""
    steps = 0
    with subprocess.Popen([program, str(folder)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as run:
        for line in run.stdout:
            steps += line.startswith("step ")
            if not is_last and steps == STEPS_OF_A_PART:
                run.send_signal(signal.SIGKILL)
                break
        run.stdout.read()
    if run.returncode != (0 if is_last else -signal.SIGKILL):
        sys.exit(f"{program} ended with {run.returncode}")
    return steps


def main(program, kills):
    with tempfile.TemporaryDirectory() as name:
        whole, killed = Path(name) / "whole", Path(name) / "killed"
        steps = part(program, whole, is_last=True)
        done = sum(part(program, killed, is_last=number == kills) for number in range(kills + 1))
        if done <= steps:
            sys.exit("no step was done twice: the test shows nothing")
        wanted, found = curves(str(whole / "curves")), curves(str(killed / "curves"))
    for tag in SAME:
        if [step for step, _ in wanted.get(tag, [])] != list(range(1, steps + 1)):
            sys.exit(f"{tag} of a run of {steps} steps has the points {wanted.get(tag)}")
    for tag, points in wanted.items():
        got = found.get(tag, [])
        if [step for step, _ in got] != [step for step, _ in points]:
            sys.exit(f"{tag} has {len(got)} points of {len(points)} after {kills} kills: {[step for step, _ in got]}")
        if tag in SAME and got != points:
            sys.exit(f"{tag} has other values after {kills} kills than without")
    print(f"{kills} kills, {done - steps} steps more than the {steps}: each of {len(wanted)} curves has every step once")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 3)
