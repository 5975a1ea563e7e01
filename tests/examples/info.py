#!/usr/bin/env python3
"""pacer-info without a GPU, as JSON, under launchers' variables, good and bad; and its list beside the public headers.

info.py PROGRAM SOURCE_FOLDER

The list must name exactly the optimizers, hooks (in the slots their headers say) and schedules that pacer declares.
"""
import json
import os
import re
import subprocess
import sys
from pathlib import Path

LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_", "OMPI_", "PMI_", "SLURM_", "MASTER_", "GROUP_", "TORCHELASTIC_")


def ask(program, *arguments, **variables):
    environment = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
    done = subprocess.run([program, *arguments], env={**environment, **variables}, capture_output=True, text=True,
                          timeout=120, check=False)
    assert done.returncode == 0 and not done.stderr, done
    return done.stdout


def declared(source):
    """Names of optimizers, {hook: slot}, names of schedules."""
    folders = ("hooks", "schedulers", "metrics", "parallel", "checkpoints", "session")
    headers = {path.stem: path.read_text() for folder in folders for path in source.glob(f"{folder}/*.h")}
    private = {path.stem: path.read_text() for folder in folders for path in source.glob(f"{folder}/detail/*_hook.h")}
    # Optimizers derive from a base with options, or from FusedOptimizer where they are no base themselves.
    text = "".join(path.read_text() for path in source.glob("optimizers/*.h"))
    optimizers = re.findall(r"^class (\w+) : public (?:Fused|OneBit)OptimizerOf<", text, re.M)
    optimizers += [name for name in re.findall(r"^class (\w+) : public FusedOptimizer \{", text, re.M)
                   if not re.search(rf": public {name}\b", text)]
    hooks = {}
    for text in [*headers.values(), *private.values()]:
        for name, base in re.findall(r"^class (\w+) : public (Hook|ParallelTraining|GradientExchange)\b", text, re.M):
            slot = re.search(r"Slot slot\(\) const override \{ return Slot::(\w+); \}", text)
            # A handle such as LayerDrop has its hook in detail/, named after it.
            hooks[name.removesuffix("Hook")] = slot[1] if base == "Hook" else "reduce"
    # A handle that is another one in another order, such as LengthBuckets, has its hook.
    for name, base in re.findall(r"^class (\w+) : public (\w+Sampler)\b", "".join(headers.values()), re.M):
        hooks[name] = hooks[base]
    del hooks["ParallelTraining"], hooks["GradientExchange"]
    schedules = re.findall(r"^LearningRateSchedule (\w+)\(", headers["learning_rate_schedule"], re.M)
    return set(optimizers), hooks, set(schedules)


def main(program, source):
    facts = json.loads(ask(program, "--json"))
    assert set(facts) == {"pacer", "GPU", "CPU", "Back-ends", "Launch environment", "Folders"}, facts
    assert re.fullmatch(r"\d+\.\d+\.\d+", facts["pacer"]["version"]), facts
    assert "libtorch" in facts["pacer"]["LibTorch's place"], facts
    assert int(facts["CPU"]["cores"]) >= 1
    nccl = facts["Back-ends"]["NCCL (GPUs)"]
    assert nccl == "available" or (nccl.startswith("missing: ") and ";" in nccl), nccl
    text = ask(program)
    for section, entries in facts.items():
        assert section in text and all(name in text for name in entries), section

    launched = json.loads(ask(program, "--json", RANK="1", WORLD_SIZE="2", LOCAL_RANK="1", LOCAL_WORLD_SIZE="2",
                              MASTER_ADDR="127.0.0.1", MASTER_PORT="29500"))["Launch environment"]
    assert (launched["launcher"], launched["rank"], launched["world size"]) == ("torchrun", "1", "2"), launched
    broken = json.loads(ask(program, "--json", RANK="5", WORLD_SIZE="2", LOCAL_RANK="1", LOCAL_WORLD_SIZE="2",
                            MASTER_ADDR="127.0.0.1", MASTER_PORT="29500"))["Launch environment"]
    assert broken["launcher"].startswith("cannot be understood: "), broken
    folders = json.loads(ask(program, "--json", TMPDIR="/nowhere"))["Folders"]
    assert folders["temporary"] == "/nowhere, not there", folders

    optimizers, hooks, schedules = declared(Path(source))
    assert len(optimizers) > 3 and len(hooks) > 10 and len(schedules) > 3
    parts = [re.findall(r"^  (\w+) +(\w+)", part, re.M) for part in ask(program, "--list").split("\n\n")]
    assert {name for name, _ in parts[0]} == optimizers, (parts[0], optimizers)
    assert dict(parts[1]) == hooks, (dict(parts[1]), hooks)
    assert {name for name, _ in parts[2]} == schedules, (parts[2], schedules)
    print(f"pacer-info: {sum(map(len, facts.values()))} facts, {sum(map(len, parts))} parts")


main(*sys.argv[1:])
