"""FusedAdam, FusedAdamW and FusedLamb as torch.optim optimizers.

The optimizer itself is C++. This file keeps torch's interface in front of it: parameter groups are dictionaries, which
each step compares with what C++ was told last; `state` is read from C++ when somebody asks for it.
"""

from __future__ import annotations

import difflib
from collections import defaultdict
from typing import Any, Callable, ClassVar, Iterable, Optional, Union

import torch
from torch.optim import Optimizer

from . import _library  # noqa: F401  (registers torch.classes.pacer)

Params = Union[Iterable[torch.Tensor], Iterable[dict[str, Any]], Iterable[tuple[str, torch.Tensor]]]

# Keys of a group that are no options of an optimizer: torch's own and those of its schedulers.
_KEYS_OF_TORCH = {
    "params", "param_names", "initial_lr", "min_lr", "max_lr", "base_momentum", "max_momentum",
}  # fmt: skip
# Options that torch's Adam and AdamW save and that mean nothing here unless they are true.
_ASKS_OF_TORCH = ("maximize", "differentiable")
_DROPPED_OF_TORCH = {*_ASKS_OF_TORCH, "foreach", "capturable", "fused", "decoupled_weight_decay"}


def _nearest(name: str, known: Iterable[str]) -> Optional[str]:
    return next(iter(difflib.get_close_matches(name, list(known), n=1, cutoff=0.7)), None)


