"""Loads the C++ part, which registers the class torch.classes.pacer.Optimizer."""

from pathlib import Path

import torch


def _load() -> None:
    wanted = "2.11."
    if not torch.__version__.startswith(wanted):
        raise ImportError(
            f"pacer was built for torch {wanted}*, but torch {torch.__version__} is installed; "
            "build pacer again with that version of pacer which is made for it."
        )
    torch.classes.load_library(str(Path(__file__).with_name("_pacer.so")))


_load()
