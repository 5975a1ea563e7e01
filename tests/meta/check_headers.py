#!/usr/bin/env python3
"""Compiles public headers of the library folders without others before them, so that each includes what it needs. They
are compiled where they have changed, and a quarter of the others by turns; with PACER_TEST_LONG=1, or where git does not
tell what has changed, all are. In a long run so are those of detail/, which only pacer's own files see.

One compilation can stand for several headers: for a row of them in which each includes the one before, directly or
through others. What is there before such a header is there for it in any case.

check_headers.py --root ROOT --work FOLDER -- COMPILER [FLAG...]
check_headers.py --self-test --work FOLDER -- COMPILER [FLAG...]     expects a header that lacks an include to be noticed
"""
import argparse
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from changes import changed, parent, turn

LIBRARY = ("core", "files", "kernels", "device", "collectives", "compression", "modules", "optimizers",
           "hooks", "schedulers", "metrics", "parallel", "checkpoints", "session")
# The most expensive headers of LibTorch, from the one that brings most. A header that includes one is compiled with its
# precompiled form: what it uses is there in any case, but before its own include.
EXPENSIVE = ("torch/nn/module.h", "torch/optim/optimizer.h", "ATen/core/Tensor.h")
TURNS = 4
INCLUDE = re.compile(r'^#include [<"]([^>"]+)[>"]', re.MULTILINE)


def included(folders, header):
    """What the header includes, directly or through others, of pacer and of LibTorch's interface to C++."""
    seen, waiting = set(), [header]
    while waiting:
        header = waiting.pop()
        if header in seen:
            continue
        seen.add(header)
        paths = (folder / header for folder in folders if header.startswith(("pacer/", "torch/nn/", "torch/optim/")))
        text = next((path.read_text(encoding="utf-8") for path in paths if path.exists()), "")
        waiting += INCLUDE.findall(text)
    return seen


def is_a_list(text):
    """Whether a header has nothing but includes of pacer's own, which are compiled alone themselves."""
    lines = (line for line in text.splitlines() if line and not line.startswith("//"))
    return all(line == "#pragma once" or line.startswith("#include <pacer/") for line in lines)


def precompile(work, compiler, header):
    """The options that bring the header in its precompiled form; none where the compiler makes no such form."""
    source = work / f"with_{Path(header).stem}.h"
    source.write_text(f"#include <{header}>\n")
    made = subprocess.run([*compiler, "-x", "c++-header", str(source), "-o", f"{source}.gch"], capture_output=True)
    return ("-include", str(source)) if made.returncode == 0 else ()


def rows_of(headers):
    """As few rows as there can be that have each header once, behind one that it includes. `headers` has what each includes.

    Each header looks for one to stand before; where all of those have another before them, that one looks again.
    """
    before = {}

    def finds_place(header, seen):
        for other, includes in headers.items():
            if other == header or header not in includes or other in seen:
                continue
            seen.add(other)
            if other not in before or finds_place(before[other], seen):
                before[other] = header
                return True
        return False

    followed = {header for header in headers if finds_place(header, set())}
    rows = [[header] for header in headers if header not in followed]
    for row in rows:
        while row[0] in before:
            row.insert(0, before[row[0]])
    return rows


def compile_alone(work, compiler, headers, extra=()):
    """The compiler's complaint, or nothing. ccache can help where there is an object file; without it there is none to make."""
    name = "".join(c if c.isalnum() else "_" for c in headers[-1] + "".join(extra))
    source = work / f"{name}.cpp"
    text = "".join(f"#include <{header}>\n" for header in headers)
    if not source.exists() or source.read_text() != text:
        source.write_text(text)
    made = ("-fsyntax-only",) if os.environ.get("CCACHE_DISABLE") else ("-c", "-o", str(source.with_suffix(".o")))
    command = [*compiler, *extra, *made, str(source)]
    run = subprocess.run(command, capture_output=True, text=True)
    return f"what only has <{'>, <'.join(headers)}> does not compile:\n{run.stderr}" if run.returncode else ""


