"""OneBitAdam, OneBitLamb and OneBitMuon as torch.optim optimizers: step() averages over ranks what has to be averaged, so gradients
are each rank's own, and no DistributedDataParallel goes around the model."""

from __future__ import annotations

import warnings
from collections import defaultdict
from typing import Any, Callable, ClassVar, Optional, Union

import torch
from typing_extensions import Unpack

from ._option_types import OneBitAdamOptions, OneBitLambOptions, OneBitMuonOptions
from .communicator import Communicator, communicator_or_none
from .optimizers import _OF_MUON, Params, _FusedOptimizer

# Options of DeepSpeed's optimizers that have no counterpart: the value that asks for nothing else than what happens here
# anyway, and what to say of others.
_OF_DEEPSPEED: dict[str, tuple[Any, str]] = {
    "deepspeed": (None, "there is no engine"),
    "cuda_aware": (False, "NCCL and Gloo carry the messages"),
    "comm_backend_name": (None, "the Communicator's device decides"),
    "eps_inside_sqrt": (False, "eps is added outside the root"),
    "max_grad_norm": (0, "gradients are not clipped"),
}


class _RanksOptimizer(_FusedOptimizer):
    """What the three share: a step is taken with the other ranks, and each rank has state of its own. Not used directly."""

    def __init__(
        self,
        params: Params,
        lr: Union[float, torch.Tensor] = 1e-3,
        communicator: Optional[Communicator] = None,
        **options: Any,
    ) -> None:
        self._refuse_unknown(options)
        self._communicator = communicator_or_none(communicator)
        super().__init__(params, lr, **options)

    def _world(self) -> Any:
        return self._communicator and self._communicator._handle

    def _place(self) -> tuple[int, int]:
        return (self._communicator.rank, self._communicator.world_size) if self._communicator else (0, 1)

    # torch.amp.GradScaler then calls step() on every rank, whatever its own gradients are: a rank that left a step out
    # alone would leave the others waiting. What is not finite on one rank, C++ leaves out on all.
    _step_supports_amp_scaling = True

    def step(self, closure: Optional[Callable[[], Any]] = None) -> Any:
        """Updates all parameters, with the other ranks. The closure, if given, is called first."""
        scale = getattr(self, "grad_scale", None)  # where a GradScaler calls and has not unscaled
        if scale is not None:
            parameters = [parameter for group in self.param_groups for parameter in group["params"]]
            torch._foreach_div_([p.grad for p in parameters if p.grad is not None], scale)
        return super().step(closure)

    # ---- what is going on ----

    @property
    def communicator(self) -> Optional[Communicator]:
        """None where a single process was given none."""
        return self._communicator

    def bytes_sent(self) -> int:
        """Returns the bytes from this rank to others that travelled as signs."""
        return int(self._handle.bytes_sent())

    # ---- state ----

    def _hand_over(self, group: dict[str, Any]) -> None:
        super()._hand_over(group)
        self._is_stale = True  # there is state from the beginning: what belongs to no parameter

    def _read_state(self) -> defaultdict[Any, Any]:
        """Besides what is torch's: under a parameter's "this_rank", what this rank carries for it; under the key "onebit",
        what belongs to no parameter."""
        shared, own = dict(self._handle.export_state()), dict(self._handle.export_rank_state())
        state: defaultdict[Any, Any] = defaultdict(dict)
        state["onebit"] = {"all_ranks": shared, "this_rank": own}
        for g, params in enumerate(self._params):
            for parameter, name in zip(params, self._handle.names(g)):
                prefix = f"{name}/"
                take = lambda of: {key[len(prefix) :]: of.pop(key) for key in list(of) if key.startswith(prefix)}
                state[parameter] = {**take(shared), "this_rank": take(own)}
        return state

    def _put_state(self) -> None:
        saved = self._loading["state"]
        if "onebit" not in saved:
            raise ValueError(
                f"{self._kind}: the state to load is none of a 1-bit optimizer; begin with a new optimizer."
            )
        shared, own = dict(saved["onebit"]["all_ranks"]), dict(saved["onebit"]["this_rank"])
        for g, (group, saved_group) in enumerate(zip(self.param_groups, self._loading["param_groups"])):
            self._complete(group, saved_group, shared)
            for parameter, name, key in zip(group["params"], self._handle.names(g), saved_group["params"]):
                fields = dict(saved[key])
                own.update({f"{name}/{field}": value for field, value in fields.pop("this_rank").items()})
                shared.update({f"{name}/{field}": value for field, value in fields.items()})
        self._call(self._handle.import_states, shared, own)
        self._sent = [()] * len(self.param_groups)  # options came along: the groups' go over them
        self._is_stale = True

    def _complete(self, group: dict[str, Any], saved_group: dict[str, Any], shared: dict[str, Any]) -> None:
        """Gives a group the options that an older file lacks."""

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            f"{self._kind} cannot be copied or pickled, because it talks to other ranks; "
            "make a new one and load the state_dict."
        )


