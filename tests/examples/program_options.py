#!/usr/bin/env python3
"""Every example program answers --help, and refuses what it does not know, at once and in one sentence.

program_options.py RUN_SCRIPT PROGRAM...

--help: exit code 0, a text on stdout that names the option, nothing on stderr. An unknown option, a mistyped one and a
word too many: exit code 2, one line on stderr behind the program's name, nothing on stdout. RUN_SCRIPT, the script that
sets everything up, answers the same way before it does, and knows the options of the study.
"""
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

WORD = "--nonsense"


def ask(folder, *command):
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)


def helps(folder, program):
    done = ask(folder, program, "--help")
    good = done.returncode == 0 and "--help" in done.stdout and len(done.stdout) > 80 and not done.stderr
    return [] if good else [f"{program} --help: exit code {done.returncode}\n{done.stdout}{done.stderr}"]


def refuses(folder, name, program, arguments, words):
    done = ask(folder, program, *arguments)
    lines = done.stderr.splitlines()
    good = (done.returncode == 2 and len(lines) == 1 and lines[0].startswith(name + ": ") and not done.stdout
            and all(word in lines[0] for word in words))
    return [] if good else [f"{program} {' '.join(arguments)}: exit code {done.returncode}\n{done.stdout}{done.stderr}"]


def check_program(folder, program):
    name = Path(program).name
    return [*helps(folder, program),
            *refuses(folder, name, program, [WORD], ["nonsense"]),
            *refuses(folder, name, program, ["--hlep"], ["did you mean '--help'?"]),
            *refuses(folder, name, program, ["one", "two"], [])]


def check_script(folder, script, study):
    name = "examples/run.sh"
    wrong = [*helps(folder, script),
             *refuses(folder, name, script, [WORD], ["nonsense"]),
             *refuses(folder, name, script, ["--quikc"], ["did you mean '--quick'?"]),
             *refuses(folder, name, script, ["--quick", "--tokns=3"], ["did you mean '--tokens'?"])]
    for option in set(re.findall(r"^  (?:-h \[ )?--([a-z-]+)", ask(folder, study, "--help").stdout, re.M)):
        # With --help behind it nothing is set up where the script knows the option.
        if ask(folder, script, f"--{option}", "--help").returncode != 0:
            wrong.append(f"{script} does not know --{option}")
    return wrong


def main(script, *programs):
    study = next(program for program in programs if Path(program).name == "convergence")
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as pool:
        found = [*pool.map(lambda program: check_program(folder, program), programs),
                 check_script(folder, script, study)]
        left = sorted(path.name for path in Path(folder).iterdir())
    wrong = [sentence for sentences in found for sentence in sentences]
    if left:
        wrong.append(f"files were left behind: {left}")
    if wrong:
        sys.exit("\n".join(wrong))
    print(f"{len(programs)} programs and {Path(script).name} answer --help and refuse what they do not know")


main(*sys.argv[1:])
