"""scikit-build-core as pip calls it, or one sentence that says what is missing: without build isolation pip neither
installs what a build needs nor looks for it."""

import importlib.util
import sys

_HOW = "install it beside the torch that pacer is for and try again, or leave --no-build-isolation out"

for _module, _package in (("scikit_build_core", "scikit-build-core"), ("torch", "torch")):
    if importlib.util.find_spec(_module) is None:
        sys.exit(f"pacer cannot be built: this Python has no {_package}; {_HOW}.")

from scikit_build_core.build import *  # noqa: E402, F403
