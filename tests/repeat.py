#!/usr/bin/env python3
"""Repeats the tests in random order on a machine that is kept busy, and tells each failure with the seed of its run.

repeat.py TIMES [--build FOLDER] [--tests REGEX] [--under SECONDS] [--load N] [--seed N]

Entries of ctest run one after the other, in an order drawn from the seed; so do the cases of a Catch2 program. After
the first time, Catch2 cases that took longer than --under are left out. Exit code 1 where anything failed.
"""
import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

DURATION = re.compile(r"^(\d+\.\d+) s: (.*)$", re.M)
COUNT = re.compile(r"^All tests passed \(.* in (\d+) test cases?\)|^test cases: *(\d+)", re.M)
LAST_LINES = 30  # of a failed run's output, which are printed
PATIENCE = 1800  # seconds that an entry without a limit of its own may take on a busy machine


def entries_of(build, pattern):
    """What ctest would run: [(name, command, environment, seconds)], less what needs a GPU."""
    found = json.loads(subprocess.run(["ctest", "--test-dir", build, "--show-only=json-v1", "-R", pattern], check=True,
                                      capture_output=True, text=True).stdout)
    entries = []
    for test in found["tests"]:
        properties = {item["name"]: item["value"] for item in test.get("properties", ())}
        if "gpu" in properties.get("LABELS", ()) or "command" not in test:
            continue
        environment = dict(word.split("=", 1) for word in properties.get("ENVIRONMENT", ()))
        # A limit is for a quiet machine.
        entries.append((test["name"], test["command"], environment, 4 * properties.get("TIMEOUT", PATIENCE / 4)))
    return entries


def run(command, environment, seconds):
    """Exit status and output; what is left of the entry after its time is killed with it."""
    process = subprocess.Popen(command, env={**os.environ, **environment}, stdout=subprocess.PIPE,
                               stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True)
    try:
        output, _ = process.communicate(timeout=seconds)
        return process.returncode, output
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return "time out", process.communicate()[0]


def cases_in(output):
    found = COUNT.search(output)
    return int(found[1] or found[2]) if found else 1


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("times", type=int)
    parser.add_argument("--build", default="build/release")
    parser.add_argument("--tests", default=".", metavar="REGEX", help="entries of ctest whose names match")
    parser.add_argument("--under", type=float, default=float("inf"), metavar="SECONDS")
    parser.add_argument("--load", type=int, default=os.cpu_count(), help="processes that keep the machine busy")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 31))
    chosen = parser.parse_args()
    entries = entries_of(chosen.build, chosen.tests)
    if not entries:
        sys.exit(f"repeat.py: no test in {chosen.build} has a name that matches {chosen.tests}")

    load = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(chosen.load)]
    slow, failures, counts = set(), [], {}
    start = time.monotonic()
    try:
        for seed in range(chosen.seed, chosen.seed + chosen.times):
            random.Random(seed).shuffle(entries)
            for name, command, environment, seconds in entries:
                begun = time.monotonic()
                status, output = run(command, {**environment, "PACER_TEST_SEED": str(seed),
                                               "PACER_TEST_EXCEPT": "\n".join(sorted(slow))}, seconds)
                slow |= {case for took, case in DURATION.findall(output) if float(took) > chosen.under}
                counts.setdefault(name, []).append(cases_in(output))
                verdict = "passed" if status == 0 else f"FAILED ({status})"
                print(f"seed {seed}: {name} {verdict}, {counts[name][-1]} cases in {time.monotonic() - begun:.0f} s", flush=True)
                if status != 0:
                    failures.append((seed, name))
                    path = Path(chosen.build) / f"repeat-{seed}-{name}.txt"
                    path.write_text(output)
                    print(f"  its output is in {path}, and ends so:")
                    print("\n".join(f"  | {line}" for line in output.splitlines()[-LAST_LINES:]), flush=True)
    finally:
        for process in load:
            process.kill()
            process.wait()

    print(f"\n{chosen.times} times with seeds from {chosen.seed}, {chosen.load} processes beside, "
          f"{time.monotonic() - start:.0f} s")
    for name, numbers in sorted(counts.items()):
        failed = sum(name == other for _, other in failures)
        print(f"  {name}: {len(numbers)} runs, {sum(numbers)} cases, {failed} runs failed")
    for case in sorted(slow):
        print(f"  only once: {case}")
    for seed, name in failures:
        print(f"  to see it again: repeat.py 1 --seed {seed} --tests '^{re.escape(name)}$' --build {chosen.build}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
