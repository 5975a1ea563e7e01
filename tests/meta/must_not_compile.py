#!/usr/bin/env python3
"""Misuse that the compiler must refuse, with the words that help.

must_not_compile.py COMPILER...
"""
import subprocess
import sys
import tempfile
from pathlib import Path

PROGRAM = """
#include <pacer/optimizers/onebit_adam_options.h>
#include <pacer/hooks/gradient_clipping.h>
#include <pacer/session/session.h>
#line 1 "%s"
void %s(pacer::Session& session, torch::Tensor x) { %s }
#line 1 "misuse"
void misuse(pacer::Session& session, torch::Tensor x) {
  %s
}
"""
# What compiles, and is named by no message: so the cases below fail for their own reason.
GOOD_NAME = "what_must_compile"
GOOD = "session.use(pacer::GradientClipping(1.0)); auto [y] = session.begin(x);"
# Each with a part of the compiler's message.
BAD = [
    ("pacer::GradientClipping clipping(1.0); session.use(clipping);", "a Session owns its hooks"),
    ("auto batch = session.begin(x); auto copy = batch;", "deleted"),
    ("session.begin(3);", "a batch is made of tensors"),
    ("session.begin();", "a batch has at least one tensor"),
    ("pacer::OneBitAdamOptions(1e-3).paged(3);", "leave out paged(), or use FusedAdamW"),
]


def main():
    # All of them in one go: LibTorch's headers cost more than everything else.
    text = PROGRAM % (GOOD_NAME, GOOD_NAME, GOOD, "\n".join("{ %s }" % text for text, _ in BAD))
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "case.cpp"
        source.write_text(text, encoding="utf-8")
        done = subprocess.run([*sys.argv[1:], "-fsyntax-only", source], capture_output=True, text=True)
    if GOOD_NAME in done.stderr:
        sys.exit(f"what must compile does not:\n{done.stderr}")
    missing = [words for _, words in BAD if words not in done.stderr]
    if done.returncode == 0 or missing:
        sys.exit(f"not refused, or not with these words: {missing}\n{done.stderr}")
    print(f"{len(BAD)} misuses are refused")


main()