def chosen(rows, names, now):
    """Those rows that have a header among the names, which have changed, or whose turn it is; all without names."""
    return [row for number, row in enumerate(rows)
            if names is None or names.intersection(row) or number % TURNS == now]


def check(root, work, compiler):
    headers = ["pacer.h"] if (root / "pacer.h").exists() else []
    for folder in LIBRARY:
        found = (path.relative_to(root) for path in (root / folder).rglob("*.h"))
        # Declarations that stand in for headers of Gloo are seen by one source file only.
        left_out = {"gloo_stubs"} if os.environ.get("PACER_TEST_LONG") else {"gloo_stubs", "detail"}
        headers += sorted(str(path) for path in found if not left_out.intersection(path.parts)
                          and not is_a_list((root / path).read_text(encoding="utf-8")))
    folders = [Path(word.removeprefix("-I")) for word in compiler if word.startswith(("-I", "/"))]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        includes = {f"pacer/{header}": included(folders, f"pacer/{header}") for header in headers}
        brought = {header: next(filter(seen.__contains__, EXPENSIVE), None) for header, seen in includes.items()}
        # Only beside those with the same precompiled form, which one that includes less would find there by chance.
        rows = {expensive: rows_of({header: seen for header, seen in includes.items() if brought[header] == expensive})
                for expensive in (*EXPENSIVE, None)}
        since = None if os.environ.get("PACER_TEST_LONG") else parent(root)
        names = changed(root, since) if since else None
        names = None if names is None else {f"pacer/{name}" for name in names}
        rows = {expensive: chosen(rows[expensive], names, turn(root, TURNS)) for expensive in rows}
        used = [expensive for expensive in EXPENSIVE if rows[expensive]]
        forms = dict(zip(used, pool.map(lambda header: precompile(work, compiler, header), used)))
        jobs = [(row, forms.get(expensive, ())) for expensive in rows for row in rows[expensive]]
        jobs += [(["pacer/pacer.h"], ("-std=c++23",))] if headers[:1] == ["pacer.h"] else []
        problems = list(pool.map(lambda job: compile_alone(work, compiler, *job), jobs))
    print(f"{sum(len(row) for row, _ in jobs)} headers of {len(headers)} in {len(jobs)} compilations")
    return [problem for problem in problems if problem]


def self_test(work, compiler):
    folder = work / "pacer" / "core"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "broken.h").write_text("#pragma once\ninline std::string broken() { return {}; }\n")
    (folder / "fine.h").write_text("#pragma once\n#include <string>\ninline std::string fine() { return {}; }\n")
    compiler = [*compiler, f"-I{work}"]
    problems = []
    if not compile_alone(work, compiler, ["pacer/core/broken.h"]):
        problems.append("a header without its include was not noticed")
    if is_a_list((folder / "fine.h").read_text()) or not is_a_list("// All.\n#pragma once\n\n#include <pacer/core/fine.h>\n"):
        problems.append("which headers only include others of pacer is not seen")
    rows = rows_of({"a": {"a"}, "b": {"a", "b"}, "c": {"a", "c"}, "d": {"a", "b", "c", "d"}})
    if sorted(map(len, rows)) != [1, 3] or rows_of({"a": set(), "b": set()}) != [["a"], ["b"]]:
        problems.append(f"headers stand in the rows {rows}")
    rows = [[str(number)] for number in range(2 * TURNS)]
    if chosen(rows, None, 1) != rows or chosen(rows, {"0"}, 1) != [rows[0], rows[1], rows[1 + TURNS]]:
        problems.append(f"of {rows}, these are chosen: {chosen(rows, {'0'}, 1)}")
    return problems + [compile_alone(work, compiler, ["pacer/core/fine.h"])]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", type=Path)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--self-test", action="store_true")
    parser.add_argument("compiler", nargs="+")
    given = parser.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    if given.self_test:
        problems = self_test(given.work, given.compiler)
    else:
        problems = check(given.root, given.work, given.compiler)
    for problem in filter(None, problems):
        print(problem)
    return 1 if any(problems) else 0


if __name__ == "__main__":
    sys.exit(main())
