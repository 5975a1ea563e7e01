#!/usr/bin/env python3
"""pacer-scaling prints what the two pages about it show, as a table, as JSON and as a drawing, and refuses what cannot be.

scaling_page.py PROGRAM ROOT
"""
import json
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree
from pathlib import Path

BLOCK = re.compile(r"^```\n\$ pacer-scaling ([^\n]*)\n(.*?)^```", re.M | re.S)
SVG = "{http://www.w3.org/2000/svg}"


def ask(program, root, *arguments):
    return subprocess.run([program, *arguments], cwd=root, capture_output=True, text=True, timeout=60, check=False)


def check_page(program, root):
    blocks = []
    for page in ("docs/scaling.md", "docs/measurements/scaling.md"):
        shown = BLOCK.findall(Path(root, page).read_text(encoding="utf-8"))
        if len(shown) != 1:
            yield f"{page} shows {len(shown)} runs instead of 1"
        blocks += shown
    for arguments, lines in blocks:
        done = ask(program, root, *arguments.split())
        if done.returncode != 0 or done.stderr or not lines or lines != done.stdout:
            yield f"{arguments}: is not what the page shows\n{done.stdout}{done.stderr}"


def check_json(program, root):
    """A ring of fp32 gradients between hosts of one rank, by hand: bytes, links of 10 Gbit/s, 28 bytes of AdamW."""
    done = ask(program, root, "--model", "1e9", "--ranks-per-node", "1", "--efficiency", "1", "--latency-us", "0",
               "--copy-gbs", "2800", "--json")
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    ring = {line["ranks"]: line for line in lines if line["scheme"] == "ring"}
    if sorted(ring) != [2**i for i in range(11)]:
        yield f"ranks are {sorted(ring)}"
    for ranks, line in ring.items():
        sent = 2 * (ranks - 1) / ranks * 4e9
        milliseconds = sent / 1.25e9 * 1e3 + 10 / 0.98 + (0.08 if ranks > 1 else 0)
        if abs(line["rank_bytes"] - sent) > 1 or abs(line["step_ms"] / milliseconds - 1) > 1e-9:
            yield f"{line} instead of {sent} bytes in {milliseconds} ms"
    if any(sum(line["best"] for line in lines if line["ranks"] == ranks) != 1 for ranks in ring):
        yield "not one best way for each number of ranks"


def check_measured(program, root, folder):
    path = Path(folder) / "bench.jsonl"
    line = {"kind": "result", "case": "cuda/gpt2/fp32", "contender": "pacer", "parameters": 124439808,
            "ms": 1, "copy_gigabytes_per_second": 1000, "fraction_of_copy": 0.5}
    path.write_text(json.dumps({"kind": "environment", "gpu": "none"}) + "\n" + json.dumps(line) + "\n", encoding="utf-8")
    done = ask(program, root, "--model", "1e9", "--most", "1", "--json", "--measured", str(path))
    if abs(json.loads(done.stdout.splitlines()[0])["step_ms"] - 56) > 1e-9:
        yield f"28 GB at 500 GB/s are 56 ms, not {done.stdout}{done.stderr}"


def check_drawing(program, root, folder):
    path = Path(folder) / "steps.svg"
    done = ask(program, root, "--compute-ms", "57", "--svg", str(path))
    lines = xml.etree.ElementTree.parse(path).getroot().findall(f"{SVG}polyline") if done.returncode == 0 else []
    if len(lines) != 9:
        yield f"the drawing has {len(lines)} lines instead of 9: eight ways and the computation\n{done.stderr}"


def check_refusals(program, root, folder):
    other = Path(folder) / "other.csv"
    other.write_text("a,b\n", encoding="utf-8")
    for code, part, arguments in (
            (2, "--ranks-per-node must be from 1 to 1024, not 0", ["--ranks-per-node", "0"]),
            (2, "--warm-up must be from 0 to 1, not 2", ["--warm-up", "2"]),
            (2, "--gbit must be from 0.001 to 100000, not 0", ["--gbit", "0"]),
            (2, "there is no model '7b'", ["--model", "7b"]),
            (2, "did you mean 'h100'?", ["--machine", "h10"]),
            (2, "does not begin with the columns", ["--compare", str(other)]),
            (1, "cannot read", ["--compare", str(Path(folder) / "missing.csv")]),
            (1, "cannot read", ["--measured", str(Path(folder) / "missing.jsonl")]),
            (1, "cannot write", ["--svg", str(Path(folder) / "missing" / "steps.svg")])):
        done = ask(program, root, *arguments)
        if done.returncode != code or part not in done.stderr or len(done.stderr.splitlines()) != 1:
            yield f"{arguments}: exit code {done.returncode}, {done.stderr}"


def main(program, root):
    with tempfile.TemporaryDirectory() as folder:
        wrong = [*check_page(program, root), *check_json(program, root), *check_measured(program, root, folder),
                 *check_drawing(program, root, folder), *check_refusals(program, root, folder)]
    if wrong:
        sys.exit("\n".join(wrong))
    print("the tables on the page are the program's")


main(*sys.argv[1:])
