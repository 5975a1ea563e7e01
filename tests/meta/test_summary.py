#!/usr/bin/env python3
"""Feeds summary.py results of every kind and compares the closing line."""
import subprocess
import sys
import tempfile
from pathlib import Path

PASS_2 = "All tests passed (5 assertions in 3 test cases)\nPACER_SKIPPED: no reason\n"
FAIL_2 = "----------\na case\n----------\nfile.cpp:3\n..........\n\nfile.cpp:4: FAILED:\n  CHECK( x )\n\n==========\ntest cases: 4 | 3 passed | 1 failed\nassertions: 9 | 8 passed | 1 failed\n"
SKIP_3 = "test cases:  5 |  3 passed | 2 skipped\nassertions: 4 | 4 passed\n"
GPU = "PACER_SKIPPED: this machine has no NVIDIA GPU\n"
SOURCE = 'TEST_CASE("one [x]", "[a][gpu]") {}\nTEST_CASE(\n    "two "\n    "more", "[gpu]") {}\nTEST_CASE("three", "[b]") {}\n'

# name, what ctest says, output; then the expected line and exit code
RUNS = (
    ([("unit", "run", PASS_2)], "2 passed, 0 failed, 1 skipped", 0),
    ([("unit", "fail", FAIL_2), ("script", "run", "")], "4 passed, 1 failed, 0 skipped", 1),
    ([("unit", "run", SKIP_3)], "3 passed, 0 failed, 2 skipped", 0),
    ([("unit", "fail", "Segmentation fault")], "0 passed, 1 failed, 0 skipped", 1),
    ([("unit", "fail", PASS_2)], "2 passed, 1 failed, 1 skipped", 1),
    ([("unit", "notrun", "")], "0 passed, 1 failed, 0 skipped", 1),
    ([("script", "notrun", "PACER_SKIPPED: no tool\n")], "0 passed, 0 failed, 1 skipped", 0),
    ([("unit", "run", "No test case matches.\n")], "0 passed, 0 failed, 0 skipped", 0),
    ([("unit", "run", PASS_2), ("device.gpu", "notrun", GPU)], "2 passed, 0 failed, 3 skipped", 0),
    ([("device.gpu", "run", "All tests passed (1 assertion in 1 test case)\n")], "1 passed, 0 failed, 0 skipped", 0),
    ([], "0 passed, 0 failed, 0 skipped", 1),
)

failed = 0
for entries, line, code in RUNS:
    with tempfile.TemporaryDirectory() as folder:
        cases = "".join(f'<testcase name="{n}" status="{s}"><system-out>{o}</system-out></testcase>' for n, s, o in entries)
        (Path(folder) / "results.xml").write_text(f"<testsuite>{cases}</testsuite>")
        (Path(folder) / "cases.cpp").write_text(SOURCE)
        results = [Path(folder) / name for name in ("missing.xml", "results.xml")]
        command = [sys.executable, Path(__file__).with_name("summary.py"), folder, *results]
        run = subprocess.run(command, capture_output=True, text=True)
    if (run.stdout.rstrip().split("\n")[-1], run.returncode) != (line, code):
        print(f"{entries}: expected {line!r} and {code}, got {run.returncode} and:\n{run.stdout}{run.stderr}")
        failed = 1
    told = all(text in run.stdout for text in ("Failed: unit", "a case", "file.cpp:4: FAILED:", "CHECK( x )"))
    if told != any(o == FAIL_2 for _, _, o in entries):
        print(f"{entries}: what failed is told wrongly:\n{run.stdout}")
        failed = 1
sys.exit(failed)
