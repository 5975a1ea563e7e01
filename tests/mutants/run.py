#!/usr/bin/env python3
"""Mutation testing: changes the library in small ways, one at a time, and sees whether a test notices.

usage: run.py [--sample N] [--seed S] [--minutes M] [--seconds S] [--files EXPRESSION] [--tests EXPRESSION] [--jobs N] [--again]
       [--list] [--work FOLDER] BUILD [--folders NAME...]

BUILD is a build folder in which pacer-unit-tests and pacer-property-tests are built. All mutants are compiled into
one program, in BUILD/mutants, and chosen while it runs; the source tree is only read. Every test case runs once
without a mutant, to see which places it reaches; then each mutant meets the cases that reach it, quick ones first.
Results are in BUILD/mutants/results.jsonl, and a run goes on where the one before it was stopped. Several runs at once, of
other files and their tests, need folders of their own: --work.
"""

import argparse
import hashlib
import json
import os
import pathlib
import queue
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import mutate
from build import Build, Tree

HERE = pathlib.Path(__file__).resolve().parent
FOLDERS = ("core", "files", "kernels", "device", "collectives", "compression", "modules", "optimizers",
           "hooks", "schedulers", "metrics", "parallel", "checkpoints", "session")
FIRST_GENERATED = 1000
GOAL = 0.95


def group_of(file):
    """What the report counts together: kernels/math by itself, else the first folder."""
    return "kernels/math" if file.startswith("kernels/math/") else file.split("/")[0]


def is_mutated(file):
    """Code for GPUs, for NCCL, and stand-ins for headers are not reached by a test without a GPU; error.h is text."""
    left_out = ("cuda", "nccl", "gloo_stubs", "_device", "device/", "core/error.h")
    return file.endswith((".h", ".cpp")) and not any(word in file for word in left_out)


def hand_made(root):
    entries = json.loads((HERE / "by_hand.json").read_text())
    return [mutate.by_hand(entry, (root / entry["file"]).read_text()) for entry in entries]


def generated(root):
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*")):
            file = str(path.relative_to(root))
            if is_mutated(file):
                yield from mutate.Generator(file, path.read_text()).run()


def chosen(root, options, numbers):
    """The mutants of this run: those made by hand, and of each folder a sample. A number stays with its mutant."""
    groups = {}
    for mutant in generated(root):
        if re.search(options.files, mutant.file):
            groups.setdefault(group_of(mutant.file), []).append(mutant)
    mutants = hand_made(root)
    for number, mutant in enumerate(mutants, 1):
        mutant.number = number
    mutants = [mutant for mutant in mutants if re.search(options.files, mutant.file)]
    for group, all_of_group in sorted(groups.items()):
        if options.folders and group not in options.folders:
            continue
        # Drawn by name, so that a change of one file leaves the sample of the others as it was.
        all_of_group.sort(key=lambda mutant: hashlib.sha256(f"{options.seed} {mutant.key}".encode()).digest())
        print(f"{group}: {len(all_of_group)} generated")
        for mutant in all_of_group[: options.sample]:
            mutant.number = numbers.setdefault(mutant.key, FIRST_GENERATED + len(numbers))
            mutants.append(mutant)
    return mutants


