#!/usr/bin/env python3
"""FusedAdam and FusedAdamW on the inputs of torch's own optimizer tests, beside torch.optim.Adam and AdamW.

PYTHONPATH names the package. The inputs come from torch.testing._internal.common_optimizers, as the installed torch has them.
"""
import copy
import sys
import types
import unittest

import torch
from torch.optim import lr_scheduler, swa_utils
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import pacer

try:
    import numpy  # noqa: F401
except ImportError:
    sys.exit(print("PACER_SKIPPED: the inputs of torch's own tests need numpy"))
try:
    import expecttest  # noqa: F401
except ImportError:  # torch's module takes the base class of its tests from there, which has no part in what is used here
    sys.modules["expecttest"] = types.SimpleNamespace(TestCase=unittest.TestCase)
from torch.testing._internal import common_optimizers

MINE = {torch.optim.Adam: pacer.FusedAdam, torch.optim.AdamW: pacer.FusedAdamW}
INFOS = [info for info in common_optimizers.optim_db if info.optim_cls in MINE]
REFUSED = ("foreach", "fused", "capturable", "maximize", "differentiable")


def tensors(dtype=torch.float32):
    """Parameters of all forms: none and one element, no dimensions, not contiguous, without a gradient."""
    torch.manual_seed(3)
    whole = [torch.randn(size, dtype=torch.float64) for size in [(2, 3), (3,), (1,), (), (0,), (0, 4), (3, 1, 5), (1031,)]]
    cut = [torch.randn(10, 5, 2)[..., 0], torch.randn(6, 4).t(), torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)]
    return [torch.nn.Parameter(t.to(dtype)) for t in whole + cut]


def set_gradients(params, step):
    """Gradients that lie in memory in another way than their parameters; the second has none, the third one of zero."""
    torch.manual_seed(100 + step)
    for i, p in enumerate(params):
        gradient = torch.randn(*p.shape, 2)[..., 0].to(p.dtype)
        p.grad = None if i == 1 else gradient * 0 if i == 2 else gradient


def train(optimizer, params, steps, after=lambda: None):
    for step in steps:
        set_gradients(params, step)
        optimizer.step()
        after()


class Case(unittest.TestCase):
    def near(self, mine, theirs, rtol=2e-5, atol=2e-6):
        for a, b in zip(mine, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=rtol, atol=atol, check_stride=False)

    def refuses(self, error, words, work):
        with self.assertRaisesRegex(error, words) as caught:
            work()
        self.assertNotIn("\n", str(caught.exception))


