#!/usr/bin/env python3
"""What type checkers, editors and help() know of the options."""
import importlib.util
import inspect
import os
import pydoc
import subprocess
import sys
import tempfile
import typing
import unittest

import pacer
from pacer import _option_types

KINDS = {
    pacer.FusedAdam: _option_types.FusedAdamOptions,
    pacer.FusedAdamW: _option_types.FusedAdamOptions,
    pacer.FusedLamb: _option_types.FusedLambOptions,
    pacer.FusedSgd: _option_types.FusedSgdOptions,
    pacer.FusedRmsprop: _option_types.FusedRmspropOptions,
    pacer.Muon: _option_types.MuonOptions,
    pacer.ScheduleFreeAdamW: _option_types.ScheduleFreeAdamWOptions,
    pacer.OneBitAdam: _option_types.OneBitAdamOptions,
    pacer.OneBitLamb: _option_types.OneBitLambOptions,
    pacer.OneBitMuon: _option_types.OneBitMuonOptions,
}
# Each line is wrong, as its comment says; the last one is not.
PROGRAM = """
import torch, pacer
p = [torch.nn.Parameter(torch.ones(2))]
pacer.FusedAdamW(p, weight_deca=0.1)  # weight_deca
pacer.FusedAdam(p, rounding="nearst")  # rounding
pacer.FusedLamb(p, amsgrad=True)  # amsgrad
pacer.OneBitAdam(p, freeze_step="2")  # freeze_step
pacer.OneBitLamb(p, coef_beta=0.9)  # coef_beta
pacer.OneBitLamb(p, 1e-3, freeze_step=2, betas=(0.9, 0.95), weight_decay=0.1, scale="l1")
"""


class Typing(unittest.TestCase):
    def test_types_name_the_options_that_there_are(self):
        for kind, types in KINDS.items():
            of_deepspeed = getattr(kind, "_former_options", frozenset())
            self.assertEqual(set(typing.get_type_hints(types)) - of_deepspeed, set(kind._options), kind.__name__)
            self.assertEqual(typing.get_type_hints(kind.__init__)["options"].__args__[0], types)

    def test_help_shows_options_defaults_and_meanings(self):
        for kind in KINDS:
            text = pydoc.render_doc(kind, renderer=pydoc.plaintext)
            parameters = inspect.signature(kind).parameters
            for name, default in kind._options.items():
                self.assertIn(f"{name} = {default!r}: ", text)
                self.assertEqual(parameters[name].default, default)
                self.assertEqual(parameters[name].kind, inspect.Parameter.KEYWORD_ONLY)
        self.assertNotIn("false: ", pacer.OneBitAdam.__doc__)

    def test_a_type_checker_finds_what_is_misspelled(self):
        if importlib.util.find_spec("mypy") is None:
            self.skipTest("mypy is not installed")
        with tempfile.TemporaryDirectory() as folder:
            program, settings = os.path.join(folder, "program.py"), os.path.join(folder, "mypy.ini")
            with open(program, "w", encoding="utf-8") as file:
                file.write(PROGRAM)
            with open(settings, "w", encoding="utf-8") as file:
                file.write("[mypy]\ncheck_untyped_defs = True\n[mypy-torch.*]\nfollow_imports = skip\n")
            environment = {**os.environ, "MYPYPATH": os.path.dirname(os.path.dirname(pacer.__file__))}
            command = [sys.executable, "-m", "mypy", "--config-file", settings, "--cache-dir", folder, program]
            output = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300).stdout
        found = {line.split(":")[1]: line for line in output.splitlines() if "program.py:" in line and ": error:" in line}
        for number, line in enumerate(PROGRAM.splitlines(), start=1):
            if "# " in line:
                self.assertIn(line.split("# ")[1], found.pop(str(number), ""), output)
        self.assertEqual(found, {}, output)


if __name__ == "__main__":
    unittest.main()