class Cases:
    """The test program, started once, with a folder for the files of its cases."""

    def __init__(self, program, temporary, files):
        self.temporary = temporary
        temporary.mkdir(exist_ok=True)
        environment = dict(os.environ, TMPDIR=str(temporary), OMP_NUM_THREADS="2", OMP_WAIT_POLICY="passive")
        self.process = subprocess.Popen(
            [program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=temporary
        )
        self.names, self.usable = [], []
        while line := self.process.stdout.readline().rstrip("\n"):
            number, tags, file, name = line.split("\t")
            self.names.append(name)
            if "[gpu]" not in tags and "[." not in tags and re.search(files, pathlib.Path(file).stem):
                self.usable.append(int(number))

    def ask(self, seconds, mutant, cases):
        self.process.stdin.write(f"{seconds} {mutant} {' '.join(map(str, cases))}\n")
        self.process.stdin.flush()
        result, case, took, *seen = self.process.stdout.readline().split()
        shutil.rmtree(self.temporary, ignore_errors=True)
        self.temporary.mkdir(exist_ok=True)
        return result, int(case), float(took), set(map(int, seen))


class Programs:
    """The test program several times over, and what is known of its cases."""

    def __init__(self, program, work, files, jobs):
        self.program, self.work = program, work
        self.pool = ThreadPoolExecutor(jobs)
        all_cases = [Cases(program, work / f"tmp-{job}", files) for job in range(jobs)]
        self.names, self.usable = all_cases[0].names, all_cases[0].usable
        self.idle = queue.SimpleQueue()
        for cases in all_cases:
            self.idle.put(cases)

    def map(self, function, items):
        """What the function makes of a program and each item, in their order."""

        def call(item):
            cases = self.idle.get()
            try:
                return function(cases, item)
            finally:
                self.idle.put(cases)

        return self.pool.map(call, items)

    def reach(self, longest):
        """By case: how long it takes, and which mutants it reaches."""
        stamp = self.work / "cases.json"
        known = json.loads(stamp.read_text()) if stamp.exists() else {}
        program = str(self.program.stat().st_mtime)
        if known.get("program") != program:
            known = {"program": program, "cases": {}}
        left = [case for case in self.usable if self.names[case] not in known["cases"]]
        for case, answer in zip(left, self.map(lambda cases, case: cases.ask(longest, 0, [case]), left)):
            result, _, took, seen = answer
            known["cases"][self.names[case]] = {"result": result, "seconds": took, "seen": sorted(seen)}
            if len(known["cases"]) % 50 == 0:
                stamp.write_text(json.dumps(known))
                print(f"{len(known['cases'])} of {len(self.usable)} cases looked at", flush=True)
        stamp.write_text(json.dumps(known))
        for name, case in known["cases"].items():
            if case["result"] != "passed":
                print(f"left out, as it {case['result']} without a mutant: {name}")
        found = {case: known["cases"][self.names[case]] for case in self.usable}
        return {case: (f["seconds"], set(f["seen"])) for case, f in found.items() if f["result"] == "passed"}


def judge(mutant, cases, reach, seconds):
    """Runs the cases that reach a mutant, the quick ones first, for so many seconds of undisturbed time."""
    fitting = sorted((took, case) for case, (took, seen) in reach.items() if mutant.number in seen)
    record = {"key": mutant.key, "file": mutant.file, "line": mutant.line, "operator": mutant.operator, "new": mutant.new}
    if mutant.meaning:
        record["meaning"] = mutant.meaning
    if not fitting:
        return {**record, "result": "not reached"}
    used, total = [], 0.0
    for took, case in fitting:
        total += took
        if used and total > seconds:
            break
        used.append(case)
    result, case, took, _ = cases.ask(15 + 5 * min(total, seconds), mutant.number, used)
    if result == "passed":
        return {**record, "result": "survived", "cases": len(used), "reached_by": len(fitting), "seconds": took}
    return {**record, "result": "killed", "by": cases.names[case], "how": result, "seconds": took}


def report(mutants, results, equivalent, unusable):
    """Prints a table by folder and the survivors. Returns whether the goal is reached."""
    rows, survivors = {}, []
    for mutant in mutants:
        row = rows.setdefault("by hand" if mutant.meaning else group_of(mutant.file), dict.fromkeys(COLUMNS, 0))
        row["mutants"] += 1
        if mutant.key in unusable:
            row["not compiled"] += 1
        elif mutant.key in equivalent:
            row["equivalent"] += 1
        elif mutant.key in results:
            result = results[mutant.key]["result"]
            row[result] += 1
            if result != "killed":
                survivors.append(results[mutant.key])
    print(f"\n{'':14}" + "".join(f"{column:>14}" for column in COLUMNS) + f"{'killed %':>10}")
    whole = {column: sum(row[column] for row in rows.values()) for column in COLUMNS}
    for name, row in [*rows.items(), ("all", whole)]:
        judged = row["killed"] + row["survived"] + row["not reached"]
        share = f"{100 * row['killed'] / judged:10.1f}" if judged else f"{'-':>10}"
        print(f"{name:14}" + "".join(f"{row[column]:14}" for column in COLUMNS) + share)
    for s in survivors:
        print(f"\n{s['file']}:{s['line']}: {s['operator']}: {s['result']}\n  {s['key'].split(' | ')[1]}\n  -> {s['new'] or 'nothing'}")
    judged = whole["killed"] + whole["survived"] + whole["not reached"]
    return judged > 0 and whole["killed"] >= GOAL * judged


COLUMNS = ("mutants", "not compiled", "killed", "survived", "not reached", "equivalent")


def main():
    parser = argparse.ArgumentParser(usage=__doc__.split("usage: ")[1])
    parser.add_argument("build", type=pathlib.Path)
    parser.add_argument("--folders", nargs="+", help="of which generated mutants are taken; kernels/math is one")
    parser.add_argument("--sample", type=int, default=60, help="so many generated mutants of each folder")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=1e9, help="start no further mutant after this time")
    parser.add_argument("--seconds", type=float, default=20, help="of test cases for each mutant")
    parser.add_argument("--files", default="", help="only mutants in files whose path this expression finds")
    parser.add_argument("--tests", default="", help="only cases of test files whose name this expression finds")
    parser.add_argument("--jobs", type=int, default=2, help="compilers, and then test programs, at a time")
    parser.add_argument("--again", action="store_true", help="judge the mutants again that were not killed")
    parser.add_argument("--list", action="store_true", help="only report what is known")
    parser.add_argument("--work", type=pathlib.Path, help="where mutants are compiled and results kept, for BUILD/mutants")
    options = parser.parse_args()
    build = options.build.resolve()
    work = (options.work or build / "mutants").resolve()
    work.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + 60 * options.minutes
    numbers_file = work / "numbers.json"
    numbers = json.loads(numbers_file.read_text()) if numbers_file.exists() else {}
    root = HERE.parent.parent
    mutants = chosen(root, options, numbers)
    numbers_file.write_text(json.dumps(numbers))
    tree = Tree(root, work, FOLDERS)
    results_file = work / "results.jsonl"
    lines = results_file.read_text().splitlines() if results_file.exists() else []
    results = {record["key"]: record for record in map(json.loads, lines)}
    equivalent = {entry["key"] for entry in json.loads((HERE / "equivalent.json").read_text())}
    if not options.list:
        tree.put(mutants)
        programs = Programs(Build(build, work, tree, options.jobs).run(), work, options.tests, options.jobs)
        reach = programs.reach(longest=60)

        def is_left(mutant):
            known = results.get(mutant.key, {}).get("result")
            done = known == "killed" or (known and not options.again)
            return not done and mutant.key not in tree.unusable | equivalent

        def judged(cases, mutant):
            return judge(mutant, cases, reach, options.seconds) if time.monotonic() < end else None

        left = list(filter(is_left, mutants))
        with results_file.open("a") as out:
            for mutant, record in zip(left, programs.map(judged, left)):
                if record is None:
                    continue
                results[mutant.key] = record
                print(f"{record['result']:12} {mutant.file}:{mutant.line} {mutant.operator} {record.get('by', '')}", flush=True)
                out.write(json.dumps(record) + "\n")
                out.flush()
    return 0 if report(mutants, results, equivalent, tree.unusable) else 1


if __name__ == "__main__":
    sys.exit(main())
