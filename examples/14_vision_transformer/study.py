#!/usr/bin/env python3
"""Drop path against none: trains 14_vision_transformer with several rates and seeds, and prints a line for each rate.

study.py PROGRAM [--rates 0,0.1,0.2,0.3] [--seeds 1,2,3] [--jobs 3] [-- OPTION ...]    the options go to the program

Each line has the mean over the seeds and its standard error: accuracy in percent and loss on test images, with the
weights and with their average, and images/s of one run beside the others.
"""
import re
import statistics
import subprocess
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from concurrent.futures import ThreadPoolExecutor

LAST = re.compile(r"weights ([\d.]+) % right, loss ([\d.]+); average ([\d.]+) % right, loss ([\d.]+); (\d+) images/s")
DIGITS = (2, 4, 2, 4, 0)  # behind the point


def train(program, options, rate, seed):
    """The five numbers of the run's last line."""
    done = subprocess.run([program, "--drop-path", rate, "--seed", seed, *options], capture_output=True, text=True,
                          check=False)
    found = LAST.search(done.stdout)
    if done.returncode != 0 or not found:
        sys.exit(f"drop path {rate}, seed {seed} ended with {done.returncode}: {done.stderr}")
    print(done.stdout.splitlines()[-1], file=sys.stderr, flush=True)
    return [float(number) for number in found.groups()]


def with_error(numbers, digits):
    error = statistics.stdev(numbers) / len(numbers) ** 0.5 if len(numbers) > 1 else 0
    return f"{statistics.mean(numbers):.{digits}f} +- {error:.{digits}f}"


def main():
    arguments, options = sys.argv[1:], []
    if "--" in arguments:
        at = arguments.index("--")
        arguments, options = arguments[:at], arguments[at + 1:]
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("program")
    parser.add_argument("--rates", default="0,0.1,0.2,0.3")
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--jobs", type=int, default=3, help="runs at a time (3)")
    given = parser.parse_args(arguments)
    rates, seeds = given.rates.split(","), given.seeds.split(",")
    with ThreadPoolExecutor(given.jobs) as pool:
        runs = {rate: [pool.submit(train, given.program, options, rate, seed) for seed in seeds] for rate in rates}
        print("drop path | weights, % right | loss | average, % right | loss | images/s")
        for rate in rates:
            columns = zip(*[run.result() for run in runs[rate]])
            print(" | ".join([rate, *map(with_error, columns, DIGITS)]), flush=True)


if __name__ == "__main__":
    main()
