#!/usr/bin/env python3
"""Every folder of benchmarks/ is a subcommand of pacer-bench, which answers --help and refuses what it does not know.

command_lines.py PROGRAM
"""
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


def ask(*words):
    return subprocess.run([PROGRAM, *words], capture_output=True, text=True, timeout=120, check=False)


def refused(words, sentence):
    """What is wrong where the answer is not `sentence` and exit code 2."""
    done = ask(*words)
    good = done.returncode == 2 and not done.stdout and done.stderr == sentence + "\n"
    return [] if good else [f"{' '.join(words)}: exit code {done.returncode}\n{done.stdout}{done.stderr}"]


def check(name):
    done = ask(name, "--help")
    good = done.returncode == 0 and done.stdout.startswith("Measures ") and not done.stderr
    wrong = [] if good else [f"{name} --help: exit code {done.returncode}\n{done.stdout}{done.stderr}"]
    return wrong + refused([name, "--hlep"], f"pacer-bench {name}: unknown option '--hlep'; did you mean '--help'?")


def check_values():
    """Values by name and by place are the same, and a file of options repeats them."""
    by_place, by_name = ask("overlap", "gpt2", "2", "3", "--print-config"), ask(
        "overlap", "--model=gpt2", "--steps=2", "--rounds=3", "--print-config")
    with tempfile.NamedTemporaryFile("w", suffix=".ini") as file:
        file.write(by_name.stdout)
        file.flush()
        again = ask("overlap", "--config", file.name, "--print-config")
    good = "rounds = 3" in by_name.stdout and by_name.stdout == by_place.stdout == again.stdout
    return [] if good else [f"overlap --print-config:\n{by_name.stdout}{by_place.stdout}{again.stdout}{again.stderr}"]


def main():
    names = sorted({path.parent.name for path in FOLDER.glob("*/*.cpp")} - {"support"})
    listed = re.findall(r"^  ([a-z0-9]+)  +\S", ask("--help").stdout, re.M)
    wrong = [] if sorted(listed) == names else [f"--help lists {listed}, and the folders are {names}"]
    wrong += refused(["shardign"], "pacer-bench: there is no subcommand 'shardign'; did you mean 'sharding'?")
    wrong += refused([], "pacer-bench: which subcommand? --help lists them")
    wrong += refused(["sharding", "--modes", "plain,shrads"],
                     "pacer-bench sharding: --modes cannot be 'shrads'; did you mean 'shards'?")
    with ThreadPoolExecutor(2) as pool:
        wrong += [sentence for found in pool.map(check, names) for sentence in found]
    wrong += check_values()
    if wrong:
        sys.exit("\n".join(wrong))
    print(f"{len(names)} subcommands answer --help and refuse what they do not know")


PROGRAM = sys.argv[1]
main()
