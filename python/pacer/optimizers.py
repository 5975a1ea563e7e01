"""FusedAdam, FusedAdamW, FusedLamb, FusedRmsprop, FusedSgd, Muon and ScheduleFreeAdamW as torch.optim optimizers.

The optimizer itself is C++. This file keeps torch's interface in front of it: parameter groups are dictionaries, which
each step compares with what C++ was told last; `state` is read from C++ when somebody asks for it.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from typing import Any, Callable, ClassVar, Iterable, Optional, Union

import torch
from torch.optim import Optimizer
from typing_extensions import Unpack

from . import _library  # noqa: F401  (registers torch.classes.pacer)
from . import _options as options_of
from ._option_types import (
    FusedAdamOptions,
    FusedLambOptions,
    FusedRmspropOptions,
    FusedSgdOptions,
    MuonOptions,
    ScheduleFreeAdamWOptions,
)
from .communicator import Communicator

Params = Union[Iterable[torch.Tensor], Iterable[dict[str, Any]], Iterable[tuple[str, torch.Tensor]]]

# What state_dict has for each parameter.
_STATE = frozenset({
    "step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "master", "remainder", "row_moment",
    "exp_avg_scale", "exp_avg_sq_scale", "weight_sum", "lr_max",
})  # fmt: skip


_NUMBERS = frozenset({"step", "weight_sum", "lr_max"})


def _shape_of(name: str, parameter: torch.Tensor) -> tuple[int, ...]:
    if name in _NUMBERS:
        return ()
    if name == "row_moment":
        return tuple(parameter.shape[:1])
    if name.endswith("_scale"):  # one for every 32 codes
        return ((parameter.numel() + 31) // 32,)
    return tuple(parameter.shape)


class _FusedOptimizer(Optimizer):
    """What the optimizers share. Not used directly."""

    _kind: ClassVar[str]  # the class of C++, also of what a user derives
    _options: ClassVar[dict[str, Any]]  # names and defaults
    _of_others: ClassVar[frozenset[str]] = frozenset()  # options that tell states of other optimizers of the same fields
    _needed: ClassVar[frozenset[str]] = frozenset({"step", "exp_avg", "exp_avg_sq"})  # state of every parameter
    _known: ClassVar[frozenset[str]] = _STATE  # what the state of a parameter may have
    _is_decoupled: ClassVar[Optional[bool]] = None  # of Adam's family: how weight decay enters
    _loading: dict[str, Any]  # while load_state_dict runs: what it loads, after all hooks
    _clips: dict[Optional[int], tuple[float, float]]  # of clip_gradient_norm, by group; no state, but copies have it
    _visible: dict[torch.Tensor, torch.Tensor]  # of set_visible_rows; as above

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        if "_options" in cls.__dict__ and "__init__" in cls.__dict__:
            options_of.describe(cls, cls._options)

    def __init__(self, params: Params, lr: Union[float, torch.Tensor] = 1e-3, **options: Any) -> None:
        self._refuse_unknown(options)
        self._handle: Any = None
        self._visible = {}
        self._clips = {}
        defaults = {"lr": lr, **self._options, **options}
        self._make_handle(defaults)
        super().__init__(params, defaults)

    @classmethod
    def _refuse_unknown(cls, options: dict[str, Any]) -> None:
        for name in options:
            if name not in cls._options:
                raise TypeError(options_of.unknown(cls._kind, name, cls._options))

    # ---- options ----

    def _in_words(self, group: dict[str, Any]) -> tuple[dict[str, float], dict[str, str]]:
        return options_of.in_words(self._kind, self._options, group)

    def _seen(self, group: dict[str, Any]) -> tuple[Any, ...]:
        """Returns what a step compares. Betas may change in place, so it holds their numbers."""
        betas = options_of.betas_of(self._kind, group) if "betas" in self._options else ()
        return (*betas, *[group[n] for n in self._options if n != "betas"])

    def _world(self) -> Any:
        """Returns the ranks that train together, as C++ has them."""
        return None

    @staticmethod
    def _call(function: Callable[..., Any], *arguments: Any) -> Any:
        """Calls C++ with what a user passed, where an error means that it does not fit, or that memory ran out."""
        try:
            return function(*arguments)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise ValueError(str(error)) from None

    def _make_handle(self, defaults: dict[str, Any]) -> None:
        words = self._in_words(defaults)
        self._handle = self._call(torch.classes.pacer.Optimizer, self._kind, *words, self._world())
        self._params: list[list[torch.Tensor]] = []  # by group: the parameters that C++ has
        self._sent: list[tuple[Any, ...]] = []  # and its options, less lr
        self._sent_lr: list[Any] = []
        self._is_stale = False  # whether C++ knows more than self.__dict__["state"]

    def _hand_over(self, group: dict[str, Any]) -> None:
        params = list(group["params"])
        self._call(self._handle.add_group, params, list(group.get("param_names", [])), *self._in_words(group))
        self._params.append(params)
        self._sent.append(self._seen(group))
        self._sent_lr.append(group["lr"])

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group; what it does not say is as in the defaults. Of a group that comes from torch's Adam or AdamW, what
        says how torch computes a step is left out."""
        if isinstance(param_group, dict):
            options_of.refuse_torchs(self._kind, self._options, param_group)
            if not options_of.OF_TORCH.isdisjoint(param_group):  # which may still be another optimizer's
                of_torch = options_of.OF_TORCH - self._options.keys()
                param_group = {k: v for k, v in param_group.items() if k not in of_torch}
            options_of.refuse_misspelled(self._kind, self._options, param_group)
        super().add_param_group(param_group)
        try:
            self._hand_over(self.param_groups[-1])
        except Exception:
            self.param_groups.pop()
            raise

    def _send_changes(self) -> None:
        if len(self.param_groups) != len(self._sent):
            raise ValueError(f"{self._kind}: a group was put into or taken from param_groups; use add_param_group.")
        for g, group in enumerate(self.param_groups):
            params = self._params[g]
            if len(group["params"]) != len(params) or not all(map(operator.is_, group["params"], params)):
                raise ValueError(
                    f"{self._kind}: other parameters were put into group {g}; use add_param_group, or make a new optimizer."
                )
            if not options_of.OF_TORCH.isdisjoint(group):
                options_of.refuse_torchs(self._kind, self._options, group)
            seen, lr = self._seen(group), group["lr"]
            if seen != self._sent[g]:
                self._handle.set_options(g, *self._in_words(group))
                self._sent[g], self._sent_lr[g] = seen, lr
            if isinstance(lr, torch.Tensor) or lr != self._sent_lr[g]:
                self._handle.set_lr(g, float(lr))
                self._sent_lr[g] = lr

    # ---- the step ----

    def step(self, closure: Optional[Callable[[], Any]] = None) -> Any:
        """Updates every parameter that has a gradient. The closure, if given, is called first."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._send_changes()
        self._is_stale = True
        self._handle.step()
        return loss

    def skipped_steps(self) -> int:
        """Returns how many steps changed nothing because of `finite_check`. Waits for a GPU."""
        return int(self._handle.skipped_steps())

    def clip_gradient_norm(self, max_norm: float, norm_type: float = 2.0, group: Optional[int] = None) -> None:
        """From the next step on scales gradients so that the norm of all of them is at most `max_norm`, inside the update
        and without waiting for a GPU, in the place of `torch.nn.utils.clip_grad_norm_`. 0: no more. Not for 1-bit optimizers.
        `norm_type` is the norm's order, > 0 or `math.inf`. With `group`, a number of `param_groups`, the gradients of that
        group alone are clipped, by their own norm; each call is about one group, and others stay as they are."""
        norm = (float(max_norm), float(norm_type))
        self._call(self._handle.clip_gradient_norm, *norm, group)
        if norm[0] > 0:
            self._clips[group] = norm
        else:
            self._clips.pop(group, None)

    def gradient_norm(self) -> float:
        """Returns the Euclidean norm of all gradients of the last step before they were clipped. Waits for a GPU."""
        return float(self._call(self._handle.gradient_norm))

    # ---- parameters that grow, and rows of them ----

    def replace(self, parameters: Iterable[tuple[torch.Tensor, torch.Tensor]], rows: torch.Tensor) -> None:
        """Puts each second tensor in the place of its first in the group, with its name and state: row i has the state of the
        old row `rows[i]`, or where that is -1 begins anew. `rows`: int64, one number for each row of the new tensors, whose
        values, and those in the model, are yours. All of it or, with a ValueError, nothing. Waits for a GPU."""
        pairs = [tuple(pair) for pair in parameters]
        self._send_changes()
        self._call(self._handle.replace, [before for before, _ in pairs], [after for _, after in pairs], rows)
        self._put_in_place(pairs)

    def append_rows(self, parameters: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> list[torch.nn.Parameter]:
        """Puts the rows of each second tensor behind those of its first, which keeps its name and state; new rows begin anew.
        Returns what takes the parameters' places, for the model. Memory is that of before while there is room, and where there
        is none, new memory has room for as many rows again. All of it or, with a ValueError, nothing. A GPU is waited for
        where it counts the steps (clipping, finite_check) alone, and for state in 8 bits."""
        pairs = [tuple(pair) for pair in parameters]
        self._send_changes()
        grown = self._call(self._handle.append_rows, [before for before, _ in pairs], [more for _, more in pairs])
        for parameter in grown:
            parameter._is_param = True  # modules take it as a Parameter
        self._put_in_place([(before, after) for (before, _), after in zip(pairs, grown)])
        return list(grown)

    def _put_in_place(self, pairs: list[tuple[torch.Tensor, ...]]) -> None:
        place = {id(before): after for before, after in pairs}
        for group, params in zip(self.param_groups, self._params):
            params[:] = [place.get(id(parameter), parameter) for parameter in params]
            group["params"] = list(params)
        for before, _ in pairs:
            self.__dict__["state"].pop(before, None)
            self._visible.pop(before, None)
        self._is_stale = True

    def set_visible_rows(self, parameters: Iterable[torch.Tensor], visible: Optional[torch.Tensor]) -> None:
        """Until the next call, steps change only those rows of these parameters whose number in `visible` is true, at the cost
        of those. `visible`: bool, one number for each row, on the parameters' device; it is held and not copied, and may be
        written to before each step. None: all rows again. Norms of gradients are of all rows."""
        chosen = list(parameters)
        self._send_changes()
        self._call(self._handle.set_visible_rows, chosen, visible)
        for parameter in chosen:
            if visible is None:
                self._visible.pop(parameter, None)
            else:
                self._visible[parameter] = visible

    # ---- state ----

    @property
    def state(self) -> defaultdict[torch.Tensor, Any]:  # type: ignore[override]
        """By parameter: step, exp_avg, exp_avg_sq and what else there is. The tensors are the optimizer's own and
        may be changed in place; for other tensors use load_state_dict. On a GPU with `finite_check` reading it waits."""
        if self._is_stale:
            self.__dict__["state"] = self._read_state()
            self._is_stale = False
        return self.__dict__["state"]

    @state.setter
    def state(self, value: defaultdict[torch.Tensor, Any]) -> None:
        if self._params:
            raise ValueError(f"{self._kind}: state is C++'s and cannot be replaced; use load_state_dict.")
        self.__dict__["state"] = value

    def _read_state(self) -> defaultdict[Any, Any]:
        state = self.__dict__["state"]
        for g, params in enumerate(self._params):
            for parameter, fields in zip(params, self._handle.state(g)):
                if fields:
                    state[parameter] = dict(fields)
        return state

    def state_dict(self) -> dict[str, Any]:
        """As torch's, which also says whether weight decay is decoupled."""
        packed = super().state_dict()
        if self._is_decoupled is not None:
            for group in packed["param_groups"]:
                group["decoupled_weight_decay"] = self._is_decoupled
        return packed

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continues from a state_dict of this class or of torch's optimizer of the same rule. Where both have names for the
        parameters of a group, those decide, else positions. Moments keep their dtype, whatever the parameters' is."""
        own = ("state", "param_groups", "_handle", "_params", "_sent", "_sent_lr", "_is_stale")
        former = {name: self.__dict__[name] for name in own}
        last = self.register_load_state_dict_pre_hook(self._remember)
        try:
            super().load_state_dict(state_dict)
        except Exception:
            self.__dict__.update(former)
            raise
        finally:
            last.remove()
            self.__dict__.pop("_loading", None)

    @staticmethod
    def _remember(self: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
        self._loading = self._by_name(state_dict)
        return self._loading

    def _by_name(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Returns it with the parameters of each group in this optimizer's order, where both sides have names for them.
        Raises ValueError where the names are others, and where the options are another optimizer's."""
        groups = []
        for own, saved in zip(self.param_groups, state_dict["param_groups"]):
            for name in sorted(self._of_others & saved.keys()):
                raise ValueError(f'{self._kind}: the state to load has the option "{name}", so another optimizer saved it.')
            names, saved_names = list(own.get("param_names", [])), list(saved.get("param_names", []))
            if len(names) == len(saved_names) and names != saved_names:
                place = {name: i for i, name in enumerate(saved_names)}
                for name in names:
                    if name not in place:
                        raise ValueError(
                            f'{self._kind}: the state to load has no parameter "{name}" (the first that it has is '
                            f'"{saved_names[0]}"); give parameters the names that were saved, or none.'
                        )
                params = [saved["params"][place[name]] for name in names]
                saved = {**saved, "params": params, "param_names": names}
            groups.append(saved)
        # torch refuses where one side has more groups
        return {**state_dict, "param_groups": groups + list(state_dict["param_groups"][len(groups) :])}

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_clips": self._clips, "_visible": self._visible}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Puts in force what load_state_dict, copy.deepcopy or pickle brings, in a new optimizer of C++."""
        super().__setstate__(state)
        self.__dict__.setdefault("_visible", {})
        self.__dict__.setdefault("_clips", {})
        if max_norm := self.__dict__.pop("_max_norm", 0.0):  # in pickles from before there were other norms
            self._clips[None] = (max_norm, 2.0)
        self.defaults.pop("differentiable", None)
        for group in self.param_groups:
            options_of.refuse_torchs(self._kind, self._options, group)
            for name in options_of.OF_TORCH - self._options.keys():
                group.pop(name, None)
            for name, value in self.defaults.items():
                group.setdefault(name, value)
        self._make_handle(self.defaults)
        for group in self.param_groups:
            self._hand_over(group)
        for group, (max_norm, norm_type) in self._clips.items():
            self._handle.clip_gradient_norm(max_norm, norm_type, group)
        for parameter, visible in self._visible.items():
            self._handle.set_visible_rows([parameter], visible)
        self._put_state()

    def _put_state(self) -> None:
        """Gives the new optimizer of C++ the state that is being loaded."""
        loaded = self._uncast()
        for g, params in enumerate(self._params):
            for i, parameter in enumerate(params):
                if fields := loaded.get(parameter):
                    fields = {name: value for name, value in fields.items() if value is not None}
                    self._check_state(parameter, fields)
                    # torch's SGD counts no steps; the first one made its buffer
                    step = torch.as_tensor(fields.get("step", float(bool(fields))), dtype=torch.float64).reshape(())
                    tensors = {name: value.detach() for name, value in fields.items() if name != "step"}
                    self._handle.set_state(g, i, {**tensors, "step": step})

    def _check_state(self, parameter: torch.Tensor, fields: dict[str, Any]) -> None:
        """Raises ValueError for state of another optimizer, or of other parameters."""
        advice = "load the state of an optimizer of this class with the same parameters."
        for name in sorted(self._needed - fields.keys()):
            raise ValueError(f'{self._kind}: the state to load has no "{name}"; {advice}')
        for name in sorted(fields.keys() - self._known):
            raise ValueError(f'{self._kind}: the state to load has "{name}", which is not known here; {advice}')
        for name in sorted(fields.keys() - {"step"}):
            shape = tuple(fields[name].shape) if isinstance(fields[name], torch.Tensor) else None
            if shape != _shape_of(name, parameter):
                raise ValueError(
                    f'{self._kind}: "{name}" of the state to load is of shape {shape}, but its parameter of shape '
                    f"{tuple(parameter.shape)}; {advice}"
                )

    # ---- state by name, as checkpoints of C++ hold it ----

    def _place(self) -> tuple[int, int]:
        """Returns this rank, and of how many that train together."""
        return 0, 1

    def _name_parameters(self, model: torch.nn.Module) -> None:
        named = dict(model.named_parameters())
        of_model = {id(parameter) for parameter in named.values()}
        for g, group in enumerate(self.param_groups):
            for i, parameter in enumerate(group["params"]):
                if id(parameter) not in of_model:
                    raise ValueError(
                        f"{self._kind}: parameter {i} of group {g}, of shape {tuple(parameter.shape)}, is none of this "
                        "model's; give the model and the optimizer that was made of its parameters."
                    )
        self._call(self._handle.name_parameters, list(named), list(named.values()))

    def _export_by_name(self, model: torch.nn.Module) -> tuple[Any, Any]:
        """Returns state and options, and what this rank carries."""
        self._name_parameters(model)
        self._send_changes()
        return self._handle.export_state(), self._handle.export_rank_state()

    def _prepare_import(
        self, model: torch.nn.Module, state: Any, errors: Optional[Any], all_errors: Callable[[], Any]
    ) -> None:
        """Checks what was exported, and makes it ready. `errors`: this rank's own, None where other ranks saved. Where
        they do not fit, those of each rank that saved are read and joined. One that fails changes nothing."""
        self._name_parameters(model)
        if errors is None or not self._handle.fits_rank_state(state, errors):
            errors = self._call(self._handle.join_rank_states, state, all_errors())
        self._call(self._handle.prepare_import, state, errors)

    def _commit_import(self) -> None:
        """Goes on from what _prepare_import made ready."""
        self._handle.commit_import()
        self.__dict__["state"] = defaultdict(dict)
        self._is_stale = True
        for g, group in enumerate(self.param_groups):
            numbers, choices = self._handle.options(g)
            options_of.from_words(self._options, numbers, choices, group)
            self._sent[g], self._sent_lr[g] = self._seen(group), group["lr"]

    def _uncast(self) -> dict[torch.Tensor, dict[str, Any]]:
        """Returns the state as it was saved: torch's load_state_dict rounds moments to the parameters' dtype."""
        loaded = self.__dict__["state"]
        if not hasattr(self, "_loading"):
            return loaded
        for group, saved_group in zip(self.param_groups, self._loading["param_groups"]):
            for parameter, key in zip(group["params"], saved_group["params"]):
                for name, value in self._loading["state"].get(key, {}).items():
                    if isinstance(value, torch.Tensor):
                        where = "cpu" if name in _NUMBERS else parameter.device
                        loaded[parameter][name] = value.to(where, copy=True)
        return loaded


_OF_STEPS = {"finite_check": False, "master_weights": "automatic", "rounding": "nearest", "seed": 0}
_SHARED = {"bias_correction": True, **_OF_STEPS, "state_bits": 32}


class FusedAdam(_FusedOptimizer):
    """Adam (Kingma & Ba, arXiv:1412.6980) with one kernel for all parameters; weight decay is L2."""

    _kind = "FusedAdam"
    _of_others = frozenset({"min_coeff", "dampening", "alpha"})
    _is_decoupled = False
    _options = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "amsgrad": False, **_SHARED}

    def __init__(
        self, params: Params, lr: Union[float, torch.Tensor] = 1e-3, **options: Unpack[FusedAdamOptions]
    ) -> None:
        super().__init__(params, lr, **options)


class FusedAdamW(_FusedOptimizer):
    """AdamW (Loshchilov & Hutter, arXiv:1711.05101): as FusedAdam, with decoupled weight decay."""

    _kind = "FusedAdamW"
    _of_others = frozenset({"min_coeff", "dampening", "alpha"})
    _is_decoupled = True
    _options = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2, "amsgrad": False, **_SHARED}

    def __init__(
        self, params: Params, lr: Union[float, torch.Tensor] = 1e-3, **options: Unpack[FusedAdamOptions]
    ) -> None:
        super().__init__(params, lr, **options)


