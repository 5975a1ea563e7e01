#!/usr/bin/env python3
"""The convergence study with one and two processes, and a study that is killed and resumed.

study_processes.py compare CONVERGENCE   two processes have the losses of one, up to the order of sums
study_processes.py resume CONVERGENCE    a study that was killed again and again has the losses of one that was not
study_processes.py fine_tune CONVERGENCE arms with adapters go on from one base, also after kills and with two processes
study_processes.py config CONVERGENCE    what --print-config writes has the losses of the options it was made from; and
                                         --resume in a folder that nobody wrote to says so and begins anew

All train a model of the smallest size for some dozens of steps.
"""
import json
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SMALL = ["--layers", "2", "--width", "32", "--heads", "2", "--sequence", "32", "--batch", "4", "--data-limit", "200k",
         "--validation-sequences", "10", "--device", "cpu"]
# Three batches validate: one of two ranks has none in the second round, and shards gather parameters all the same.
ARMS = ["adamw", "fused-adamw", "lamb", "curriculum", "layer-drop", "shards-blocks", "recompute"]
# Sums over ranks round otherwise than sums in one batch. What that comes to in 30 steps; measured: 1e-6.
TOLERANCE = 2e-5
KILLS = 5


def command(program, folder, processes, arms, *more):
    chosen = ["--processes", str(processes), "--arms", ",".join(arms), "--output", str(folder)]
    return [program, *SMALL, *chosen, *more]


