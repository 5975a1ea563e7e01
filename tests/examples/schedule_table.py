#!/usr/bin/env python3
"""pacer-schedule shows what schedules do: numbers against a restatement in Python, the page, drawings and refusals.

schedule_table.py PROGRAM PAGE

The restatement is written from the formulas in docs and papers. Every step of short runs is compared, from --csv. Half of
the effects and a sixth of the refusals are tried; with PACER_TEST_LONG=1 all.
"""
import csv
import itertools
import math
import os
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

BLOCK = re.compile(r"^```\n\$ pacer-schedule ([^\n]*)\n(.*?)^```", re.M | re.S)
LONG = os.environ.get("PACER_TEST_LONG") == "1"
SVG = "{http://www.w3.org/2000/svg}"


def ask(program, *arguments):
    return subprocess.run([program, *arguments], capture_output=True, text=True, timeout=60, check=False)


def ask_all(program, lines):
    """Two at a time: most of what a run takes is loading LibTorch."""
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda line: ask(program, *line.split()), lines))


def run_of(program, folder, *arguments):
    """What --csv says of each step, as numbers by column, and the lines of the summary by their first words."""
    path = Path(folder) / "run.csv"
    done = ask(program, *arguments, "--csv", str(path))
    if done.returncode != 0 or done.stderr:
        return [], {}
    with path.open(encoding="utf-8") as file:
        rows = [{name: float(value) for name, value in row.items()} for row in csv.DictReader(file)]
    return rows, {line[:22].strip(): line[22:] for line in done.stdout.partition("\n\n")[2].splitlines()}


# Rates: arguments behind --steps 100 --learning-rate 2, and the factor at step q.

def cosine(x, end=0.0):
    return end + (1 - end) * (1 + math.cos(math.pi * x)) / 2


def restarts(q):
    """The first cycle takes 20 steps behind 10 of warm-up, the next 40, and so on; each ends above 0.1."""
    q, cycle = q - 10, 20
    while q >= cycle:
        q, cycle = q - cycle, 2 * cycle
    return cosine(q / cycle, 0.1)


def one_cycle(q):
    return 0.04 + 0.96 * (1 - math.cos(math.pi * q / 29)) / 2 if q < 30 else cosine((q - 29) / 70, 4e-6)


def stable(down):
    """The last 40 of 100 steps go down to a fifth."""
    return lambda q: 0.2 + 0.8 * down(max(0.0, (q - 60) / 40))