class Inputs(Case):
    def test_steps_are_torchs_for_every_input_and_what_does_not_exist_is_refused_by_name(self):
        asked = set()
        for info in INFOS:
            mine = MINE[info.optim_cls]
            inputs = common_optimizers._get_optim_inputs_including_global_cliquey_kwargs("cuda", None, info)
            for each in inputs:
                options = {k: v for k, v in each.kwargs.items() if k not in REFUSED}
                for name in [name for name in REFUSED if each.kwargs.get(name)]:
                    asked.add(name)
                    self.refuses(TypeError, f'no option "{name}"', lambda: mine(tensors(), **options, **{name: True}))
                with self.subTest(info.name, input=each.desc):
                    for dtype in (torch.float32, torch.float64):
                        a, b = tensors(dtype), tensors(dtype)
                        train(mine(a, **copy.deepcopy(options)), a, range(7))
                        train(info.optim_cls(b, **copy.deepcopy(options)), b, range(7))
                        self.near(a, b)
        self.assertEqual(asked, set(REFUSED))

    def test_a_closure_with_the_schedulers_of_torchs_tests_goes_where_torch_goes(self):
        for info in INFOS:
            for make_schedulers in info.scheduler_inputs:
                for last in (lambda t: t, lambda t: torch.stack([t, t + 1], -1)[..., 0]):  # the latter is not contiguous
                    ends = []
                    for kind in (MINE[info.optim_cls], info.optim_cls):
                        torch.manual_seed(1)
                        weight, bias = (torch.nn.Parameter(last(torch.randn(size))) for size in [(10, 5), (10,)])
                        x = torch.randn(5)
                        optimizer = kind([{"params": [weight]}, {"params": [bias], "lr": 1e-2}], lr=0.1)
                        schedulers = [make(optimizer) for make in make_schedulers]

                        def closure():
                            optimizer.zero_grad()
                            loss = (weight.mv(x) + bias).pow(2).sum()
                            loss.backward()
                            return loss

                        losses = []
                        for _ in range(20):
                            losses.append(optimizer.step(closure).detach())
                            for scheduler in schedulers:
                                is_plateau = isinstance(scheduler, lr_scheduler.ReduceLROnPlateau)
                                scheduler.step(losses[-1]) if is_plateau else scheduler.step()
                        ends.append([weight, bias, *losses, *[torch.tensor(g["lr"]) for g in optimizer.param_groups]])
                    self.near(*ends, rtol=2e-4, atol=2e-5)
                    self.assertLess(losses[-1], losses[0])

    def test_error_inputs_are_refused(self):
        taken = {"betas must be either both floats or both Tensors"}  # either is taken for its number
        warned = {"warn on a bare unordered set of params"}  # since torch 2.15, by its base class
        for info in INFOS:
            for each in info.optim_error_inputs_func("cpu", torch.float32):
                inputs, mine = each.optimizer_error_input, MINE[info.optim_cls]
                make = lambda: mine(tensors() if inputs.params is None else inputs.params, **inputs.kwargs)
                with self.subTest(info.name, input=inputs.desc):
                    if inputs.desc in taken:
                        a, b = tensors(), tensors()
                        train(mine(a, **inputs.kwargs), a, range(3))
                        train(info.optim_cls(b, lr=1e-2, betas=(0.9, 0.99)), b, range(3))
                        self.near(a, b)
                    elif "foreach" in inputs.kwargs:
                        self.refuses(TypeError, 'no option "foreach"', make)
                    elif inputs.desc in warned:
                        with self.assertWarnsRegex(each.error_type, each.error_regex):
                            make()
                    elif issubclass(each.error_type, Warning):
                        with self.assertWarnsRegex(each.error_type, each.error_regex):
                            self.refuses(ValueError, "", make)
                    else:
                        self.refuses(each.error_type, "", make)

    def test_16_bit_parameters_are_torchs_fp32_ones_rounded(self):
        for theirs, mine in MINE.items():
            for dtype, rtol in [(torch.bfloat16, 2**-7), (torch.float16, 2**-10)]:
                a = tensors(dtype)
                b = [torch.nn.Parameter(p.detach().float()) for p in a]
                optimizer, reference = mine(a, lr=0.01), theirs(b, lr=0.01)
                for step in range(20):
                    set_gradients(a, step)
                    for p, q in zip(a, b):
                        q.grad = None if p.grad is None else p.grad.float()
                    optimizer.step()
                    reference.step()
                self.near(a, [q.to(dtype) for q in b], rtol=rtol, atol=1e-5)

    def test_parameters_of_several_dtypes_go_together_under_any_default_dtype(self):
        for theirs, mine in MINE.items():
            for default in (torch.float32, torch.float64):
                torch.set_default_dtype(default)
                try:
                    a, b = (tensors(torch.float32)[:6] + tensors(torch.float64)[6:] for _ in range(2))
                    x, y = mine(a, lr=0.01), theirs(b, lr=0.01)
                    train(x, a, range(2))
                    train(y, b, range(2))
                    x.load_state_dict(y.state_dict())
                    train(x, a, range(2, 5))
                    train(y, b, range(2, 5))
                    self.near(a, b)
                finally:
                    torch.set_default_dtype(torch.float32)