class FusedLamb(_FusedOptimizer):
    """LAMB (You et al., arXiv:1904.00962): AdamW whose step of each tensor is scaled by its trust ratio."""

    _kind = "FusedLamb"
    _of_others = frozenset({"amsgrad", "dampening", "alpha"})
    _options = {
        "betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": 1e-2,
        "min_coeff": 0.01, "max_coeff": 10.0, "adapt": True, **_SHARED,
    }  # fmt: skip

    def __init__(
        self, params: Params, lr: Union[float, torch.Tensor] = 1e-3, **options: Unpack[FusedLambOptions]
    ) -> None:
        super().__init__(params, lr, **options)


class FusedSgd(_FusedOptimizer):
    """SGD with momentum, as torch.optim.SGD, with one kernel for all parameters; weight decay is L2."""

    _kind = "FusedSgd"
    _of_others = frozenset({"betas", "alpha"})
    _needed = frozenset()
    _known = frozenset({"step", "momentum_buffer", "master", "remainder"})
    _options = {
        "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False, "maximize": False, **_OF_STEPS,
    }  # fmt: skip

    def __init__(
        self, params: Params, lr: Union[float, torch.Tensor] = 1e-3, **options: Unpack[FusedSgdOptions]
    ) -> None:
        super().__init__(params, lr, **options)


