#!/usr/bin/env python3
"""Runs clang-tidy with the checks of .clang-tidy over the library, with the flags that a build compiles it with.

Without options it looks at what has changed, and at a quarter of the files of the folders without LibTorch by turns; with
PACER_TEST_LONG=1 at all of those. To parse LibTorch's headers and to match all checks with them takes half a minute,
for one source file or for eight. So files that the build compiles as one (PACER_UNITY) are looked at as one, eight at
most, and there are no more than MOST runs. A header that has changed is looked at through the source file of its
name, or the first of its folder that includes it.
"""
import argparse
import concurrent.futures
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from changes import changed, parent, turn
from check_tree import LIBRARY, NEVER_TORCH

FOLDERS = LIBRARY + ("python",)
CLANG_TIDY = 14  # other versions find other things
MOST = 2
EACH = 8
TURNS = 4
# The analyzer looks into small functions only, in half the time; into `require`, or it would not know what holds behind
# that. Flags for GCC are passed over.
EXTRA = ("-Xclang", "-analyzer-config", "-Xclang", "mode=shallow", "-Xclang", "-analyzer-config", "-Xclang",
         "max-inlinable-size=6", "-Wno-unknown-warning-option", "-Wno-ignored-optimization-argument")
# With OpenMP, clang-tidy takes any two loops for alike.
DROPPED = {"-fopenmp", "-fopenmp-simd"}

FINDING = re.compile(r"^(/[^:\n]+):(\d+):\d+: (warning|error): (.*) \[([^\]\n]+)\]$", re.M)
INCLUDED = re.compile(r'^#include "([^"]+)"$', re.M)


def linter():
    program = shutil.which(f"clang-tidy-{CLANG_TIDY}") or shutil.which("clang-tidy")
    version = subprocess.run([program, "--version"], capture_output=True, text=True).stdout if program else ""
    return program if f"version {CLANG_TIDY}." in version else None


def batches(build, root):
    """Yields what the build compiles as one: the flags, and source files as paths in the tree, all of one folder."""
    for entry in json.loads((build / "compile_commands.json").read_text(encoding="utf-8")):
        words = shlex.split(entry["command"])
        if "-o" not in words or "-c" not in words or entry["file"].endswith(".cu"):
            continue
        folder = words[words.index("-o") + 1].split("/")[0]
        main = Path(entry["directory"], entry["file"])
        unity = main.resolve().is_relative_to(build)
        sources = INCLUDED.findall(main.read_text(encoding="utf-8")) if unity else [main]
        sources = [Path(source).resolve() for source in sources]
        if folder in FOLDERS and all(source.is_relative_to(root / folder) for source in sources):
            # What is left between the compiler and the name of the object file.
            first = next(place for place, word in enumerate(words) if word.startswith("-"))
            flags = [word for word in words[first:words.index("-o")] if word not in DROPPED]
            yield flags, [source.relative_to(root) for source in sources]


def source_of(root, header, sources):
    """Returns the source file through which a header is looked at, or None."""
    if header.with_suffix(".cpp") in sources:
        return header.with_suffix(".cpp")
    include = f"<pacer/{header}>"
    beside = (source for source in sources if source.parts[0] == header.parts[0])
    return next((source for source in beside if include in (root / source).read_text(encoding="utf-8")), None)


def choose(root, made, names, most, now=None):
    """Cuts the batches down to what was changed and, of folders with LibTorch, fits in, and to those without it whose turn
    it is; without `now` to all of these.

    Returns them, and the sources and headers that were changed but are left out.
    """
    every = [source for _, sources in made for source in sources]
    wanted, left_out = set(), set()
    for name in sorted(names):
        if name.parts[0] in FOLDERS and name.suffix in (".cpp", ".h") and (root / name).exists():
            source = name if name in every else source_of(root, name, every) if name.suffix == ".h" else None
            (wanted if source else left_out).add(source or name)
    cheap = [(flags, [source for number, source in enumerate(sources)
                      if now is None or source in wanted or number % TURNS == now])
             for flags, sources in made if sources[0].parts[0] in NEVER_TORCH]
    cheap = [batch for batch in cheap if batch[1]]
    others = [(flags, [source for source in sources if source in wanted])
              for flags, sources in made if sources[0].parts[0] not in NEVER_TORCH]
    others = [(flags, sources[i:i + EACH]) for flags, sources in others for i in range(0, len(sources), EACH)]
    others.sort(key=lambda batch: -len(batch[1]))
    left_out |= {source for _, sources in others[most:] for source in sources}
    return cheap + others[:most], left_out


class Joined:
    """Several source files as one text: clang follows paths through the functions of the main file alone."""

    def __init__(self, root, sources):
        self.text, self.starts = "", []
        for source in sources:
            self.starts.append((self.text.count("\n"), source))
            self.text += (root / source).read_text(encoding="utf-8").rstrip("\n") + "\n"

    def place(self, line):
        """Returns where a line of the text comes from."""
        before, source = [start for start in self.starts if start[0] < line][-1]
        return f"{source}:{line - before}"


