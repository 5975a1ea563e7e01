#!/usr/bin/env python3
"""Finds the deepest GPT that trains on one GPU of so many GB, by bisection, for modes of pacer-bench sharding or of its peer:

  largest.py build/release/benchmarks/pacer-bench sharding --modes plain,recompute,loss+recompute+8bit --memory 80
  largest.py python3 benchmarks/sharding/peer.py --modes plain,recompute,plain-bf16 --memory 80

Prints a JSON line for each mode: that of the deepest one that ran, with its layers.
"""
import argparse
import json
import subprocess


def run(program, mode, layers, given):
    """The mode's line with so many layers, or None where memory is too short for them."""
    command = [*program, "--modes", mode, "--layers", str(layers), "--memory", str(given.memory), "--width", str(given.width)]
    output = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    lines = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    if not lines:
        raise SystemExit(f"{' '.join(command)} printed no line")
    return None if "error" in lines[-1] else lines[-1]


def deepest(program, mode, given):
    fits, short, best = 0, given.most + 1, None
    while short - fits > given.within:
        layers = (fits + short) // 2
        line = run(program, mode, layers, given)
        if line is None:
            short = layers
        else:
            fits, best = layers, line
    return {**(best or {"mode": mode}), "layers": fits}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", nargs="+")
    parser.add_argument("--modes", required=True)
    parser.add_argument("--memory", type=float, default=80, help="GB")
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--most", type=int, default=255, help="layers to begin with")
    parser.add_argument("--within", type=int, default=1, help="layers of the largest one")
    given = parser.parse_args()
    for mode in given.modes.split(","):
        print(json.dumps(deepest(given.program, mode, given)), flush=True)


if __name__ == "__main__":
    main()