class FusedRmsprop(_FusedOptimizer):
    """RMSprop, as torch.optim.RMSprop, with one kernel for all parameters; weight decay is L2."""

    _kind = "FusedRmsprop"
    _of_others = frozenset({"betas", "dampening"})
    _needed = frozenset({"step", "square_avg"})
    _known = frozenset({"step", "square_avg", "momentum_buffer", "grad_avg", "master", "remainder"})
    _options = {
        "alpha": 0.99, "eps": 1e-8, "weight_decay": 0.0, "momentum": 0.0, "centered": False, "maximize": False, **_OF_STEPS,
    }  # fmt: skip

    def __init__(
        self, params: Params, lr: Union[float, torch.Tensor] = 1e-2, **options: Unpack[FusedRmspropOptions]
    ) -> None:
        super().__init__(params, lr, **options)


class ScheduleFreeAdamW(_FusedOptimizer):
    """Schedule-Free AdamW (Defazio et al., arXiv:2405.15682): steps move z, which is exp_avg, and the parameters hold
    an average of all z in evaluation. Call eval() before the model is measured or saved, and train() before it goes on."""

    _kind = "ScheduleFreeAdamW"
    _of_others = frozenset({"amsgrad", "min_coeff"})
    _needed = frozenset({"step", "exp_avg", "exp_avg_sq", "weight_sum", "lr_max"})
    _options = {
        "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0,
        "warmup_steps": 0, "r": 0.0, "weight_lr_power": 2.0, **_SHARED,
    }  # fmt: skip

    def __init__(
        self, params: Params, lr: Union[float, torch.Tensor] = 2.5e-3, **options: Unpack[ScheduleFreeAdamWOptions]
    ) -> None:
        super().__init__(params, lr, **options)

    def eval(self) -> None:
        """Puts the average into the parameters, and keeps their bits. Until train() steps and state_dict are refused."""
        self._send_changes()
        self._call(self._handle.set_training, False)

    def train(self) -> None:
        """Puts the weights of training back, to the bit."""
        self._handle.set_training(True)

    def _refuse_average(self, what: str) -> None:
        if not self._handle.is_training():
            raise ValueError(f"{self._kind}: the parameters hold their average; call train() before {what}.")

    def step(self, closure: Optional[Callable[[], Any]] = None) -> Any:
        """Updates every parameter that has a gradient. The closure, if given, is called first."""
        self._refuse_average("step()")
        return super().step(closure)

    def state_dict(self) -> dict[str, Any]:
        """As torch's. It belongs to the weights of training."""
        self._refuse_average("state_dict()")
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continues from a state_dict of this class, beside the weights of training."""
        self._refuse_average("load_state_dict()")
        super().load_state_dict(state_dict)

    def __getstate__(self) -> dict[str, Any]:
        """For copies, which would take the average for the weights of training."""
        self._refuse_average("a copy is made")
        return super().__getstate__()


_OF_MUON = {
    "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1, "orthogonalize": True, "momentum": 0.95, "nesterov": True,
    "adjust_lr_fn": "match_rms_adamw", "ns_steps": 5, "ns_coefficients": "quintic", "precision": "automatic", "split": 1,
    "normalize_rows": False, "row_beta": 0.95, "cautious_decay": False,
    **_SHARED,
}  # fmt: skip


class Muon(_FusedOptimizer):
    """Muon (K. Jordan, 2024; arXiv:2502.16982) for groups of matrices, and AdamW for groups with orthogonalize=False."""

    _kind = "Muon"
    _of_others = frozenset({"amsgrad", "min_coeff", "dampening", "alpha"})
    _needed = frozenset({"step", "exp_avg"})
    _options = _OF_MUON

    def __init__(self, params: Params, lr: Union[float, torch.Tensor] = 1e-3, **options: Unpack[MuonOptions]) -> None:
        super().__init__(params, lr, **options)

    def share_products(self, communicator: Optional[Communicator]) -> None:
        """From the next step on each rank orthogonalises its part of the matrices and sends the results to the others. All
        must have the same parameters and averaged gradients, as under DistributedDataParallel; the first step compares
        them. None: each rank makes all of them, as at first. A copy of the optimizer makes all of them."""
        self._call(self._handle.share_products, communicator and communicator._handle)
