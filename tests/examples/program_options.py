#!/usr/bin/env python3
"""Every example program answers --help, and refuses what it does not know, at once and in one sentence.

program_options.py RUN_SCRIPT PROGRAM...

--help: exit code 0, a text on stdout that names the option, nothing on stderr. A mistyped option: exit code 2, one line
on stderr behind the program's name, nothing on stdout; of the study also an option that is like no other. By the programs
of MANY, which have options of all kinds, and with PACER_TEST_LONG=1 by all: a word too many is refused the same way,
--help-all also has the options of all programs, and what --print-config writes is read back by --config and printed again
as it was.
RUN_SCRIPT, the script that sets everything up, answers the same way before it does, and knows the options of the study.

Wherever a name is typed the nearest one is proposed: a third of NAMES; with PACER_TEST_LONG=1 all.
"""
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

WORD = "--nonsense"
MANY = {"convergence", "pacer-scaling"}
LONG = os.environ.get("PACER_TEST_LONG") == "1"

# Program, variables, arguments, a file for --config, and the name that is meant.
NAMES = [("convergence", {}, ["--quikc"], None, "--quick"),
         ("convergence", {}, ["--preset", "tinny"], None, "tiny"),
         ("convergence", {}, ["--arms", "adamw,onebit-adm"], None, "onebit-adam"),
         ("convergence", {}, ["--device", "cdua"], None, "cuda"),
         ("convergence", {}, ["--precision", "bflaot16"], None, "bfloat16"),
         ("convergence", {}, [], "tokns = 3M", "tokens"),
         ("convergence", {}, [], "preset = smal", "small"),
         ("convergence", {"PACER_TOKNES": "3M"}, [], None, "PACER_TOKENS"),
         ("convergence", {"PACER_PRESET": "smal"}, [], None, "small"),
         ("convergence", {}, ["--completion", "bsh"], None, "bash"),
         ("pacer-pipeline", {}, ["--schedule", "gpip"], None, "gpipe"),
         ("pacer-pipeline", {}, [], "schedle = gpipe", "schedule"),
         ("pacer-pipeline", {}, [], "schedule = zero-buble", "zero-bubble"),
         ("pacer-memory", {}, ["--dtype", "bf16-mastr"], None, "bf16-master"),
         ("pacer-memory", {}, ["--completion", "zhs"], None, "zsh"),
         ("pacer-scaling", {}, ["--model", "bert-lrge"], None, "bert-large"),
         ("pacer-scaling", {}, ["--machine", "h20"], None, "h200"),
         ("pacer-scaling", {}, ["--rule", "adam"], None, "adamw"),
         ("pacer-scaling", {}, [], "compute-m = 57", "compute-ms"),
         ("pacer-schedule", {}, ["--schedule", "cosin"], None, "cosine"),
         ("pacer-schedule", {}, ["--decay", "minus-sqr"], None, "minus-sqrt"),
         ("pacer-schedule", {}, [], "warmp = 300", "warmup"),
         ("pacer-schedule", {}, ["--over-token"], None, "--over-tokens"),
         ("pacer-info", {}, ["--jsn"], None, "--json"),
         ("pacer-collectives", {}, ["--device", "cdua"], None, "cuda"),
         ("pacer-collectives", {}, ["--measure", "exchnge"], None, "exchange"),
         ("scales", {}, ["--optimizer", "onebit-adm"], None, "onebit-adam"),
         ("scales", {}, ["--model", "gtp"], None, "gpt"),
         ("scales", {}, ["--scales", "tenser"], None, "tensor"),
         ("scales", {}, ["--schedule", "cosin"], None, "cosine"),
         ("12_pipeline", {}, ["--schedule", "1f1"], None, "1f1b"),
         ("14_vision_transformer", {}, ["--device", "cdua"], None, "cuda"),
         ("15_language_model", {}, ["--optimizer", "muo"], None, "muon"),
         ("07_slow_network", {}, ["--model", "bert-lrge"], None, "bert-large"),
         ("07_slow_network", {}, ["--optimizers", "fp32,onebit-lam"], None, "onebit-lamb"),
         ("07_slow_network", {}, ["--device", "cdua"], None, "cuda")]


def ask(folder, *command, **variables):
    return subprocess.run(command, cwd=folder, env={**os.environ, **variables}, capture_output=True, text=True,
                          timeout=120, check=False)


def helps(folder, program):
    done = ask(folder, program, "--help")
    good = done.returncode == 0 and "--help" in done.stdout and len(done.stdout) > 80 and not done.stderr
    return [] if good else [f"{program} --help: exit code {done.returncode}\n{done.stdout}{done.stderr}"]


def refuses(folder, name, program, arguments, words, **variables):
    done = ask(folder, program, *arguments, **variables)
    lines = done.stderr.splitlines()
    good = (done.returncode == 2 and len(lines) == 1 and lines[0].startswith(name + ": ") and not done.stdout
            and all(word in lines[0] for word in words))
    return [] if good else [f"{program} {' '.join(arguments)}: exit code {done.returncode}\n{done.stdout}{done.stderr}"]


