"""SequenceLength and LayerDrop: what C++ has as hooks of a Session, for a loop of Python. Lengths, cuts and draws are the
C++ ones; the counting of steps is here, and step() goes where the optimizer's does."""

from __future__ import annotations

import functools
from typing import Any, Callable, Iterable, Optional, Sequence, SupportsFloat

import torch
import torch.distributed as dist

from . import _library  # noqa: F401  (registers torch.classes.pacer and torch.ops.pacer)


def _said(function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls C++, whose errors are of what a user passed."""
    try:
        return function(*arguments)
    except RuntimeError as error:
        raise ValueError(str(error).partition("\n")[0]) from None


def _whole(kind: str, name: str, value: Any) -> Any:
    """Returns a count as a number of C++; 64.0 is one, too."""
    if type(value) is int:
        return value
    if isinstance(value, bool) or not isinstance(value, SupportsFloat):
        raise TypeError(f"{kind}: {name} is {value!r}, but must be a whole number.")
    if not float(value).is_integer():
        raise ValueError(f"{kind}: {name} is {value!r}, but must be a whole number.")
    return int(value)  # type: ignore[call-overload]


def _count(state: dict[str, Any], name: str) -> int:
    if not isinstance(state.get(name), int) or state[name] < 0:
        raise ValueError(f'the state to load has no "{name}" that is a number >= 0; load what state_dict() returned.')
    return state[name]


class SequenceLength:
    """A sequence-length curriculum (Li et al., arXiv:2108.06084): batches are cut to a length that grows.

        curriculum = pacer.SequenceLength(64, 1024, ramp_steps=10_000)
        for x, y in batches:
            x, y = curriculum(x, y)
            ...
            optimizer.step()
            curriculum.step()

    One of ramp_steps, ramp_tokens and table ((progress, length) pairs; by_tokens: progress counts tokens) says how it
    grows. mode "truncate" cuts tokens off, "reshape" makes more, shorter sequences. dimensions: the sequence dimensions
    of each tensor. world_size: ranks that train on as many tokens each; None asks torch.distributed.
    docs/curriculum.md says what the options mean.
    """

    def __init__(
        self,
        first: int,
        last: int,
        *,
        ramp_steps: Optional[int] = None,
        ramp_tokens: Optional[int] = None,
        root: Optional[float] = None,
        difficulty_step: Optional[int] = None,
        table: Sequence[tuple[int, int]] = (),
        by_tokens: bool = False,
        mode: str = "truncate",
        dimensions: Sequence[Sequence[int]] = (),
        allow_shorter: bool = False,
        world_size: Optional[int] = None,
    ) -> None:
        if mode not in ("truncate", "reshape"):
            raise ValueError(f'SequenceLength: mode is "{mode}", but must be one of "truncate", "reshape".')
        whole = functools.partial(_whole, "SequenceLength")

        def whole_or_none(name: str, value: Any) -> Any:
            return None if value is None else whole(name, value)

        if world_size is None:
            world_size = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        self.steps: int = 0
        self.tokens: int = 0
        self._world_size = whole("world_size", world_size)
        self._tokens_of_step = 0
        self._rule: Any = _said(
            torch.classes.pacer.SequenceLength, whole("first", first), whole("last", last),
            whole_or_none("ramp_steps", ramp_steps), whole_or_none("ramp_tokens", ramp_tokens),
            None if root is None else float(root), whole_or_none("difficulty_step", difficulty_step),
            [(whole("table", progress), whole("table", length)) for progress, length in table], by_tokens,
            mode == "reshape", [[whole("dimensions", one) for one in of_tensor] for of_tensor in dimensions],
            allow_shorter,
        )  # fmt: skip

    def __call__(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Returns the tensors of a micro-batch, cut to the length of now and contiguous, and counts their tokens."""
        cut, tokens = _said(self._rule.begin, list(tensors), self.steps, self.tokens)
        self._tokens_of_step += tokens
        return tuple(cut)

    def step(self) -> None:
        """Goes on to the next step of the optimizer; skipped ones count."""
        self.steps += 1
        self.tokens += self._tokens_of_step * self._world_size
        self._tokens_of_step = 0

    @property
    def length(self) -> int:
        """Of now."""
        return int(_said(self._rule.length, self.steps, self.tokens))

    @property
    def settled(self) -> bool:
        """Whether the curriculum has ended."""
        return bool(_said(self._rule.settled, self.steps, self.tokens))

    def state_dict(self) -> dict[str, int]:
        """Returns the progress, between steps."""
        return {"steps": self.steps, "tokens": self.tokens}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps, self.tokens, self._tokens_of_step = _count(state, "steps"), _count(state, "tokens"), 0


class LayerDrop(torch.nn.Module):
    """Progressive layer dropping (Zhang & He, arXiv:2010.13369): a block of a residual stack runs with a probability that
    falls over training and with depth, and is the identity otherwise.

        self.layer_drop = pacer.LayerDrop(self.blocks, theta_bar=0.5, gamma=1e-3)    # in the model
        x = self.layer_drop(i, x)                                                      # in place of self.blocks[i](x)

        loss.backward()
        model.layer_drop.fill_gradients()    # zeros for blocks that were dropped
        optimizer.step()
        model.layer_drop.step()

    It has no parameters and no buffers. In eval() every block runs, unscaled. Every rank draws the same. With several
    micro-batches a step, micro_step() goes between them. After a resume set `steps` to the steps done.
    """

    def __init__(
        self, blocks: Iterable[torch.nn.Module], *, theta_bar: float = 0.5, gamma: float = 1e-3, seed: int = 0
    ) -> None:
        super().__init__()
        self._blocks = (tuple(blocks),)  # in a tuple, so that they keep their names: they are the model's
        self._options = (float(theta_bar), float(gamma), _whole("LayerDrop", "seed", seed))
        if not self.blocks:
            raise ValueError("LayerDrop was given no block; add the blocks before it is made.")
        if not 0 <= seed < 2**63:
            raise ValueError(f"LayerDrop: seed must be in [0, 2**63), not {seed}.")
        self.steps: int = 0
        self.micro_steps: int = 0
        self._ran: set[int] = set()
        self.keeps(0)  # checks the options

    @property
    def blocks(self) -> tuple[torch.nn.Module, ...]:
        return self._blocks[0]

    def _gate(self, i: int) -> tuple[bool, float]:
        layers = len(self.blocks)
        return _said(torch.ops.pacer.layer_drop_gate, *self._options, i, layers, self.steps, self.micro_steps)

    def keeps(self, i: int) -> bool:
        """Returns whether block i runs in this micro-step; True in eval()."""
        return not self.training or bool(self._gate(i)[0])

    def forward(self, i: int, x: torch.Tensor, *arguments: Any, **named: Any) -> torch.Tensor:
        """Returns x + (block i(x, ...) - x) / p where the block is kept with probability p, x where it is dropped."""
        if not self.training:
            return self.blocks[i](x, *arguments, **named)
        keep, probability = self._gate(i)
        if not keep:
            return x
        self._ran.add(i)
        y = self.blocks[i](x, *arguments, **named)
        if not isinstance(y, torch.Tensor) or y.shape != x.shape:
            what = f"shape {tuple(y.shape)}" if isinstance(y, torch.Tensor) else f"a {type(y).__name__}"
            raise ValueError(
                f"LayerDrop: block {i} turned shape {tuple(x.shape)} into {what}; only blocks that keep it can be dropped."
            )
        return y if probability == 1 else torch.add(x, torch.sub(y, x), alpha=1.0 / probability)

    def fill_gradients(self) -> None:
        """Gives a gradient of zero to parameters of blocks that were dropped in all micro-steps of this step, as a Session
        does: without one an optimizer would leave them out, decay and momentum included."""
        for i, block in enumerate(self.blocks):
            if i in self._ran:
                continue
            for parameter in block.parameters():
                if parameter.requires_grad and parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)

    def micro_step(self) -> None:
        """Goes on to the next micro-batch of the same step, after backward."""
        self.micro_steps += 1

    def step(self) -> None:
        """Goes on to the next step of the optimizer; skipped ones count."""
        self.steps, self.micro_steps = self.steps + 1, 0
        self._ran.clear()
