#!/usr/bin/env python3
"""Runs with several processes.

run_ranks.py --list           the names of all cases
run_ranks.py WORKER CASE...   runs them; prints what failed and ends with 1

A case is a function of a file cases_*.py in this folder, marked @case; it starts the scenarios of WORKER as ranks.
"""
import importlib
import signal
import sys
import time
import traceback
from pathlib import Path

from ranks import Failure

CASES = {}


def case(function):
    """Marks a case: a function of the worker's path."""
    name = f"{function.__module__.removeprefix('cases_')}.{function.__name__}"
    CASES[name] = function
    return function


def main(arguments):
    # A shell starts what it runs in the background with SIGINT ignored, and so would ranks be, which are sent one.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for path in sorted(Path(__file__).parent.glob("cases_*.py")):
        importlib.import_module(path.stem)
    if arguments == ["--list"]:
        print("\n".join(sorted(CASES)))
        return 0
    worker, *names = arguments
    failed = 0
    for name in names:
        start = time.monotonic()
        try:
            CASES[name](worker)
            print(f"{name}: passed in {time.monotonic() - start:.1f} s")
        except Failure as failure:
            where = traceback.extract_tb(failure.__traceback__)[1]
            print(f"{name}: FAILED at {Path(where.filename).name}:{where.lineno}: {failure}")
            failed = 1
    return failed


if __name__ == "__main__":
    sys.modules["run_ranks"] = sys.modules["__main__"]  # so that the cases find this table, not a second one
    sys.exit(main(sys.argv[1:]))