def look(program, root, flags, sources):
    """Returns the findings of one run, or else the place in somebody else's header that clang cannot read.

    What it says of the rest of such a text means nothing.
    """
    joined = Joined(root, sources)
    with tempfile.TemporaryDirectory() as folder:
        main = Path(folder).resolve() / "joined.cpp"
        main.write_text(joined.text, encoding="utf-8")
        command = [program, "--quiet", f"--config-file={root / '.clang-tidy'}", str(main), "--", *flags,
                   *(f"-iquote{path}" for path in sorted({(root / source).parent for source in sources})),
                   *EXTRA]
        run = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    findings, foreign = set(), None
    for path, line, kind, text, check in FINDING.findall(run.stdout):
        path = Path(path).resolve()
        if path == main:
            findings.add(f"{joined.place(int(line))}: {text} [{check}]")
        elif path.is_relative_to(root) and path.relative_to(root).parts[0] in FOLDERS:  # .venv is in the tree, too
            findings.add(f"{path.relative_to(root)}:{line}: {text} [{check}]")
        elif kind == "error" and not foreign:
            foreign = f"{path}:{line}: {text}"
    if run.returncode != 0 and not findings and not foreign:
        findings.add(f"clang-tidy failed on {sources[0]}: {(run.stdout + run.stderr).strip()[-500:]}")
    return (set() if foreign else findings), foreign


def names_of(paths):
    return ", ".join(str(path) for path in sorted(paths))


def plan(root, made, arguments):
    """Returns the batches to look at, and says which these are."""
    if arguments.all or arguments.only:
        start = arguments.only or ""
        chosen = [(flags, [source for source in sources if str(source).startswith(start)]) for flags, sources in made]
        chosen = [batch for batch in chosen if batch[1]]
        print(f"looking at {sum(len(sources) for _, sources in chosen)} files, in {len(chosen)} runs")
        return chosen
    since = arguments.since or parent(root)
    names = changed(root, since) if since else None
    now = None if names is None or os.environ.get("PACER_TEST_LONG") else turn(root, TURNS)
    chosen, left_out = choose(root, made, names or set(), MOST, now)
    counted = sum(len(sources) for _, sources in chosen if sources[0].parts[0] in NEVER_TORCH)
    print(f"looking at {counted} source files of {', '.join(NEVER_TORCH)}")
    if names is None:
        print("not looking at other folders: git does not tell what has changed here; --all looks at everything")
        return chosen
    others = [source for _, sources in chosen for source in sources if source.parts[0] not in NEVER_TORCH]
    print(f"looking at what has changed in other folders since {since[:10]}: {names_of(others) or 'nothing'}")
    if left_out:
        print(f"not looking at these, as they are beyond {MOST} runs or part of no source file of their folder: "
              f"{names_of(left_out)}")
    return chosen


def check(arguments):
    program = linter()
    if not program:
        print(f"PACER_SKIPPED: no clang-tidy {CLANG_TIDY}")
        return 0
    root, build = Path(arguments.root).resolve(), Path(arguments.build).resolve()
    if not (build / "compile_commands.json").exists():
        print(f"PACER_SKIPPED: {build} has no compile_commands.json")
        return 0
    made = list(batches(build, root))
    chosen = plan(root, made, arguments)
    findings, unread = set(), {}
    with concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool:
        runs = [pool.submit(look, program, root, *batch) for batch in chosen]
        for (_, sources), run in zip(chosen, runs):
            found, foreign = run.result()
            for finding in sorted(found - findings):
                print(finding, flush=True)
            findings |= found
            if foreign:
                unread[foreign] = unread.get(foreign, []) + sources
    for foreign, sources in unread.items():
        print(f"clang {CLANG_TIDY} cannot read {foreign}; not looked at: {names_of(sources)}")
    if not chosen and (arguments.only or not made):
        print(f"there is nothing to look at in {build}")
        return 1
    if unread and not findings:
        print(f"PACER_SKIPPED: clang {CLANG_TIDY} cannot read a header that is not pacer's")
    return 1 if findings else 0


def main(words):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build", help="a build folder that has been configured")
    parser.add_argument("root", nargs="?", default=".", help="the source tree; default: the current folder")
    parser.add_argument("--all", action="store_true", help="look at every file")
    parser.add_argument("--only", metavar="PATH", help="look at files whose path begins so, like optimizers/detail")
    parser.add_argument("--since", metavar="COMMIT",
                        help="what has changed since then; default: since the branch left main, or in its last commit")
    parser.add_argument("--jobs", type=int, default=1, help="run so many processes at a time; default 1")
    return check(parser.parse_args(words))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
