#!/usr/bin/env python3
"""The examples run to their end, and learn."""
import re
import subprocess
import sys
import unittest
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "python/examples"


class Examples(unittest.TestCase):
    def test_one_change_learns(self):
        output = subprocess.run([sys.executable, EXAMPLES / "one_change.py"], check=True, capture_output=True, text=True)
        losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", output.stdout)]
        self.assertLess(losses[-1], 0.5 * losses[0])


if __name__ == "__main__":
    unittest.main()
