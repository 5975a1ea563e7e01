#!/usr/bin/env python3
"""summary.py TESTS RESULTS.xml...: counts what ctest ran, in test cases, and prints "N passed, N failed, N skipped".

RESULTS.xml is what ctest --output-junit wrote; one that is not there counts nothing. A Catch2 program counts with the cases it reports, anything else as one.
Cases tagged [gpu] that did not run are named from the sources in the folder TESTS, as their program may not exist.
What failed is told again at the end, because what ctest printed is long. Exit code 1 when something failed or nothing ran at all.
"""
import os
import re
import sys
import xml.etree.ElementTree as xml
from pathlib import Path

ALL_PASSED = re.compile(r"^All tests passed \(.* in (\d+) test cases?\)", re.M)
SOME_FAILED = re.compile(r"^test cases: *(\d+)(.*)$", re.M)
SKIPPED = re.compile(r"PACER_SKIPPED: (.*)")
CASE = re.compile(r'TEST_CASE(?:_METHOD)?\(\s*((?:"(?:[^"\\]|\\.)*"\s*)+),\s*"([^"]*)"')


def count(output, status):
    """Passed, failed and skipped cases of one ctest entry."""
    skipped = len(SKIPPED.findall(output))
    if found := ALL_PASSED.search(output):
        passed, failed = int(found[1]) - skipped, 0
    elif found := SOME_FAILED.search(output):
        parts = {word: int(n) for n, word in re.findall(r"(\d+) (passed|failed|skipped)", found[2])}
        passed, failed = parts.get("passed", 0) - skipped, parts.get("failed", 0)
        skipped += parts.get("skipped", 0)
    elif "No test case matches." in output:
        passed, failed = 0, 0
    elif status == "run":
        return 1, 0, 0
    else:
        passed, failed = 0, 0
    if status == "fail" and failed == 0:  # it crashed, or ran too long
        failed = 1
    return passed, failed, skipped


def failures(output):
    """The failed assertions of a Catch2 program, below the names of their cases; of anything else, its last lines."""
    # Catch2 puts the name of a case between two lines of dashes, and what it says of the case behind them.
    parts = re.split(r"^-{9,}\n", output, flags=re.M)
    told = []
    for name, said in zip(parts[1::2], parts[2::2]):
        if ": FAILED:" in said:
            told += [name.strip(), *said.split("\n=====")[0].splitlines()[2:20]]
    return [line[:300] for line in told or output.splitlines()[-30:]]


def gpu_cases(folder):
    names = []
    for source in sorted(Path(folder).rglob("*.cpp")):
        for name, tags in CASE.findall(source.read_text(encoding="utf-8")):
            if "[gpu]" in tags:
                names.append("".join(re.findall(r'"((?:[^"\\]|\\.)*)"', name)))
    return names


def main(tests, *results):
    total = [0, 0, 0]
    gpu_reason = None
    reasons, failed = [], []
    entries = [entry for path in results if os.path.exists(path) for entry in xml.parse(path).getroot()]
    for entry in entries:
        output = entry.findtext("system-out") or ""
        name, status = entry.get("name"), entry.get("status")
        if name.endswith(".gpu") and status == "notrun":
            gpu_reason = SKIPPED.search(output)[1] if SKIPPED.search(output) else "not run"
            continue
        counted = count(output, status)
        if status == "notrun":
            counted = (0, 0, 1) if SKIPPED.search(output) else (0, 1, 0)
        reasons += [f"  {name}: {reason}" for reason in SKIPPED.findall(output)]
        total = [a + b for a, b in zip(total, counted)]
        if counted[1]:
            failed += [f"Failed: {name}", *(f"  {line}" for line in failures(output)[:200])]
    if reasons:
        print("Skipped:", *reasons, sep="\n")
    if gpu_reason:
        wanted = os.environ.get("PACER_TEST_FILTER", "").lower()
        names = [name for name in gpu_cases(tests) if wanted in name.lower()]
        print(f"Skipped, as they need a GPU ({gpu_reason}):", *names, sep="\n  ")
        total[2] += len(names)
    print(*failed, sep="\n", end="\n" if failed else "")
    print("{} passed, {} failed, {} skipped".format(*total))
    return 1 if total[1] or not entries else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
