#!/usr/bin/env python3
"""What pip reads of the package: its name, licence and pages, and what it says where a build cannot begin."""
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

PROJECT = Path(__file__).parents[2]
PYTHON = PROJECT / "python"


class Package(unittest.TestCase):
    def test_the_distribution_has_a_name_of_its_own_and_what_a_wheel_should_hold(self):
        try:
            import tomllib
        except ImportError:
            self.skipTest("tomllib is of Python 3.11")
        project = tomllib.loads((PYTHON / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        self.assertEqual(project["name"], "pacer-torch")  # "pacer" is another project's on PyPI
        self.assertEqual(project["license"], "Apache-2.0")
        self.assertEqual(project["authors"], [{"name": "The pacer authors"}])
        self.assertIn("pacer-torch", (PYTHON / project["readme"]).read_text(encoding="utf-8"))
        for name in project["license-files"]:
            self.assertEqual((PYTHON / name).read_bytes(), (PROJECT / "LICENSE").read_bytes())

    def test_a_build_that_lacks_something_says_so_in_one_sentence(self):
        with tempfile.TemporaryDirectory() as folder:
            torch = Path(folder) / "torch.py"
            for backend, missing in [("", "scikit-build-core"), ("scikit_build_core.py", "torch")]:
                if backend:
                    (Path(folder) / backend).touch()
                else:
                    torch.touch()
                # -S: without the packages that are installed.
                command = [sys.executable, "-S", "-B", "-c", f"import sys; sys.path[:0] = [{str(PYTHON)!r}, {folder!r}]; import build_backend"]
                done = subprocess.run(command, capture_output=True, text=True, env={}, check=False)
                self.assertEqual(done.returncode, 1)
                self.assertRegex(done.stderr, rf"^pacer cannot be built: this Python has no {missing}; .*\n$")
                torch.unlink(missing_ok=True)


if __name__ == "__main__":
    unittest.main()