def points(folder, arm):
    """The events of a run, as (event, tokens, loss) and the number of bytes sent."""
    lines = (folder / f"{arm}-seed-1" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    events = [json.loads(line) for line in lines]
    if events[-1]["event"] != "end":
        sys.exit(f"{folder}: the run of {arm} has no end")
    return [(event["event"], event["tokens"], event["loss"]) for event in events], events[-1]["bytes_sent"]


def memory(folder, arm):
    """Bytes of tensors at the peak of each step, as the run's points have them."""
    lines = (folder / f"{arm}-seed-1" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [event["memory_bytes"] for event in map(json.loads, lines) if event["event"] == "training"]


def check(done, what):
    if done.returncode != 0:
        sys.exit(f"{what} ended with {done.returncode}:\n{done.stdout}{done.stderr}")


def config(program):
    with tempfile.TemporaryDirectory() as root:
        folders, arms = [Path(root) / name for name in ("options", "file")], ["fused-adamw", "curriculum"]
        options = command(program, folders[0], 1, arms, "--tokens", "1280", "--learning-rate", "0.0017", "--seeds", "1")
        check(subprocess.run(options, capture_output=True, text=True, timeout=300, check=False), "the study by options")
        printed = subprocess.run([*options, "--print-config"], capture_output=True, text=True, timeout=60, check=False)
        check(printed, "--print-config")
        file = Path(root) / "study.ini"
        file.write_text(printed.stdout, encoding="utf-8")
        again = [program, "--config", str(file), "--output", str(folders[1])]
        check(subprocess.run(again, capture_output=True, text=True, timeout=300, check=False), "the study by --config")
        for arm in arms:
            if points(folders[0], arm) != points(folders[1], arm):
                sys.exit(f"{arm} has other losses by --config than by the options it was made from")
    resume_in_a_new_folder(program)
    print("a study by --config has the losses of its options")


def resume_in_a_new_folder(program):
    """A name that was mistyped: one line says that there is nothing in that folder, and the run begins at step 0."""
    with tempfile.TemporaryDirectory() as root:
        folder, arm = Path(root) / "typo", "fused-adamw"
        done = subprocess.run(command(program, folder, 1, [arm], "--tokens", "1280", "--resume"), capture_output=True,
                              text=True, timeout=300, check=False)
        check(done, "a study that is resumed in a new folder")
        said = [line for line in done.stderr.splitlines() if str(folder) in line]
        if len(said) != 1 or "there is no checkpoint in" not in said[0] or "begins at step 0" not in said[0]:
            sys.exit(f"--resume in a new folder said of it: {said}, and in all: {done.stderr}")
        if points(folder, arm)[0][0][:2] != ("validation", 0):
            sys.exit(f"a run in a new folder begins with {points(folder, arm)[0][0]}")


def compare(program):
    with tempfile.TemporaryDirectory() as root:
        folders = [Path(root) / str(processes) for processes in (1, 2)]
        tables = []
        for processes, folder in zip((1, 2), folders):
            done = subprocess.run(command(program, folder, processes, ARMS, "--tokens", "3840"), capture_output=True,
                                  text=True, timeout=300, check=False)
            check(done, f"the study with {processes} processes")
            tables.append(done.stdout)
        if "sent per rank" in tables[0] or "sent per rank" not in tables[1]:
            sys.exit(f"the table with two processes has no bytes, or that with one has:\n{tables[0]}{tables[1]}")
        worst = 0.0
        for arm in ARMS:
            (one, nothing), (two, sent) = points(folders[0], arm), points(folders[1], arm)
            if [point[:2] for point in one] != [point[:2] for point in two]:
                sys.exit(f"{arm}: other points with two processes than with one")
            # Each step sends all gradients once: twice half of 4 bytes a parameter.
            if nothing != 0 or sent < 20_000 * 4 * 30:
                sys.exit(f"{arm}: {nothing} bytes sent by one process, {sent} by each of two")
            worst = max([worst, *(abs(a[2] - b[2]) for a, b in zip(one, two))])
            if one[0][2] != two[0][2]:
                sys.exit(f"{arm}: the loss before training differs, {one[0][2]} and {two[0][2]}")
        if not worst <= TOLERANCE:
            sys.exit(f"losses differ by up to {worst}")
        # Weights, gradients and two moments in fp32 are 16 bytes a parameter; activations, which recomputing saves, come on top.
        kept, recomputed = max(memory(folders[0], "fused-adamw")), max(memory(folders[0], "recompute"))
        if not 27_000 * 16 < recomputed < 0.95 * kept < 5e6:
            sys.exit(f"recompute takes {recomputed} bytes, fused-adamw {kept}")
        compare_with_rings(program, Path(root) / "onebit")
        report_tensors(program, Path(root) / "nodes")
        compare_with_pipeline(program, Path(root) / "pipeline")
        print(f"{len(ARMS)} arms: losses of one and two processes differ by at most {worst:.1e}")


def compare_with_pipeline(program, folder):
    """Two ranks that share out the layers have the losses of two that share out the batch, step by step."""
    arms = ["fused-adamw", "pipeline"]
    done = subprocess.run(command(program, folder, 2, arms, "--tokens", "3840"), capture_output=True, text=True,
                          timeout=300, check=False)
    check(done, "the study of a pipeline with 2 processes")
    (shared, _), (piped, sent) = (points(folder, arm) for arm in arms)
    if [point[:2] for point in shared] != [point[:2] for point in piped]:
        sys.exit("pipeline: other points than fused-adamw")
    worst = max(abs(a[2] - b[2]) for a, b in zip(shared, piped))
    # Activations and their gradients: 128 rows of 32 numbers in each of 30 steps, from each rank.
    if not worst <= TOLERANCE or sent < 30 * 128 * 32 * 4:
        sys.exit(f"pipeline: losses differ by up to {worst}, {sent} bytes sent")
    done = subprocess.run(command(program, folder, 4, ["pipeline"]), capture_output=True, text=True,
                          timeout=300, check=False)
    if done.returncode != 2 or "needs a layer for each rank, but there are 2 layers and 4 ranks" not in done.stderr:
        sys.exit(f"a pipeline of 4 ranks and 2 layers ended with {done.returncode}: {done.stderr}")


def report_tensors(program, folder):
    """Two nodes of two: the report tells what 1-bit LAMB did with each tensor, also where a finished run is read back."""
    arm, reports = "onebit-lamb-nodes", []
    for more in ([], ["--resume"]):
        done = subprocess.run(command(program, folder, 4, [arm], "--tokens", "3840", "--ranks-per-node", "2", *more),
                              capture_output=True, text=True, timeout=300, check=False)
        check(done, f"the study of {arm} {more}")
        rows = re.findall(r"<tr><td>([\w.]+)</td><td>(\d+)</td><td>([\d.]+)</td><td>([\d.]+)</td><td>([\d.]+)</td></tr>",
                          (folder / "report.html").read_text(encoding="utf-8"))
        reports.append(rows)
    adapted = [row for row in reports[0] if float(row[2]) != 1]
    if len(reports[0]) < 10 or not adapted or reports[0] != reports[1]:
        sys.exit(f"the report of {arm} tells nothing of tensors, or something else when it is read back: {reports}")
    done = subprocess.run(command(program, folder, 4, [arm], "--ranks-per-node", "3"), capture_output=True, text=True,
                          timeout=300, check=False)
    if done.returncode != 2 or "4 processes cannot be nodes of 3 each" not in done.stderr:
        sys.exit(f"nodes of 3 among 4 ended with {done.returncode}: {done.stderr}")


def compare_with_rings(program, folder):
    """What averages gradients in fp32 sends what a ring does; 1-bit Adam freezes where it was told to, and sends less."""
    done = subprocess.run(command(program, folder, 2, ["fused-adamw", "onebit-adam"], "--tokens", "3840"),
                          capture_output=True, text=True, timeout=300, check=False)
    check(done, "the study of 1-bit Adam with 2 processes")
    table = done.stdout[done.stdout.index("froze after"):]
    cells = {name: re.split(r"  +", line) for name in ("fused-adamw", "onebit-adam")
             for line in table.splitlines() if re.match(name + r" .* \d+\.\d+$", line)}
    (*_, frozen, _, fp32, bf16), (*_, onebit_frozen, _, onebit_fp32, onebit_bf16) = cells.values()
    # Padding, losses and what ranks tell each other are a few percent of so small a model's gradients.
    if frozen != "-" or not 0.9 < float(fp32) <= 1 or not 0.45 < float(bf16) <= 0.5:
        sys.exit(f"fused-adamw: frozen {frozen}, rings send {fp32} and {bf16} times as much:\n{table}")
    # 30 steps, of which 6 are the warm-up and 24 send signs: 30 / (6 + 24 / 32), less the same, and biases and norms as they are.
    if onebit_frozen != "step 6" or not 3.3 < float(onebit_fp32) < 4.45 or not 1.65 < float(onebit_bf16) < 2.23:
        sys.exit(f"onebit-adam: {onebit_frozen}, rings send {onebit_fp32} and {onebit_bf16} times as much:\n{table}")


def kill_after(process, wanted, seen):
    """Kills the study, and with it its ranks, a moment after so many validations that were not shown before."""
    for line in process.stdout:
        if "validation" in line and line not in seen:
            seen.add(line)
            wanted -= 1
        if wanted == 0:
            time.sleep(random.uniform(0, 0.05))
            break
    process.send_signal(signal.SIGKILL)
    process.wait()
    return process.returncode == -signal.SIGKILL


def resume(program):
    random.seed(7)
    # The last one measures in its warm-up what it clips by later.
    arms = ["fused-adamw", "layer-drop", "pipeline", "onebit-adam-clip-ratio"]
    often = ["--tokens", "15k", "--checkpoint-every", "7", "--evaluate-every", "1k"]
    for processes in (1, 2):
        with tempfile.TemporaryDirectory() as root:
            whole, killed = Path(root) / "whole", Path(root) / "killed"
            done = subprocess.run(command(program, whole, processes, arms, *often), capture_output=True, text=True,
                                  timeout=300, check=False)
            check(done, "the study that was not killed")
            kills, seen, errors = 0, set(), ""
            while True:
                arguments = command(program, killed, processes, arms, *often, *(["--resume"] if kills else []))
                with open(Path(root) / "errors", "w+", encoding="utf-8") as file:
                    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=file, text=True) as process:
                        ended = kills == KILLS or not kill_after(process, random.randint(2, 6), seen)
                        process.stdout.read()
                    file.seek(0)
                    errors += file.read()
                if ended:
                    break
                kills += 1
            if process.returncode != 0:
                sys.exit(f"with {processes} processes, the last part ended with {process.returncode}:\n{errors}")
            resumed = len(re.findall("resumed from", errors))
            if kills < 3 or resumed < 2:
                sys.exit(f"only {kills} kills and {resumed} resumed runs: the test shows nothing")
            for arm in arms:
                if points(whole, arm)[0] != points(killed, arm)[0]:
                    sys.exit(f"{arm}: with {processes} processes, other losses after {kills} kills than without")
            refuse_other_processes(program, killed, arms, often, processes)
            print(f"{processes} processes: every loss is the same to the bit after {kills} kills, {resumed} runs resumed")


def resumed_losses(program, root, whole, arguments):
    """Kills and resumes a fine-tuning study until it ends; its runs must have the losses of the whole one."""
    killed, kills, seen, errors = root / "killed", 0, set(), ""
    while True:
        more = ["--output", str(killed), *(["--resume"] if kills else [])]
        with open(root / "errors", "w+", encoding="utf-8") as file:
            with subprocess.Popen([program, *arguments, *more], stdout=subprocess.PIPE, stderr=file,
                                  text=True) as process:
                ended = kills == KILLS or not kill_after(process, random.randint(4, 9), seen)
                process.stdout.read()
            file.seek(0)
            errors += file.read()
        if ended:
            break
        kills += 1
    if process.returncode != 0 or kills < 3 or "resumed from" not in errors:
        sys.exit(f"a fine-tuning study ended with {process.returncode} after {kills} kills:\n{errors}")
    for name in ("base", *TUNED):
        if points(whole, name)[0] != points(killed, name)[0]:
            sys.exit(f"{name}: other losses after {kills} kills than without")
    return kills


TUNED = ["fused-adamw", "fused-layers", "lora", "qlora"]


def fine_tune(program):
    random.seed(11)
    arguments = [*SMALL, "--fine-tune", "--arms", ",".join(TUNED), "--tokens", "8k", "--fine-tune-tokens", "4k",
                 "--fine-tune-rate", "1e-3", "--lora-rank", "4", "--checkpoint-every", "7", "--evaluate-every", "1k"]
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        tables = []
        for processes in (1, 2):
            folder = root / str(processes)
            done = subprocess.run([program, *arguments, "--processes", str(processes), "--output", str(folder)],
                                  capture_output=True, text=True, timeout=300, check=False)
            check(done, f"the fine-tuning study with {processes} processes")
            tables.append(done.stdout[done.stdout.index("trained parameters"):])
        worst = check_fine_tuning(root / "1", root / "2", tables[0])
        kills = resumed_losses(program, root, root / "1", arguments)
    for wrong, words in ((["--arms", "qlora"], "add --fine-tune"),
                         (["--fine-tune", "--lora-rank", "99"], "lower lora-rank"),
                         (["--fine-tune", "--fine-tune-tokens", "50"], "raise fine-tune-tokens"),
                         (["--fine-tune", "--fine-tune-data", "/nowhere"], "no file or folder /nowhere")):
        done = subprocess.run([program, *SMALL, *wrong], capture_output=True, text=True, timeout=60, check=False)
        if done.returncode != 2 or words not in done.stderr:
            sys.exit(f"{wrong} ended with {done.returncode}: {done.stderr}")
    print(f"{len(TUNED)} arms go on from one base; two processes differ by {worst:.1e}, {kills} kills by nothing")


def check_fine_tuning(one, two, table):
    worst, first, last = 0.0, {}, {}
    for name in ("base", *TUNED):
        alone, shared = points(one, name)[0], points(two, name)[0]
        worst = max([worst, *(abs(a[2] - b[2]) for a, b in zip(alone, shared))])
        losses = [loss for event, _, loss in alone if event == "validation"]
        first[name], last[name] = losses[0], losses[-1]
        if losses[-1] >= losses[0]:
            sys.exit(f"{name} learned nothing: {losses}")
    if not worst <= TOLERANCE:
        sys.exit(f"losses of a fine-tuning study differ by up to {worst} between one process and two")
    # Fresh adapters change nothing but the order of sums, 4 bits change a little; the base was another run, on another text.
    if not abs(first["lora"] - first["fused-adamw"]) < TOLERANCE < abs(first["qlora"] - first["lora"]) < 0.05:
        sys.exit(f"arms do not begin with what the base has: {first}")
    if first["lora"] == last["base"] or first["base"] < first["lora"]:
        sys.exit(f"the base was not trained, or on the second text: {first}, {last}")
    # Two blocks of four matrices each, whose adapters have rank (in + out) elements.
    width, rank = 32, 4
    adapters = 2 * rank * ((width + 3 * width) + 2 * width + 2 * (width + 4 * width))
    rows = [line.split() for line in table.split("\n\n")[0].splitlines()]
    cells = {row[0]: row for row in rows if row[0] in TUNED}
    if cells["lora"][1] != f"{adapters:,}" or cells["qlora"][1] != f"{adapters:,}":
        sys.exit(f"{adapters} parameters of adapters were expected:\n{table}")
    if cells["qlora"][2:4] != [f"{first['qlora']:.4f}", f"{last['qlora']:.4f}"]:
        sys.exit(f"the table does not say what the run of qlora has, {first['qlora']} and {last['qlora']}:\n{table}")
    return worst


def refuse_other_processes(program, folder, arms, often, processes):
    other = 3 - processes
    done = subprocess.run(command(program, folder, other, arms, *often, "--resume"), capture_output=True, text=True,
                          timeout=60, check=False)
    if done.returncode != 2 or f"processes = {processes}, not {other}" not in done.stderr:
        sys.exit(f"--resume with {other} processes ended with {done.returncode}: {done.stderr}")


{"compare": compare, "config": config, "resume": resume, "fine_tune": fine_tune}[sys.argv[1]](sys.argv[2])