class Schedulers(Case):
    MAKERS = {
        "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
        "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.9),
        "StepLR": lambda o: lr_scheduler.StepLR(o, 3, 0.5),
        "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 5], 0.5),
        "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.4, 4),
        "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.1, total_iters=5),
        "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
        "SequentialLR": lambda o: lr_scheduler.SequentialLR(
            o, [lr_scheduler.ConstantLR(o, 0.5, 3), lr_scheduler.ExponentialLR(o, 0.9)], [3]
        ),
        "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 6, 0.9),
        "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 6),
        "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
            [lr_scheduler.ConstantLR(o, 0.5, 3), lr_scheduler.ExponentialLR(o, 0.9)]
        ),
        "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1),
        "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, 2),
        "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
        "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=12),
        "SWALR": lambda o: swa_utils.SWALR(o, 0.01, 4),
    }

    def test_every_scheduler_of_torch_works_and_resumes(self):
        of_torch = {
            name
            for module in (lr_scheduler, swa_utils)
            for name, kind in vars(module).items()
            if isinstance(kind, type) and issubclass(kind, lr_scheduler.LRScheduler) and not name.endswith("LRScheduler")
        }
        self.assertEqual(of_torch, set(self.MAKERS))
        for name, make in self.MAKERS.items():
            for theirs, mine in MINE.items():
                for lr in (0.05, torch.tensor(0.05)):
                    with self.subTest(name, optimizer=mine.__name__, lr=type(lr).__name__):
                        self.compare(make, theirs, mine, lr)

    def compare(self, make, theirs, mine, lr):
        def begin(kind):
            params = tensors()
            optimizer = kind(params, lr=copy.deepcopy(lr))
            scheduler = make(optimizer)
            is_plateau = isinstance(scheduler, lr_scheduler.ReduceLROnPlateau)
            return params, optimizer, scheduler, (lambda: scheduler.step(1.0)) if is_plateau else scheduler.step

        a, x, of_x, advance_x = begin(mine)
        b, y, _, advance_y = begin(theirs)
        train(x, a, range(5), advance_x)
        train(y, b, range(5), advance_y)
        c, z, of_z, advance_z = begin(mine)
        of_z.load_state_dict(of_x.state_dict())
        z.load_state_dict(copy.deepcopy(x.state_dict()))
        for p, q in zip(a, c):
            q.data = p.detach().clone()
        for optimizer, params, advance in [(x, a, advance_x), (y, b, advance_y), (z, c, advance_z)]:
            train(optimizer, params, range(5, 9), advance)
        self.near(a, b)
        for p, q in zip(a, c):
            self.assertTrue(torch.equal(p, q))
        for key in ("lr", "betas"):
            self.assertEqual(x.param_groups[0][key], y.param_groups[0][key])


class Hooks(Case):
    def test_hooks_are_called_when_and_with_what_torch_calls_them(self):
        for theirs, mine in MINE.items():
            events = [self.events_of(kind) for kind in (mine, theirs)]
            self.assertEqual(*events)
            self.assertGreater(len(events[0]), 10)

    def events_of(self, kind):
        params, events = tensors(), []
        optimizer = kind(params, lr=0.01)
        note = lambda name, result=None: lambda *given: events.append((name, len(given))) or result
        handles = [
            register_optimizer_step_pre_hook(note("all, before")),
            register_optimizer_step_post_hook(note("all, after")),
            optimizer.register_step_pre_hook(lambda o, args, kwargs: ((o, lambda: events.append("closure") or 7), {})),
            optimizer.register_step_post_hook(note("after")),
            optimizer.register_state_dict_pre_hook(note("before state_dict")),
            optimizer.register_state_dict_pre_hook(note("first before state_dict"), prepend=True),
            optimizer.register_state_dict_post_hook(lambda o, state: {**state, "note": 1}),
            optimizer.register_load_state_dict_post_hook(note("loaded")),
            optimizer.register_load_state_dict_pre_hook(note("before load")),
        ]
        set_gradients(params, 1)
        events.append(optimizer.step())
        events.append(sorted(optimizer.state_dict()))
        optimizer.load_state_dict(optimizer.state_dict())
        for handle in handles:
            handle.remove()
        events.append(optimizer.step())
        return events

    def test_what_a_hook_puts_in_place_of_a_state_dict_is_loaded(self):
        for theirs, mine in MINE.items():
            ends = []
            for kind in (mine, theirs):
                params = tensors()
                optimizer = kind(params, lr=0.01)
                train(optimizer, params, range(3))

                def halve(_, state_dict):
                    state = {k: {**v, "exp_avg": v["exp_avg"] / 2} for k, v in state_dict["state"].items()}
                    return {**state_dict, "state": state}

                optimizer.register_load_state_dict_pre_hook(halve)
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
                train(optimizer, params, range(3, 5))
                ends.append(params)
            self.near(*ends)


if __name__ == "__main__":
    unittest.main()
