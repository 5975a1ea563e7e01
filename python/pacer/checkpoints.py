"""Checkpoints in the layout of C++ (docs/checkpoints.md): a folder with a manifest, the model and the optimizer as
safetensors, by name. A Session of C++ resumes what is saved here, and the other way round."""

from __future__ import annotations

import os
import warnings
from typing import Any, Callable, Optional, Union

import torch

from . import _library  # noqa: F401  (registers torch.ops.pacer)
from .optimizers import _FusedOptimizer

Folder = Union[str, "os.PathLike[str]"]


def _run(function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls C++, whose errors are about files."""
    try:
        return function(*arguments)
    except RuntimeError as error:
        raise RuntimeError(str(error).partition("\n")[0]) from None


def _together(ranks: Any, action: str, work: Callable[[], Optional[str]]) -> str:
    """Returns what `work` returned on rank 0. Where it fails on one of the ranks, all of them raise."""
    answer, failure = "", None
    try:
        answer = work() or ""
    except Exception as error:
        failure = error
    if ranks is not None:
        try:
            answer = torch.ops.pacer.agree(ranks, action, answer, "" if failure is None else str(failure) or repr(failure))[0]
        except RuntimeError as error:
            failure = failure or RuntimeError(str(error).partition("\n")[0])
    if failure is not None:
        raise failure
    return answer


def _bare(model: torch.nn.Module) -> torch.nn.Module:
    """Returns the model itself, under whose names C++ knows it, without DistributedDataParallel and torch.compile."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if inner is None and isinstance(model, torch.nn.parallel.DistributedDataParallel):
            inner = model.module
        if inner is None:
            return model
        model = inner


def _tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    state = model.state_dict(keep_vars=True)
    return {name: value.detach() for name, value in state.items() if isinstance(value, torch.Tensor)}


def _pacers(optimizer: torch.optim.Optimizer) -> _FusedOptimizer:
    if not isinstance(optimizer, _FusedOptimizer):
        raise TypeError(
            f"checkpoints of pacer hold its own optimizers, and this is {type(optimizer).__name__}; use torch.save."
        )
    return optimizer


def save_checkpoint(
    folder: Folder,
    step: int,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    tokens: int = 0,
    keep: int = 3,
) -> str:
    """Saves folder/step-0000001000 after `step` steps and returns its path; a save that fails leaves the former checkpoint
    as it was. Random states of torch go along. The newest `keep` checkpoints stay, and the newest whose parameters are
    finite; one whose parameters are not is warned of. One save at a time writes to a folder.

    All ranks of a 1-bit optimizer call it after the same step, and each writes its part into the folder, which they share.
    With replicas of another optimizer, one rank calls it."""
    own = _pacers(optimizer)
    model = _bare(model)
    tensors = _tensors(model)
    exported: list[Any] = []
    _together(own._world(), "write its part of a checkpoint", lambda: exported.extend(own._export_by_name(model)))
    session = {
        "progress/step": torch.tensor(step),
        "progress/tokens": torch.tensor(tokens),
        "random/cpu": torch.get_rng_state(),
    }
    gpu = next((tensor.device for tensor in tensors.values() if tensor.is_cuda), None)
    if gpu is not None:
        session["random/cuda"] = torch.cuda.get_rng_state(gpu)
    path = os.fspath(folder)
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    saved, is_finite = _run(
        torch.ops.pacer.save_checkpoint, path, step, tensors, trained, *exported, session, keep, own._world()
    )
    if not is_finite:
        warnings.warn(
            f"trained parameters in the checkpoint {saved} are not finite; the newest one with finite parameters stays, whatever is "
            "removed, and load_checkpoint goes on from it; look for the first loss that was not finite.",
            stacklevel=2,
        )
    return saved


def load_checkpoint(
    folder: Folder,
    model: torch.nn.Module,
    optimizer: Optional[torch.optim.Optimizer] = None,
    *,
    random_state: bool = True,
) -> Optional[int]:
    """Loads a checkpoint, or the newest of a folder of them that verifies, and returns its step; None where there is none.
    What does not fit is refused before anything is changed, on any rank. With an optimizer, its options are those that were
    saved, and with random_state torch's random states are, too. All ranks call it, whatever the optimizer."""
    into = None if optimizer is None else _pacers(optimizer)
    model = _bare(model)
    ranks = None if into is None else into._world()
    rank, world_size = (0, 1) if into is None else into._place()
    path = _together(
        ranks, "find a checkpoint", lambda: _run(torch.ops.pacer.find_checkpoint, os.fspath(folder)) if rank == 0 else ""
    )
    if not path:
        return None
    own, saved, session, steps = _tensors(model), {}, {}, []

    def prepare() -> None:
        step, tensors, state, errors, of_session = _run(torch.ops.pacer.read_checkpoint, path, rank, world_size)
        saved.update(tensors)
        session.update(of_session)
        steps.append(int(step))
        _compare(path, own, saved)
        if into is not None:
            into._prepare_import(model, state, errors, lambda: _run(torch.ops.pacer.read_errors, path))

    _together(ranks, "continue from the checkpoint", prepare)
    if into is not None:
        into._commit_import()
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(saved[name])
    if into is not None and random_state:
        gpu = next((tensor.device for tensor in own.values() if tensor.is_cuda), None)
        if "random/cpu" in session:
            torch.set_rng_state(session["random/cpu"])
        if "random/cuda" in session and gpu is not None:
            torch.cuda.set_rng_state(session["random/cuda"], gpu)
    return steps[0]


def _compare(path: str, own: dict[str, torch.Tensor], saved: dict[str, torch.Tensor]) -> None:
    """Raises ValueError where the model is not the one that was saved."""
    for name in sorted(own.keys() - saved.keys()):
        raise ValueError(f'the checkpoint {path} has no "{name}", which this model has; build the model that was saved.')
    for name in sorted(saved.keys() - own.keys()):
        raise ValueError(f'the checkpoint {path} has "{name}", which this model has not; build the model that was saved.')
    for name, tensor in own.items():
        there = saved[name]
        if there.shape != tensor.shape or there.dtype != tensor.dtype:
            raise ValueError(
                f'"{name}" is {there.dtype} of shape {tuple(there.shape)} in the checkpoint {path}, but {tensor.dtype} '
                f"of shape {tuple(tensor.shape)} in this model; build the model that was saved."
            )
