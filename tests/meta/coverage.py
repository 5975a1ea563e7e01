#!/usr/bin/env python3
"""coverage.py COVERAGE.json UNCOVERED.txt: what ran, by folder, from what gcovr counted; exit code 1 below the goals.

A line of a template or an inline function is one line, whatever it was compiled for: it ran where any of them did.
UNCOVERED.txt gets the lines and branches that never ran, by file.
"""
import json
import re
import sys
from collections import defaultdict

LINES, BRANCHES = 95, 85  # percent that are wanted of everything
# Where every branch is wanted: what reads files of others, and the arithmetic of compression.
WHOLE = re.compile(r"files/safetensors|files/json_scanner|kernels/math/onebit|optimizers/detail/option_")
HEADERS = re.compile(r"^build/[^/]+/include/pacer/")


def merged(files):
    """{path: {line: (hits, [hits of each branch])}}, over all functions that a line was compiled into."""
    found = defaultdict(dict)
    for file in files:
        lines = found[HEADERS.sub("", file["file"])]
        for line in file["lines"]:
            hits, branches = lines.get(line["line_number"], (0, []))
            counts = [branch["count"] for branch in line["branches"]]
            if len(counts) < len(branches):
                counts += [0] * (len(branches) - len(counts))
            branches = [max(count, before) for count, before in zip(counts, branches + [0] * len(counts))]
            lines[line["line_number"]] = (max(hits, line["count"]), branches)
    return found


class Count:
    def __init__(self):
        self.lines = self.lines_run = self.branches = self.branches_run = 0

    def add(self, lines):
        self.lines += len(lines)
        self.lines_run += sum(hits > 0 for hits, _ in lines.values())
        self.branches += sum(len(branches) for _, branches in lines.values())
        self.branches_run += sum(count > 0 for _, branches in lines.values() for count in branches)

    def line_percent(self):
        return 100 * self.lines_run / max(1, self.lines)

    def branch_percent(self):
        return 100 if self.branches == 0 else 100 * self.branches_run / self.branches

    def __str__(self):
        return (f"lines {self.lines_run:6} of {self.lines:6} {self.line_percent():6.1f} %    "
                f"branches {self.branches_run:6} of {self.branches:6} {self.branch_percent():6.1f} %")


def gaps(lines):
    """The lines that never ran, and those with a branch that was never taken."""
    never = [str(number) for number, (hits, _) in sorted(lines.items()) if hits == 0]
    partly = [f"{number} ({sum(count == 0 for count in branches)} of {len(branches)})"
              for number, (hits, branches) in sorted(lines.items()) if hits > 0 and 0 in branches]
    return ", ".join(never), ", ".join(partly)


def main(counted, uncovered):
    with open(counted) as file:
        files = merged(json.load(file)["files"])
    folders, whole, total = defaultdict(Count), {}, Count()
    with open(uncovered, "w") as out:
        for path, lines in sorted(files.items()):
            folders[path.rsplit("/", 1)[0]].add(lines)
            total.add(lines)
            if WHOLE.match(path):
                whole[path] = Count()
                whole[path].add(lines)
            never, partly = gaps(lines)
            if never or partly:
                out.write(f"{path}\n  never ran: {never or '-'}\n  branches never taken: {partly or '-'}\n")
    for name, count in [*sorted(folders.items()), *sorted(whole.items()), ("all", total)]:
        print(f"{name:40} {count}")
    print(f"What never ran is in {uncovered}.")
    missed = [f"{path} has branches that never ran" for path, count in whole.items() if count.branch_percent() < 100]
    if total.line_percent() < LINES or total.branch_percent() < BRANCHES:
        missed.append(f"{LINES} % of lines and {BRANCHES} % of branches are wanted")
    for text in missed:
        print(f"coverage.py: {text}")
    return 1 if missed or not files else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
