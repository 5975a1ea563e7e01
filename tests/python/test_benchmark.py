#!/usr/bin/env python3
"""The benchmark runs to its end; figures of so small a model say nothing."""
import subprocess
import sys
import unittest
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "python/benchmarks/steps.py"


class Benchmark(unittest.TestCase):
    def test_it_prints_a_line_for_each_optimizer(self):
        small = ["--device", "cpu", "--layers", "1", "--width", "16", "--steps", "1", "--rounds", "1"]
        output = subprocess.run([sys.executable, SCRIPT, *small], check=True, capture_output=True, text=True).stdout
        self.assertRegex(output, r"\| AdamW \| [\d.]+ \|")
        self.assertRegex(output, r"\| Adam \| [\d.]+ \|")

    def test_its_list_is_bert_larges(self):
        sys.path.insert(0, str(SCRIPT.parent))
        import steps

        shapes = steps.bert_large()
        count = sum(s[0] * (s[1] if len(s) > 1 else 1) for s in shapes)
        self.assertEqual(len(shapes), 5 + 24 * 16 + 2 + 7)
        self.assertEqual(count, 336_226_108)


if __name__ == "__main__":
    unittest.main()
