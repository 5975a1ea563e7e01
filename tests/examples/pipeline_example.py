#!/usr/bin/env python3
"""The example 12_pipeline with every schedule, several pipelines and a checkpoint, each beside one rank with the whole model.

pipeline_example.py PROGRAM

The program itself fails where its loss is not that of one rank, which it trains beside the first of the ways. Here: every
rank says what it has, all blocks and parameters are there once, all ways end with the loss of that one rank, and a run that
goes on from a checkpoint with other stages, and another schedule, does, too. Three of the ways; with PACER_TEST_LONG=1 all,
each beside one rank.
"""
import os
import re
import subprocess
import sys
import tempfile

BLOCKS = 8
STEPS = 24
TOLERANCE = 2e-4  # between orders of sums; some 1e-6 was seen
WAYS = {"1f1b": [], "three chunks": ["--schedule", "interleaved", "--chunks", "3", "--micro-batches", "4"],
        "two pipelines": ["--pipelines", "2", "--micro-batches", "4"]}
LONG = bool(os.environ.get("PACER_TEST_LONG"))
if LONG:
    WAYS |= {"gpipe": ["--schedule", "gpipe"], "interleaved": ["--schedule", "interleaved"],
             "zero-bubble": ["--schedule", "zero-bubble"], "one stage": ["--stages", "1"]}

RANK = re.compile(r"^rank (\d+): stage (\d+), blocks((?: \d+)+), (\d+) parameters$", re.M)
HELD_OUT = re.compile(r"^after (\d+) steps: (\S+) nats per byte of held-out text$", re.M)
SAME = re.compile(r"^the loss is that of one rank with the whole model: (\S+) and (\S+)$", re.M)


def run(program, *arguments):
    done = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=240, check=False)
    if done.returncode != 0:
        sys.exit(f"{' '.join(done.args)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def parameters_of(output, pipelines):
    ranks = RANK.findall(output)
    blocks = sorted(int(block) for _, _, names, _ in ranks for block in names.split())
    if blocks != sorted(list(range(BLOCKS)) * pipelines):
        sys.exit(f"the ranks have the blocks {blocks}:\n{output}")
    return sum(int(count) for *_, count in ranks) // pipelines


def main(program):
    parameters, losses = set(), []
    for name, arguments in WAYS.items():
        compares = LONG or not losses
        output = run(program, "--steps", str(STEPS), *(["--compare"] if compares else []), *arguments)
        parameters.add(parameters_of(output, 2 if "--pipelines" in arguments else 1))
        (before, first), *_, (after, last) = HELD_OUT.findall(output)
        if compares:
            (piped, whole), = SAME.findall(output)
        else:
            piped = last
        if (int(before), int(after)) != (0, STEPS) or not float(last) < float(first) - 1:
            sys.exit(f"{name} has learned nothing:\n{output}")
        losses.append(float(piped))
        if abs(losses[-1] - float(whole)) > TOLERANCE:
            sys.exit(f"{name} ends with {piped}, one rank with {whole}")
    if len(parameters) != 1 or max(losses) - min(losses) > TOLERANCE:
        sys.exit(f"other models or losses: {parameters}, {dict(zip(WAYS, losses))}")
    with tempfile.TemporaryDirectory() as folder:
        run(program, "--steps", str(STEPS // 2), "--checkpoints", folder)
        output = run(program, "--steps", str(STEPS), "--checkpoints", folder, "--stages", "4", "--schedule", "zero-bubble")
        (before, _), *_, (after, last) = HELD_OUT.findall(output)
        if (int(before), int(after)) != (STEPS // 2, STEPS) or abs(float(last) - losses[0]) > TOLERANCE:
            sys.exit(f"resumed with four stages it has not {losses[0]}:\n{output}")
    print(f"{len(WAYS)} ways to train, and a run that went on with other stages, end with {losses[0]:.4f}, "
          f"within {max(losses) - min(losses):.1e}")


main(*sys.argv[1:])
