"""The options of a parameter group, which is a dictionary of Python: the numbers and words that C++ takes for them, and
what is refused because nothing here would follow it."""

from __future__ import annotations

import difflib
import inspect
import textwrap
from typing import Any, Iterable, Optional, SupportsFloat

import torch

from . import _option_help

Group = dict[str, Any]

# Keys of a group that are no options of an optimizer: torch's own and those of its schedulers.
_KEYS_OF_TORCH = {
    "params", "param_names", "lr", "initial_lr", "min_lr", "max_lr", "swa_lr", "base_momentum", "max_momentum",
}  # fmt: skip
# Options of torch's optimizers that change what a step computes, and mostly have no counterpart.
_ASKS_OF_TORCH = ("maximize", "differentiable")
# Those, and what only says how torch computes a step.
OF_TORCH = frozenset({*_ASKS_OF_TORCH, "foreach", "capturable", "fused", "decoupled_weight_decay"})


def describe(optimizer: type, options: Group) -> None:
    """Writes an optimizer's options, their defaults and meanings into what help() and editors show of it."""
    init = optimizer.__init__  # type: ignore[misc]
    bare = inspect.signature(init)
    named = [one for one in bare.parameters.values() if one.kind != inspect.Parameter.VAR_KEYWORD]
    keyword = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=value) for name, value in options.items()]
    init.__signature__ = bare.replace(parameters=[*named, *keyword])  # type: ignore[attr-defined]
    shown = {"lr": 0.001, **options}
    lines = [f"{name} = {value!r}: {_option_help.MEANINGS[name]}" for name, value in shown.items()]
    wrapped = [textwrap.fill(line, 116, initial_indent="    ", subsequent_indent="        ") for line in lines]
    optimizer.__doc__ = "\n".join([inspect.cleandoc(optimizer.__doc__ or ""), "", "Options:", *wrapped])


def nearest(name: str, known: Iterable[str]) -> Optional[str]:
    return next(iter(difflib.get_close_matches(name, list(known), n=1, cutoff=0.7)), None)


def unknown(kind: str, name: str, options: Group) -> str:
    """Returns the sentence that refuses an option."""
    near = nearest(name, options)
    offer = f'did you mean "{near}"?' if near else f"there are: {', '.join(options)}."
    return f'{kind} has no option "{name}"; {offer}'


def refuse_misspelled(kind: str, options: Group, group: Group) -> None:
    """Raises ValueError for a key that resembles an option; other keys are the user's own."""
    for name in group:
        if name not in options and name not in _KEYS_OF_TORCH and nearest(name, options) is not None:
            raise ValueError(unknown(kind, name, options))


def refuse_torchs(kind: str, options: Group, group: Group) -> None:
    """Raises ValueError where a group has something on that only torch's optimizers do. `options`: names and defaults."""
    for name in _ASKS_OF_TORCH:
        if group.get(name) and name not in options:
            raise ValueError(f'{kind} has no option "{name}", which a parameter group has on; leave it out.')
    if kind == "FusedAdam" and group.get("decoupled_weight_decay") and group.get("weight_decay"):
        raise ValueError("FusedAdam has no decoupled weight decay, which a parameter group has on; use FusedAdamW.")
    if kind == "FusedAdamW" and group.get("decoupled_weight_decay") is False and group.get("weight_decay"):
        raise ValueError("FusedAdamW has decoupled weight decay only, which a parameter group has off; use FusedAdam.")


def _number(kind: str, name: str, value: Any) -> float:
    if type(value) is float:
        return value
    if not isinstance(value, SupportsFloat):
        raise TypeError(f"{kind}: {name} is {value!r}, but must be a number.")
    if isinstance(value, torch.Tensor) and value.numel() != 1:
        raise ValueError(f"{kind}: {name} is a tensor of shape {tuple(value.shape)}, but must have one element.")
    return float(value)


def betas_of(kind: str, group: Group) -> tuple[float, float]:
    """Returns them as numbers; they may be tensors of one element, and change in place."""
    betas = group["betas"]
    if not isinstance(betas, (tuple, list)) or len(betas) != 2:
        raise ValueError(f"{kind}: betas is {betas!r}, but must be two numbers.")
    return _number(kind, "betas[0]", betas[0]), _number(kind, "betas[1]", betas[1])


def in_words(kind: str, options: Group, group: Group) -> tuple[dict[str, float], dict[str, str]]:
    """Returns a group's options as C++ takes them: numbers, and names of choices. `options`: names and defaults."""
    numbers = {"lr": _number(kind, "lr", group["lr"])}
    choices: dict[str, str] = {}
    for name, default in options.items():
        value = group[name]
        if name == "betas":
            numbers["beta1"], numbers["beta2"] = betas_of(kind, group)
        elif isinstance(default, str):
            if not isinstance(value, str):
                raise TypeError(f'{kind}: {name} is {value!r}, but must be a name, as "{default}" is.')
            choices[name] = value
        elif value is not None or default is not None:
            if isinstance(value, torch.Tensor):
                raise TypeError(f"{kind}: {name} is a tensor, but must be a number; only lr and betas may be tensors.")
            numbers[name] = _number(kind, name, value)
            if isinstance(default, (int, type(None))) and not numbers[name].is_integer():
                raise ValueError(f"{kind}: {name} is {value!r}, but must be a whole number.")
    if not 0 <= numbers.get("seed", 0) < 2**53:
        raise ValueError(f"{kind}: seed must be in [0, 2**53), not {group['seed']}")
    return numbers, choices


def from_words(options: Group, numbers: dict[str, float], choices: dict[str, str], group: Group) -> None:
    """The way back: puts what C++ has into a group."""
    for name, default in options.items():
        if name == "betas":
            group[name] = (numbers["beta1"], numbers["beta2"])
        elif name in choices:
            group[name] = choices[name]
        elif name not in numbers:
            group[name] = None
        else:
            group[name] = (int if default is None else type(default))(numbers[name])
    if isinstance(group["lr"], torch.Tensor):
        group["lr"].fill_(numbers["lr"])
    else:
        group["lr"] = numbers["lr"]
