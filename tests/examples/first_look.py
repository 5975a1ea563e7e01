#!/usr/bin/env python3
"""What who tries pacer for the first time sees: lines that fit the terminal, how far the study is, what to type next, warnings
in one line, and for which machine a single program is built.

first_look.py CONVERGENCE PROJECT
"""
import glob
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

PROGRAM, PROJECT = sys.argv[1], Path(sys.argv[2])
WIDEST = 100
STUDY = ["--layers", "2", "--width", "32", "--heads", "2", "--sequence", "32", "--batch", "4", "--data-limit", "200k",
         "--validation-sequences", "10", "--device", "cpu", "--tokens", "3840", "--processes", "2"]
ARMS = ["fused-adamw", "onebit-adam-curriculum", "onebit-lamb", "recompute", "shards", "curriculum", "curriculum-reshape", "pipeline"]


def expect(condition, text):
    if not condition:
        sys.exit(text)


def run(*command, **environment):
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False,
                          env={**{k: v for k, v in os.environ.items() if not k.startswith("PACER_")}, **environment})
    expect(done.returncode == 0, f"{command} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done


def check_study(seeds):
    with tempfile.TemporaryDirectory() as folder:
        done = run(PROGRAM, *STUDY, "--seeds", seeds, "--arms", ",".join(ARMS), "--output", folder)
        page = (Path(folder) / "report.html").read_text(encoding="utf-8")
    runs = len(ARMS) * len(seeds.split(","))
    word = "run" if "," in seeds else "arm"
    expect(f"{word} 2 of {runs}: " in done.stdout, f"no '{word} 2 of {runs}' in\n{done.stdout}")
    table = done.stdout.split("\narm ", 1)[-1] if "\narm " in done.stdout else done.stdout
    for line in table.splitlines():
        expect(len(line) <= WIDEST or "/report.html" in line, f"{len(line)} characters: {line}")
    for part in ("network ms", "Optimizer + network: ", "session.use(pacer::Shards());  // docs/sharding.md", "Difference: of the loss, to"):
        expect(part in done.stdout, f"no '{part}' in\n{done.stdout}")
    for line in done.stderr.splitlines():
        expect(".cpp" not in line and "Warning:" not in line and "function" not in line, f"a warning that names code: {line}")
    title = re.search("<title>(.*)</title>", page).group(1)
    expect(re.fullmatch(r"pacer: convergence study, \d{4}-\d\d-\d\d", title), f"the title is {title}")
    for part in ("What to look at", "<code>session.use(pacer::Shards());</code>", 'docs/sharding.md">docs/sharding.md</a>',
                 '<a href="settings.ini">', '<a href="shards-seed-1/metrics.jsonl">', "scrolls sideways", "↕"):
        expect(part in page, f"the report has no '{part}'")


def check_help():
    listed = run(PROGRAM, "--list").stdout
    for preset, options in {"--preset tiny": [], "--preset small": ["--preset", "small"], "--quick": ["--quick"],
                            "--fine-tune": ["--fine-tune"]}.items():
        said = re.search(rf"^  {preset}: (.*)$", listed, re.MULTILINE)
        trained = re.search("^arms = (.*)$", run(PROGRAM, *options, "--print-config").stdout, re.MULTILINE)
        expect(said and said.group(1) == trained.group(1), f"{preset} trains {trained.group(1)}, and --list says {said and said.group(1)}")
    expect("--list names all of them" in " ".join(run(PROGRAM, "--help").stdout.split()), "--help does not say where the arms are listed")


def check_cuda():
    default = PROJECT / "cmake" / "cuda_default.sh"
    choice = lambda *arguments, **environment: run("bash", default, *arguments, **environment).stdout.strip()
    if not shutil.which("nvidia-smi"):
        wanted = "AUTO" if glob.glob("/dev/nvidia[0-9]*") else "OFF"
        expect(choice("no-such-preset", "convergence") == wanted, "a first look is built for another machine")
    expect(choice("no-such-preset", "all") == "AUTO", "tests compile no CUDA")
    expect(choice("no-such-preset", "convergence", PACER_CUDA="ON") == "ON", "PACER_CUDA is not heard")
    expect(choice("no-such-preset", "all", PACER_CUDA="OFF") == "OFF", "PACER_CUDA is not heard")


def check_build():
    """The stage of the build says how many files there are to compile; here it builds a project of two, which CMake looks for anew
    in every build, as it does for pacer's."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        (root / "cmake").mkdir()
        for script in ("build.sh", "cuda_default.sh", "has_gpu.sh"):
            shutil.copy(PROJECT / "cmake" / script, root / "cmake")
        (root / "cmake" / "bootstrap.sh").write_text("#!/bin/sh\n", encoding="utf-8")
        (root / "cmake" / "bootstrap.sh").chmod(0o755)
        (root / "CMakePresets.json").write_text(json.dumps({"version": 3, "configurePresets": [
            {"name": "small", "generator": "Ninja", "binaryDir": "${sourceDir}/build/small"}]}), encoding="utf-8")
        (root / "CMakeLists.txt").write_text("cmake_minimum_required(VERSION 3.24)\nproject(small CXX)\n"
                                             "file(GLOB files CONFIGURE_DEPENDS *.cpp)\nadd_library(look STATIC ${files})\n",
                                             encoding="utf-8")
        for name in ("one", "two"):
            (root / f"{name}.cpp").write_text(f"int {name}() {{ return 1; }}\n", encoding="utf-8")
        for files, minutes in ((2, 1), (0, 0)):
            said = re.search(r"^== build .*$", run("bash", root / "cmake" / "build.sh", "small", "look").stdout, re.MULTILINE)
            wanted = rf"== build \({files} files, \d+ at a time; about {minutes} min\)"
            expect(said and re.fullmatch(wanted, said.group()), f"no '{wanted}', but {said and said.group()}")


check_cuda()
check_build()
check_help()
check_study("1")
check_study("1,2")
print("a first look fits the terminal and says what comes next")