def repeats(folder, program):
    every = ask(folder, program, "--help-all")
    printed = ask(folder, program, "--print-config")
    with tempfile.NamedTemporaryFile("w", suffix=".ini") as file:
        file.write(printed.stdout)
        file.flush()
        again = ask(folder, program, "--config", file.name, "--print-config")
    good = (every.returncode == 0 and "--print-config" in every.stdout and not every.stderr and printed.returncode == 0
            and printed.stdout.startswith("# ") and again.returncode == 0 and again.stdout == printed.stdout)
    # Every option is there, as a value or as a comment.
    options = set(re.findall(r"^  --([a-z0-9-]+)", every.stdout.split("All programs:")[0], re.M))
    there = set(re.findall(r"^(?:# )?([a-z0-9-]+) = ", printed.stdout, re.M))
    return [] if good and options == there else [
        f"{program} --print-config: {options ^ there}\n{printed.stdout}{again.stdout}{again.stderr}{every.stderr}"]


def check_names(folder, programs):
    wrong = []
    for name, variables, arguments, line, meant in NAMES if LONG else NAMES[::3]:
        program = next((program for program in programs if Path(program).name == name), None)
        if program is None:
            continue
        with tempfile.NamedTemporaryFile("w", suffix=".ini") as file:
            file.write(f"{line}\n")
            file.flush()
            config = [] if line is None else ["--config", file.name]
            wrong += refuses(folder, name, program, [*arguments, *config], [f"did you mean '{meant}'?"], **variables)
    return wrong


def check_set_up(folder, script, study):
    """The study runs with what the scripts that set up, build and test take from the environment."""
    root = Path(script).parents[1]
    taken = {name for path in (root / "cmake/bootstrap.sh", root / "tests/run.sh")
             for name in re.findall(r"^(?:#   |  )(PACER_[A-Z_]+)=", path.read_text(encoding="utf-8"), re.M)}
    done = ask(folder, study, "--print-config", **dict.fromkeys(taken, "1"))
    good = done.returncode == 0 and {"PACER_CUDA", "PACER_LIBTORCH", "PACER_VENV"} <= taken
    return [] if good else [f"{study} with {sorted(taken)} in the environment: {done.stderr}"]


def check_sources(folder, study):
    """Values of the study come from the command line, else from the environment, else from the file, and what is refused is
    named with its source."""
    wanted = {"layers = 4", "heads = 2", "width = 64", "quick = false", "fine-tune = true", "arms = fused-adamw,lora,qlora"}
    expected = "expected a whole number from 1 to 1000000000000000"
    with tempfile.NamedTemporaryFile("w", suffix=".ini") as good, tempfile.NamedTemporaryFile("w", suffix=".ini") as bad:
        good.write("layers = 6\nheads = 8\nwidth = 64\nfine-tune = yes\n")
        good.flush()
        bad.write("tokens = 3x\n")
        bad.flush()
        done = ask(folder, study, "--layers", "4", "--quick=false", "--config", good.name, "--print-config",
                   PACER_LAYERS="5", PACER_HEADS="2", PACER_QUICK="yes", PACER_WIDTH="")
        missing = wanted - set(done.stdout.splitlines())
        return [*([f"{study} has other values than {missing}: {done.stdout}{done.stderr}"] if missing else []),
                *refuses(folder, "convergence", study, [WORD], ["nonsense"]),
                *refuses(folder, "convergence", study, ["--tokens", "3x"], [f"--tokens 3x on the command line: {expected}"]),
                *refuses(folder, "convergence", study, [], [f"PACER_TOKENS=3x in the environment: {expected}"],
                         PACER_TOKENS="3x"),
                *refuses(folder, "convergence", study, ["--config", bad.name], [f"tokens = 3x in {bad.name}: {expected}"])]


def check_program(folder, program):
    name = Path(program).name
    return [*helps(folder, program),
            *([*repeats(folder, program), *refuses(folder, name, program, ["one", "two"], [])] if name in MANY or LONG else []),
            *refuses(folder, name, program, ["--hlep"], ["did you mean '--help'?"])]


def check_script(folder, script, study):
    name = "examples/run.sh"
    wrong = [*helps(folder, script),
             *refuses(folder, name, script, [WORD], ["nonsense"]),
             *refuses(folder, name, script, ["--quikc"], ["did you mean '--quick'?"]),
             *refuses(folder, name, script, ["--quick", "--tokns=3"], ["did you mean '--tokens'?"])]
    options = set(re.findall(r"^  (?:-h \[ )?--([a-z-]+)", ask(folder, study, "--help-all").stdout, re.M)) - {"help", "help-all"}
    # With --help behind them nothing is set up where the script knows them all.
    done = ask(folder, script, *(f"--{option}" for option in sorted(options)), "--help")
    return wrong if done.returncode == 0 and options else [*wrong, f"{script} does not know an option: {done.stderr}"]


def main(script, *programs):
    study = next(program for program in programs if Path(program).name == "convergence")
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as pool:
        found = [*pool.map(lambda program: check_program(folder, program), programs),
                 check_script(folder, script, study), check_names(folder, programs), check_set_up(folder, script, study),
                 check_sources(folder, study)]
        left = sorted(path.name for path in Path(folder).iterdir())
    wrong = [sentence for sentences in found for sentence in sentences]
    if left:
        wrong.append(f"files were left behind: {left}")
    if wrong:
        sys.exit("\n".join(wrong))
    print(f"{len(programs)} programs and {Path(script).name} answer --help and refuse what they do not know")


main(*sys.argv[1:])