class _OneBitOptimizer(_RanksOptimizer):
    """What OneBitAdam and OneBitLamb share. Not used directly."""

    _former_options: ClassVar[frozenset[str]] = frozenset(_OF_DEEPSPEED) | {"amsgrad"}

    def __init__(
        self,
        params: Params,
        lr: Union[float, torch.Tensor] = 1e-3,
        communicator: Optional[Communicator] = None,
        **options: Any,
    ) -> None:
        super().__init__(params, lr, communicator, **self._without_former(options))

    def _without_former(self, options: dict[str, Any]) -> dict[str, Any]:
        """Takes out DeepSpeed's options that have no counterpart here, and warns of those that asked for something."""
        if options.get("amsgrad"):
            raise ValueError(f"{self._kind} has no amsgrad, because its variance freezes; leave it out.")
        unheard = [
            f"{name} ({words})"
            for name, (nothing, words) in _OF_DEEPSPEED.items()
            if options.get(name, nothing) != nothing
        ]
        if unheard:
            warnings.warn(f"{self._kind}: without effect here: {', '.join(unheard)}.", stacklevel=4)
        return {name: value for name, value in options.items() if name not in self._former_options}

    @property
    def frozen_at(self) -> Optional[int]:
        """After how many steps, skipped ones included, the variance froze; None before."""
        step = int(self._handle.frozen_at())
        return None if step < 0 else step

    @property
    def attempts(self) -> int:
        """Steps taken or skipped so far."""
        return int(self._handle.attempts())

    def compression_error(self) -> float:
        """Returns which share of what this rank rounded to signs the last step lost; 0 before."""
        return float(self._handle.compression_error())

    def _complete(self, group: dict[str, Any], saved_group: dict[str, Any], shared: dict[str, Any]) -> None:
        if int(shared["onebit/frozen_at"]) > 0 and "compress_vectors" not in saved_group:
            group["compress_vectors"] = True  # an older file: what was compressed stays so


_SHARED = {
    "master_weights": "automatic", "compress": True, "freeze_step": None, "freeze_automatically": None,
    "variance_floor": 0.01, "scale": "rms", "compress_vectors": False, "compress_alone": False, "hierarchical": False,
    "one_bit": True, "bucket_bytes": None,
}  # fmt: skip


class OneBitAdam(_OneBitOptimizer):
    """1-bit Adam (Tang et al., arXiv:2102.02888): AdamW until the variance freezes, then ranks exchange the signs of their
    momentum. Needs freeze_step (warm-up steps) or freeze_automatically (steps planned in all). communicator: None for
    torch's default group, or for a single process; ranks of a launcher without a group that each train alone pass
    Communicator.alone()."""

    _kind = "OneBitAdam"
    _options = {
        "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2, "bias_correction": True,
        "refresh_variance_every": 0, "block_scales": True, **_SHARED,
    }  # fmt: skip

    def __init__(
        self,
        params: Params,
        lr: Union[float, torch.Tensor] = 1e-3,
        communicator: Optional[Communicator] = None,
        **options: Unpack[OneBitAdamOptions],
    ) -> None:
        super().__init__(params, lr, communicator, **options)


class OneBitLamb(_OneBitOptimizer):
    """1-bit LAMB (Li et al., arXiv:2104.06069): LAMB until the variance freezes, then as OneBitAdam, each tensor's step
    scaled by its mean trust ratio."""

    _kind = "OneBitLamb"
    _options = {
        "betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": 1e-2, "bias_correction": False,
        "min_coeff": 0.01, "max_coeff": 10.0, "coeff_beta": 0.9, "factor_min": 0.5, "factor_max": 1.0,
        "factor_threshold": 0.1, "adapt": True, "block_scales": False, **_SHARED,
    }  # fmt: skip

    def __init__(
        self,
        params: Params,
        lr: Union[float, torch.Tensor] = 1e-3,
        communicator: Optional[Communicator] = None,
        **options: Unpack[OneBitLambOptions],
    ) -> None:
        super().__init__(params, lr, communicator, **options)


class OneBitMuon(_RanksOptimizer):
    """1-bit Muon: as Muon, whose ranks each orthogonalise their own momentum and exchange the signs of the results, from
    the first step on. communicator: as in OneBitAdam."""

    _kind = "OneBitMuon"
    _options = {
        **_OF_MUON, "scale": "rms", "block_scales": True, "compress_alone": False, "hierarchical": False,
    }  # fmt: skip

    def __init__(
        self,
        params: Params,
        lr: Union[float, torch.Tensor] = 1e-3,
        communicator: Optional[Communicator] = None,
        **options: Unpack[OneBitMuonOptions],
    ) -> None:
        super().__init__(params, lr, communicator, **options)