RATES = [
    ("constant --warmup 8 --start-factor 0.5", lambda q: 0.5 + 0.5 * min(1, (q + 1) / 8)),
    ("linear", lambda q: 1 - q / 100),
    ("linear --decay-steps 30", lambda q: min(1, (100 - q) / 30)),
    ("cosine --warmup 10 --end-factor 0.1", lambda q: (q + 1) / 10 if q < 10 else cosine((q - 10) / 90, 0.1)),
    ("polynomial --power 2", lambda q: (1 - q / 100)**2),
    ("polynomial --end-factor 0.5", lambda q: 1 - q / 200),
    ("exponential --gamma 0.9", lambda q: 0.9**q),
    ("exponential --gamma 0.5 --every 7 --warmup 3", lambda q: (q + 1) / 3 if q < 3 else 0.5**((q - 3) // 7)),
    ("inverse-sqrt --warmup 16", lambda q: min((q + 1) / 16, 4 / math.sqrt(q + 1))),
    ("stable-decay --decay-steps 40 --end-factor 0.2", stable(lambda x: 1 - x)),
    ("stable-decay --decay-steps 40 --end-factor 0.2 --decay cosine", stable(cosine)),
    ("stable-decay --decay-steps 40 --end-factor 0.2 --decay polynomial --power 3", stable(lambda x: (1 - x)**3)),
    ("stable-decay --decay-steps 40 --end-factor 0.2 --decay minus-sqrt", stable(lambda x: 1 - math.sqrt(x))),
    ("stable-decay --decay-steps 40 --end-factor 0.2 --decay halving", stable(lambda x: 2**(1 - x) - 1)),
    ("cosine-restarts --warmup 10 --cycle-steps 20 --cycle-growth 2 --end-factor 0.1",
     lambda q: (q + 1) / 10 if q < 10 else restarts(q)),
    ("one-cycle --warmup 30", one_cycle),
    ("one-cycle --warmup 30 --decay linear --start-factor 0.1 --end-factor 0.2",
     lambda q: 0.1 + 0.9 * q / 29 if q < 30 else 1 - 0.8 * (q - 29) / 70)]


def check_rates(program, folder):
    for typed, factor in RATES:
        arguments = ["--steps", "100", "--learning-rate", "2", "--schedule", *typed.split()]
        rows, said = run_of(program, folder, *arguments)
        expected = [factor(q) for q in range(100)]
        off = [(row, rate) for q, (row, rate) in enumerate(zip(rows, expected))
               if row != {"step": q, "learning_rate": row.get("learning_rate")} or abs(row["learning_rate"] - 2 * rate) > 1e-12]
        if len(rows) != 100 or off:
            yield f"{typed}: {len(rows)} rows, {len(off)} of them wrong: {off[:2]}"
        if f"{sum(expected):.1f} % of the peak" not in said.get("mean rate", ""):
            yield f"{typed}: the mean is {sum(expected):.1f} %, not {said}"
        if said.get("above half the peak") != f"{sum(value > 0.5 for value in expected)} steps":
            yield f"{typed}: {sum(value > 0.5 for value in expected)} steps are above half of the peak, not {said}"
        # Tokens in proportion to steps change nothing.
        if not any(word in typed for word in ("warmup", "decay-steps", "exponential", "restarts")):
            by_tokens, _ = run_of(program, folder, *arguments, "--tokens-per-step", "512", "--by-tokens")
            if [row["learning_rate"] for row in by_tokens] != [row["learning_rate"] for row in rows]:
                yield f"{typed}: is another by tokens of equal steps"


def grown(position, ramp, first=64, last=256):
    return last if position >= ramp else max(first, (first + (last - first) * position // ramp) // 8 * 8)


def check_growth(program, folder):
    """Four micro-steps of two sequences of 256 tokens at full size: steps until 400,000 tokens are reached."""
    run = ["--tokens", "4e5", "--tokens-per-step", "2048", "--learning-rate", "2"]
    lengths = ["--length-first", "64", "--length-last", "256"]
    rate = ["--by-tokens", "--schedule", "stable-decay", "--decay-tokens", "1e5", "--warmup", "5"]
    for batch_by_tokens, length_by_tokens in itertools.product((False, True), repeat=2):
        bounds = (50_000, 150_000) if batch_by_tokens else (40, 90)
        ramp = 120_000 if length_by_tokens else 60
        arguments = [*run, *lengths, *rate, "--batch", f"4,{bounds[0]}:8,{bounds[1]}:6", "--length-ramp", str(ramp),
                     *(["--batch-by-tokens"] if batch_by_tokens else []),
                     *(["--length-by-tokens"] if length_by_tokens else [])]
        expected, tokens, ends = [], 0, {}
        while tokens < 400_000:
            step = len(expected)
            at = tokens if batch_by_tokens else step
            micro_steps = 4 if at < bounds[0] else 8 if at < bounds[1] else 6
            position = tokens if length_by_tokens else step
            for name, over in (("warm-up", step >= 5), ("batch", at >= bounds[1]), ("length", position >= ramp),
                               ("decay", tokens > 300_000)):
                if over:
                    ends.setdefault(name, f" at step {step:,}, token {tokens:,}")
            expected.append({"step": step, "tokens": tokens, "micro_steps": micro_steps, "length": grown(position, ramp),
                             "learning_rate": 2 * min(1, (step + 1) / 5) * min(1, (400_000 - tokens) / 100_000)})
            tokens += micro_steps * 2 * expected[-1]["length"]
        rows, said = run_of(program, folder, *arguments)
        same = len(rows) == len(expected) and all(
            set(row) == set(wanted) and all(abs(row[name] - wanted[name]) <= 1e-9 for name in wanted)
            for row, wanted in zip(rows, expected))
        if not same:
            wrong = [pair for pair in zip(rows, expected) if pair[0] != pair[1]][:2]
            yield f"{arguments}: {len(rows)} steps, not {len(expected)}, or {wrong}"
        if said.get("the run") != f"{len(expected)} steps, {tokens:,} tokens":
            yield f"{arguments}: {said.get('the run')}, not {len(expected)} steps, {tokens:,} tokens"
        late = [f"{name} {said.get(name)}" for name, end in ends.items() if not said.get(name, "").endswith(end)]
        if late or len(ends) != 4:
            yield f"{arguments}: {late}, not {ends}"
        sizes = [after["tokens"] - row["tokens"] for row, after in zip(expected, [*expected[1:], {"tokens": tokens}])]
        mean = sum(row["learning_rate"] / 2 * size for row, size in zip(expected, sizes)) / tokens
        above = sum(size for row, size in zip(expected, sizes) if row["learning_rate"] > 1)
        if f", {100 * mean:.1f} % over tokens" not in said.get("mean rate", ""):
            yield f"{arguments}: {100 * mean} % over tokens, not {said.get('mean rate')}"
        if f", {above:,} tokens" not in said.get("above half the peak", ""):
            yield f"{arguments}: {above} tokens above half of the peak, not {said.get('above half the peak')}"


def check_totals(program, folder):
    """What is by steps in a run of so many tokens takes the steps that there are, and the other way round."""
    for tokens in ("901", "1200"):
        by_steps, _ = run_of(program, folder, "--tokens", tokens, "--tokens-per-step", "300", "--schedule", "linear")
        if [row["learning_rate"] for row in by_steps] != [1, 0.75, 0.5, 0.25]:
            yield f"a line over the four steps that {tokens} tokens take is not {by_steps}"
    by_tokens, _ = run_of(program, folder, "--steps", "4", "--tokens-per-step", "300", "--schedule", "linear", "--by-tokens",
                         "--batch", "1,2:4")
    if [row["learning_rate"] for row in by_tokens] != [1, 0.9, 0.8, 0.4]:
        yield f"a line over 300, 300, 1,200 and 1,200 tokens is not {by_tokens}"
    _, late = run_of(program, folder, "--steps", "4", "--batch", "1,9:4", "--schedule", "constant", "--warmup", "5")
    if (late.get("batch"), late.get("warm-up")) != ("has its last change after this run", "ends after this run"):
        yield f"what is not reached is said: {late}"


def check_layers(program, folder):
    """Six layers, of which the deepest runs in 30 % of the steps in the end; half of the steps have a double batch."""
    arguments = ["--steps", "50", "--layers", "6", "--layer-drop-theta", "0.3", "--layer-drop-gamma", "0.1", "--batch", "2,25:4"]
    kept = [6 - 3.5 * 0.7 * (1 - math.exp(-0.1 * q)) for q in range(50)]
    rows, said = run_of(program, folder, *arguments)
    if len(rows) != 50 or any(abs(row["kept_layers"] - wanted) > 1e-12 for row, wanted in zip(rows, kept)):
        yield f"layers are {rows[:3]}, not {kept[:3]}"
    share = sum(value * (2 if q < 25 else 4) for q, value in enumerate(kept)) / (6 * 150)
    if said.get("layers") != f"compute {100 * share:.1f} % of what all of them would":
        yield f"layers compute {100 * share:.1f} %, not {said}"
    rule_of_thumb, _ = run_of(program, folder, "--steps", "50", "--layers", "1")
    if abs(rule_of_thumb[10]["kept_layers"] - 0.5 * (1 + math.exp(-20))) > 1e-12:
        yield f"theta falls by 100 / steps to a half, not as in {rule_of_thumb[10]}"


def check_long(program, folder):
    """Some 20 rows at round numbers and the last step; 2,000 points of a longer run."""
    table = ask(program, "--steps", "123456").stdout.partition("\n\n")[0].splitlines()
    steps = [int(line.split()[0].replace(",", "")) for line in table[1:]]
    if steps != [*range(0, 123456, 10_000), 123455]:
        yield f"the rows of 123,456 steps are {steps}"
    points, _ = run_of(program, folder, "--steps", "123456")
    if [row["step"] for row in points] != [*range(0, 123456, 62), 123455]:
        yield f"the points of 123,456 steps are {len(points)}"


def check_page(program, page):
    blocks = BLOCK.findall(page)
    if len(blocks) != 1:
        yield f"the page shows {len(blocks)} runs instead of 1"
    for arguments, lines in blocks:
        done = ask(program, *arguments.split())
        if done.returncode != 0 or done.stderr or not lines or lines != done.stdout:
            yield f"{arguments}: is not what the page shows\n{done.stdout}{done.stderr}"


def check_drawing(program, folder):
    everything = ["--tokens-per-step", "1024", "--batch", "2,100:4", "--length-first", "64", "--length-last", "128",
                  "--length-ramp", "200", "--layers", "4"]
    titles = {"step": "step", "tokens": "tokens", "rate": "learning rate", "batch": "micro-steps of a step",
              "length": "tokens of a sequence", "layers": "layers that run, on average"}
    for arguments, panels in (([], ["rate"]), (everything, ["tokens", "rate", "batch", "length", "layers"]),
                              ([*everything, "--over-tokens"], ["step", "rate", "batch", "length", "layers"])):
        path = Path(folder) / "run.svg"
        done = ask(program, "--steps", "1000", *arguments, "--svg", str(path))
        if done.returncode != 0:
            yield f"{arguments}: exit code {done.returncode}\n{done.stderr}"
            continue
        root = xml.etree.ElementTree.parse(path).getroot()
        shown = [text.text for text in root.findall(f"{SVG}text") if text.get("class") == "title"]
        lines = [[tuple(map(float, point.split(","))) for point in line.get("points").split()]
                 for line in root.findall(f"{SVG}polyline")]
        if shown != [titles[panel] for panel in panels] or [len(line) for line in lines] != [1000] * len(panels):
            yield f"{arguments}: panels are {shown} of {[len(line) for line in lines]} points, not {panels}"
        dots = root.findall(f"{SVG}circle")
        if len(dots) != len(panels) * 21 or not all(dot.find(f"{SVG}title").text for dot in dots):
            yield f"{arguments}: {len(dots)} dots, not 21 for each of {panels}"
        # From left to right, below its title and above the next one; the rate falls, which is down.
        for i, line in enumerate(lines):
            xs, ys = zip(*line)
            if list(xs) != sorted(xs) or (min(xs), max(xs)) != (74, 740) or min(ys) < 24 + 176 * i or max(ys) > 144 + 176 * i:
                yield f"{arguments}: panel {i} reaches from {min(xs)}, {min(ys)} to {max(xs)}, {max(ys)}"
        rate = lines[panels.index("rate")]
        if not rate[0][1] < rate[500][1] < rate[-1][1]:
            yield f"{arguments}: a rate that falls is drawn as {rate[:2]} ... {rate[-1]}"
        if "--batch" in arguments and "--over-tokens" not in arguments:
            heights = [y for _, y in lines[panels.index("batch")]]
            if heights[99] - heights[100] != 60 or len(set(heights)) != 2:
                yield f"a batch that doubles at step 100 is drawn as {sorted(set(heights))}"
        if path.with_name("run.svg.new").exists():
            yield "the drawing left its unfinished file"


# Every option but files and names of runs changes what is printed, or is refused: (a run, the option).
EFFECTS = [("", "--learning-rate 2"), ("", "--schedule linear"), ("", "--warmup 5"), ("--warmup 5", "--start-factor 0.5"),
           ("", "--end-factor 0.5"), ("--tokens-per-step 8 --batch 1,50:2", "--by-tokens"), ("", "--decay-steps 20"),
           ("--by-tokens --tokens-per-step 8", "--decay-tokens 80"),
           ("--schedule stable-decay --decay-steps 50", "--decay halving"), ("--schedule polynomial", "--power 2"),
           ("--schedule exponential --gamma 0.9", "--every 5"), ("--schedule cosine-restarts --cycle-steps 9", "--cycle-growth 2"),
           ("", "--tokens-per-step 8"), ("", "--batch 1,50:2"), ("--tokens-per-step 8 --batch 1,50:2", "--batch-by-tokens"),
           ("", "--length-first 8 --length-last 32 --length-ramp 50"),
           ("--tokens-per-step 32 --length-first 8 --length-last 32 --length-ramp 50", "--length-by-tokens"),
           ("", "--layers 4"), ("--layers 4", "--layer-drop-theta 0.3"), ("--layers 4", "--layer-drop-gamma 0.01")]


def check_effects(program):
    tried = set(re.findall(r"--([a-z-]+)", " ".join(f"{run} {option}" for run, option in EFFECTS)))
    chosen = EFFECTS if LONG else EFFECTS[::2]
    runs = sorted({run for run, _ in chosen})
    answers = ask_all(program, [f"--steps 100 {run}" for run in runs] + [f"--steps 100 {run} {option}" for run, option in chosen])
    alone = dict(zip(runs, answers))
    for (run, option), after in zip(chosen, answers[len(runs):]):
        before = alone[run]
        if before.returncode != 0 or after.returncode != 0 or before.stdout == after.stdout:
            yield f"{option} changes nothing beside '{run}': {before.stderr}{after.stderr}"
    options = set(re.findall(r"^  --([a-z-]+)", ask(program, "--help").stdout, re.M))
    if options - tried != {"steps", "tokens", "svg", "csv", "over-tokens"}:
        yield f"no test tries {sorted(options - tried)}"


# Exit code, what the sentence says, arguments.
REFUSALS = [
    (2, "say how long the run is: --steps, or --tokens and --tokens-per-step", ""),
    (2, "--steps and --tokens both say how long", "--steps 9 --tokens 9 --tokens-per-step 1"),
    (2, "--steps must be a whole number from 1 to 10000000, not 0", "--steps 0"),
    (2, "--steps must be a whole number from 1 to 10000000, not 2.5", "--steps 2.5"),
    (2, "--steps must be a whole number from 1 to 10000000, not nan", "--steps nan"),
    (2, "after 10000000 steps only 10000000 of 1000000000000 tokens", "--tokens 1e12 --tokens-per-step 1"),
    (2, "step 10000 goes beyond 1000000000000000 tokens", "--steps 1e6 --tokens-per-step 1e11"),
    *((2, f"--{name} counts tokens; give --tokens-per-step beside it", f"{run} --{name} {value}")
      for name, value, run in (("tokens", "9", ""), ("by-tokens", "", "--steps 9"), ("batch-by-tokens", "", "--steps 9 --batch 1,2:3"),
                               ("over-tokens", "", "--steps 9 --svg x"),
                               ("length-by-tokens", "", "--steps 9 --length-first 1 --length-last 2 --length-ramp 3"))),
    (2, "--over-tokens belongs to a drawing; give --svg", "--steps 9 --tokens-per-step 1 --over-tokens"),
    (2, "--batch-by-tokens belongs to a batch that changes; give --batch", "--steps 9 --tokens-per-step 1 --batch-by-tokens"),
    (2, "--length-last belongs to a length that grows; give --length-first", "--steps 9 --length-last 9"),
    (2, "--length-ramp belongs to a length that grows; give --length-first", "--steps 9 --length-ramp 9"),
    (2, "--length-by-tokens belongs to a length that grows; give --length-first", "--steps 9 --tokens-per-step 1 --length-by-tokens"),
    (2, "--length-first belongs to a length that grows; give --length-last", "--steps 9 --length-first 9"),
    (2, "--length-first belongs to a length that grows; give --length-ramp", "--steps 9 --length-first 8 --length-last 9"),
    (2, "must not exceed the last one (8); swap them", "--steps 9 --length-first 9 --length-last 8 --length-ramp 5"),
    (2, "--layer-drop-theta belongs to layers that are dropped; give --layers", "--steps 9 --layer-drop-theta 0.5"),
    (2, "--layer-drop-gamma belongs to layers that are dropped; give --layers", "--steps 9 --layer-drop-gamma 0.5"),
    (2, "theta_bar of layer dropping must be in (0, 1], not 2", "--steps 9 --layers 2 --layer-drop-theta 2"),
    (2, "--start-factor is where the warm-up begins; give --warmup", "--steps 9 --start-factor 0.5"),
    (2, "--learning-rate must be positive and finite, not 0", "--steps 9 --learning-rate 0"),
    (2, "--by-tokens is not for --schedule one-cycle", "--steps 9 --tokens-per-step 1 --schedule one-cycle --warmup 2 --by-tokens"),
    (2, "--decay is not for --schedule cosine", "--steps 9 --decay linear"),
    (2, "--decay-tokens: the decay follows steps; give --decay-steps", "--steps 9 --decay-tokens 5"),
    (2, "--decay-steps: the decay follows tokens; give --decay-tokens", "--steps 9 --tokens-per-step 1 --by-tokens --decay-steps 5"),
    (2, "--schedule stable-decay: warmup_stable_decay needs decay_steps", "--steps 9 --schedule stable-decay"),
    (2, "the warm-up takes 20 steps, but total_steps, which counts them, is 9", "--steps 9 --warmup 20"),
    *((2, f"--schedule {schedule}: ", f"--steps 9 --schedule {schedule} {option}")
      for schedule, option in (("constant", "--end-factor 0.1"), ("constant", "--decay-steps 5"), ("cosine", "--power 2"),
                               ("linear", "--gamma 0.5"), ("linear", "--every 2"), ("linear", "--cycle-steps 2"),
                               ("linear", "--cycle-growth 2"), ("exponential", ""), ("cosine-restarts", ""), ("one-cycle", ""),
                               ("inverse-sqrt", "--decay-tokens 5"), ("one-cycle", "--warmup 2 --decay halving"))),
    (2, "--batch 4 does not say where the batch changes", "--steps 9 --batch 4"),
    (2, "--batch 4,10: '10' is not PROGRESS:MICRO-STEPS", "--steps 9 --batch 4,10"),
    (2, "--batch 4,x:3: 'x' is no number", "--steps 9 --batch 4,x:3"),
    (2, "--batch 4,5:3k: '3k' is no number", "--steps 9 --batch 4,5:3k"),
    (2, "--batch: the number of micro-steps must be a whole number from 1 to 16777215, not 0", "--steps 9 --batch 0,5:3"),
    (2, "--batch: where the batch changes must be a whole number from 1 to 10000000, not 1e+08", "--steps 9 --batch 4,1e8:3"),
    (2, "boundaries begin at 1 or later and increase, but 4 follows 5", "--steps 9 --batch 4,5:3,4:2"),
    (2, "--tokens-per-step must be a multiple of 4, the micro-steps at first, not 10", "--steps 9 --tokens-per-step 10 --batch 4,2:8"),
    *((2, f"--tokens-per-step must be a multiple of {unit} of a sequence in the end, not 100",
       f"--steps 9 --tokens-per-step 100 --length-first 8 --length-last 64 --length-ramp 5 {batch}")
      for unit, batch in (("64, the tokens", ""), ("256, the micro-steps at first times the tokens", "--batch 4,2:8"))),
    (1, "cannot write", "--steps 9 --svg missing/run.svg"),
    (1, "cannot write", "--steps 9 --csv missing/run.csv")]


def check_refusals(program):
    chosen = REFUSALS if LONG else REFUSALS[::6]
    for (code, part, arguments), done in zip(chosen, ask_all(program, [arguments for _, _, arguments in chosen])):
        if done.returncode != code or part not in done.stderr or len(done.stderr.splitlines()) != 1 or (code == 2 and done.stdout):
            yield f"{arguments}: exit code {done.returncode}, {done.stderr}, not '{part}'"


def main(program, page):
    program, text = str(Path(program).resolve()), Path(page).read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder:
        wrong = [*check_rates(program, folder), *check_growth(program, folder), *check_totals(program, folder),
                 *check_layers(program, folder), *check_long(program, folder), *check_page(program, text),
                 *check_drawing(program, folder), *check_effects(program), *check_refusals(program)]
    if wrong:
        sys.exit("\n".join(wrong))
    print(f"{len(RATES)} schedules, batches, lengths and layers are as computed; mistakes are refused")


main(*sys.argv[1:])