class _FusedOptimizer(Optimizer):
    """What the optimizers share. Not used directly."""

    _options: ClassVar[dict[str, Any]]  # names and defaults

    def __init__(self, params: Params, lr: Union[float, torch.Tensor] = 1e-3, **options: Any) -> None:
        self._refuse_unknown(options)
        self._handle: Any = None
        defaults = {"lr": lr, **self._options, **options}
        self._make_handle(defaults)
        super().__init__(params, defaults)

    @classmethod
    def _refuse_unknown(cls, options: dict[str, Any]) -> None:
        for name in options:
            if name not in cls._options:
                raise TypeError(cls._unknown(name, _nearest(name, cls._options)))

    @classmethod
    def _unknown(cls, name: str, nearest: Optional[str]) -> str:
        offer = f'did you mean "{nearest}"?' if nearest else f"there are: {', '.join(cls._options)}."
        return f'{cls.__name__} has no option "{name}"; {offer}'

    # ---- options ----

    def _in_words(self, group: dict[str, Any]) -> tuple[dict[str, float], dict[str, str]]:
        """Returns a group's options as C++ takes them: numbers, and names of choices."""
        numbers: dict[str, float] = {"lr": float(group["lr"])}
        choices: dict[str, str] = {}
        for name in self._options:
            value = group[name]
            if name == "betas":
                numbers["beta1"], numbers["beta2"] = float(value[0]), float(value[1])
            elif isinstance(value, str):
                choices[name] = value
            elif value is not None:
                numbers[name] = float(value)
        if not 0 <= numbers.get("seed", 0) < 2**53:
            raise ValueError(f"{type(self).__name__}: seed must be in [0, 2**53), not {group['seed']}")
        return numbers, choices

    def _seen(self, group: dict[str, Any]) -> tuple[Any, ...]:
        return tuple([group[name] for name in self._options])

    def _world(self) -> Any:
        """Returns the ranks that train together, as C++ has them."""
        return None

    @staticmethod
    def _call(function: Callable[..., Any], *arguments: Any) -> Any:
        """Calls C++ with what a user passed, where an error means that it does not fit."""
        try:
            return function(*arguments)
        except RuntimeError as error:
            raise ValueError(str(error)) from None

    def _make_handle(self, defaults: dict[str, Any]) -> None:
        words = self._in_words(defaults)
        self._handle = self._call(torch.classes.pacer.Optimizer, type(self).__name__, *words, self._world())
        self._sent: list[tuple[Any, ...]] = []  # by group: the options that C++ has, less lr
        self._sent_lr: list[Any] = []
        self._is_stale = False  # whether C++ knows more than self.__dict__["state"]

    def _hand_over(self, group: dict[str, Any]) -> None:
        words = self._in_words(group)
        self._call(self._handle.add_group, list(group["params"]), list(group.get("param_names", [])), *words)
        self._sent.append(self._seen(group))
        self._sent_lr.append(group["lr"])

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group; what it does not say is as in the defaults."""
        for name in param_group:
            if name not in self._options and name not in _KEYS_OF_TORCH and name != "lr":
                nearest = _nearest(name, self._options)
                if nearest is not None:  # other keys are the user's own
                    raise ValueError(self._unknown(name, nearest))
        super().add_param_group(param_group)
        try:
            self._hand_over(self.param_groups[-1])
        except Exception:
            self.param_groups.pop()
            raise

    def _send_changes(self) -> None:
        for g, group in enumerate(self.param_groups):
            if self._seen(group) != self._sent[g]:
                self._handle.set_options(g, *self._in_words(group))
                self._sent[g], self._sent_lr[g] = self._seen(group), group["lr"]
            lr = group["lr"]
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
        self.__dict__["state"] = value

    def _read_state(self) -> defaultdict[Any, Any]:
        state = self.__dict__["state"]
        for g, group in enumerate(self.param_groups):
            for parameter, fields in zip(group["params"], self._handle.state(g)):
                if fields:
                    state[parameter] = dict(fields)
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continues from a state_dict of this class or of torch's optimizer of the same rule. Moments keep their dtype,
        whatever the parameters' is."""
        own = ("state", "param_groups", "_handle", "_sent", "_sent_lr", "_is_stale")
        former = {name: self.__dict__[name] for name in own}
        self._loading = state_dict
        try:
            super().load_state_dict(state_dict)
        except Exception:
            self.__dict__.update(former)
            raise
        finally:
            del self._loading

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Puts in force what load_state_dict, copy.deepcopy or pickle brings, in a new optimizer of C++."""
        super().__setstate__(state)
        self.defaults.pop("differentiable", None)
        for group in self.param_groups:
            for name in _ASKS_OF_TORCH:
                if group.get(name):
                    raise ValueError(f'{type(self).__name__} has no option "{name}", which the state to load has on.')
            for name in _DROPPED_OF_TORCH:
                group.pop(name, None)
            for name, value in self.defaults.items():
                group.setdefault(name, value)
        self._make_handle(self.defaults)
        for group in self.param_groups:
            self._hand_over(group)
        self._put_state()

    def _put_state(self) -> None:
        """Gives the new optimizer of C++ the state that is being loaded."""
        loaded = self._uncast()
        for g, group in enumerate(self.param_groups):
            for i, parameter in enumerate(group["params"]):
                fields = loaded.get(parameter)
                if fields:
                    step = fields["step"]
                    if not isinstance(step, torch.Tensor):
                        step = torch.tensor(float(step))
                    tensors = {k: v.detach() for k, v in fields.items() if isinstance(v, torch.Tensor)}
                    self._handle.set_state(g, i, {**tensors, "step": step})

    # ---- state by name, as checkpoints of C++ hold it ----

    def _require_one_rank(self) -> None:
        """Raises ValueError where one rank cannot save for all."""

    def _place(self) -> tuple[int, int]:
        """Returns this rank, and of how many that train together."""
        return 0, 1

    def _name_parameters(self, model: torch.nn.Module) -> None:
        named = dict(model.named_parameters())
        self._call(self._handle.name_parameters, list(named), list(named.values()))

    def _export_by_name(self, model: torch.nn.Module) -> tuple[Any, Any]:
        """Returns state and options, and what this rank carries."""
        self._name_parameters(model)
        self._send_changes()
        return self._handle.export_state(), self._handle.export_rank_state()

    def _import_by_name(self, model: torch.nn.Module, state: Any, errors: Any) -> None:
        """Goes on from what was exported, with the errors of each rank that saved; one that fails changes nothing."""
        self._name_parameters(model)
        self._call(self._handle.import_checkpoint, state, errors, *self._place())
        self.__dict__["state"] = defaultdict(dict)
        self._is_stale = True
        for g, group in enumerate(self.param_groups):
            numbers, choices = self._handle.options(g)
            for name, default in self._options.items():
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
                        where = "cpu" if name == "step" else parameter.device
                        loaded[parameter][name] = value.to(where, copy=True)
        return loaded


_SHARED = {"bias_correction": True, "finite_check": False, "master_weights": "automatic", "rounding": "nearest", "seed": 0}


class FusedAdam(_FusedOptimizer):
    """Adam (Kingma & Ba, arXiv:1412.6980) with one kernel for all parameters; weight decay is L2. Options beside
    torch.optim.Adam's: bias_correction, finite_check, master_weights ("automatic", "fp32", "remainder", "none"),
    rounding ("nearest", "stochastic") and seed; docs/options.md says what they mean."""

    _options = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "amsgrad": False, **_SHARED}


class FusedAdamW(_FusedOptimizer):
    """AdamW (Loshchilov & Hutter, arXiv:1711.05101): as FusedAdam, with decoupled weight decay."""

    _options = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2, "amsgrad": False, **_SHARED}


class FusedLamb(_FusedOptimizer):
    """LAMB (You et al., arXiv:1904.00962). Options beside FusedAdamW's, without amsgrad: min_coeff and max_coeff, between
    which the trust ratio is kept, and adapt, False for groups whose ratio is 1."""

    _options = {
        "betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": 1e-2,
        "min_coeff": 0.01, "max_coeff": 10.0, "adapt": True, **_SHARED,
    }  # fmt: skip
