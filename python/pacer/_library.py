"""Loads the C++ part, which registers the class torch.classes.pacer.Optimizer."""

from pathlib import Path

import torch

from ._built_for import LIBTORCH


def _load() -> None:
    # LibTorch's C++ interface changes with each minor version.
    if torch.__version__.split(".")[:2] != LIBTORCH.split("."):
        raise ImportError(
            f"pacer was built for torch {LIBTORCH}, but torch {torch.__version__} is installed; "
            "install pacer again beside this torch, or the torch it was built for."
        )
    torch.classes.load_library(str(Path(__file__).with_name("_pacer.so")))


_load()
