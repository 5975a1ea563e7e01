#!/usr/bin/env python3
"""pacer-pipeline prints the plans that docs/pipeline.md shows, draws them, and refuses what cannot be.

pipeline_plans.py PROGRAM PAGE
"""
import os
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree
from pathlib import Path

BLOCK = re.compile(r"^```\n\$ pacer-pipeline ([^\n]*)\n(.*?)^```", re.M | re.S)
SVG = "{http://www.w3.org/2000/svg}"
ORDER = ["gpipe", "1f1b", "interleaved", "zero-bubble"]


def ask(program, *arguments):
    return subprocess.run([program, *arguments], capture_output=True, text=True, timeout=60, check=False)


def check_page(program, page):
    blocks = BLOCK.findall(page)
    if len(blocks) != len(ORDER):
        yield f"the page shows {len(blocks)} plans instead of {len(ORDER)}"
    for arguments, lines in blocks:
        done = ask(program, *arguments.split())
        if done.returncode != 0 or done.stderr or lines not in done.stdout:
            yield f"{arguments}: is not what the page shows\n{done.stdout}{done.stderr}"


def check_table(program, page):
    """The table of simulated shares: ranks, micro-batches, then one cell a schedule. A third of it; with PACER_TEST_LONG=1 all."""
    rows = re.findall(r"^\| (\d+) \| (\d+) \|(.*)\|$", page, re.M)
    if len(rows) < 5:
        yield f"the page's table of idle shares has {len(rows)} rows"
    for stages, micro_batches, cells in rows if os.environ.get("PACER_TEST_LONG") else rows[::3]:
        for schedule, cell in zip(ORDER, cells.split("|")):
            done = ask(program, "--schedule", schedule, "--stages", stages, "--micro-batches", micro_batches)
            share, alive = re.search(r"^rank 0 +([\d.]+ %) +([\d.]+)$", done.stdout, re.M).groups()
            if cell.strip() != f"{share} ({alive})":
                yield f"{schedule}, {stages} ranks, {micro_batches} micro-batches: {share} ({alive}), not {cell}"


def check_drawing(program, folder):
    """One box for the background of each rank, one for each pass, and one for each kind in the legend."""
    for schedule, passes, kinds in (("1f1b", 4 * 8 * 2, 3), ("zero-bubble", 4 * 8 * 3, 4), ("interleaved", 4 * 8 * 4, 3)):
        path = Path(folder) / f"{schedule}.svg"
        done = ask(program, "--schedule", schedule, "--svg", str(path))
        if done.returncode != 0:
            yield f"{schedule}: exit code {done.returncode}\n{done.stderr}"
            continue
        boxes = xml.etree.ElementTree.parse(path).getroot().findall(f"{SVG}rect")
        if len(boxes) != 4 + passes + kinds:
            yield f"{path.name} has {len(boxes)} boxes instead of {4 + passes + kinds}"


def check_refusals(program, folder):
    for code, part, arguments in (
            (2, "several chunks need interleaved", ["--chunks", "2"]),
            (2, "take 8", ["--schedule", "interleaved", "--micro-batches", "6"]),
            (2, "--stages must be from 1 to 128, not 0", ["--stages", "0"]),
            (2, "--transfer must be from 0 to 16, not -1", ["--transfer=-1"]),
            (1, "cannot write", ["--svg", str(Path(folder) / "missing" / "plan.svg")])):
        done = ask(program, *arguments)
        if done.returncode != code or part not in done.stderr or len(done.stderr.splitlines()) != 1:
            yield f"{arguments}: exit code {done.returncode}, {done.stderr}"


def main(program, page):
    text = Path(page).read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder:
        wrong = [*check_page(program, text), *check_table(program, text), *check_drawing(program, folder),
                 *check_refusals(program, folder)]
    if wrong:
        sys.exit("\n".join(wrong))
    print("the plans on the page are the program's")


main(*sys.argv[1:])
