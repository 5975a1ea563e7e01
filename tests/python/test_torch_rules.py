#!/usr/bin/env python3
"""pacer.FusedSgd and FusedRmsprop beside those of torch.optim: steps with every option, and state that goes from one to the other."""
import copy
import itertools
import math
import unittest

import torch

import pacer


def parameters(dtype=torch.float32):
    torch.manual_seed(3)
    return [torch.nn.Parameter(torch.randn(size).to(dtype)) for size in [(4, 3), (7,), (), (300,)]]


def train(optimizer, params, steps=range(4)):
    for step in steps:
        torch.manual_seed(100 + step)
        for p in params:
            p.grad = torch.randn(p.shape).to(p.dtype)
        optimizer.step()


def combinations(values):
    return [dict(zip(values, each)) for each in itertools.product(*values.values())]


class Rule:
    """The tests, for each pair of optimizers below."""

    def near(self, mine, theirs):
        for a, b in zip(mine, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-6)

    def test_steps_are_torchs_for_every_combination_of_options(self):
        for options in self.cases:
            with self.subTest(**options):
                a, b = parameters(), parameters()
                train(self.mine(a, lr=0.1, **options), a)
                train(self.theirs(b, lr=0.1, **options), b)
                self.near(a, b)

    def test_state_goes_to_torchs_and_back(self):
        for options in self.cases:
            with self.subTest(**options):
                a, b = parameters(), parameters()
                mine, theirs = self.mine(a, lr=0.1, **options), self.theirs(b, lr=0.1, **options)
                train(mine, a)
                train(theirs, b)
                back, taken = self.theirs(b, lr=0.5), self.mine(a, lr=0.5)
                back.load_state_dict(copy.deepcopy(mine.state_dict()))
                taken.load_state_dict(copy.deepcopy(theirs.state_dict()))
                self.assertEqual({name: taken.param_groups[0][name] for name in options}, options)
                train(taken, a, range(4, 7))
                train(back, b, range(4, 7))
                self.near(a, b)

    def test_clipping_is_clip_grad_norm_s_and_stays_through_copies_and_loads(self):
        a, b = parameters(), parameters()
        mine, theirs = self.mine(a, lr=0.1), self.theirs(b, lr=0.1)
        mine.clip_gradient_norm(0.5)

        def step(optimizer, params, seed, max_norm=None):
            torch.manual_seed(seed)
            for p in params:
                p.grad = torch.randn(p.shape)
            norm = torch.nn.utils.clip_grad_norm_(params, max_norm) if max_norm else None
            optimizer.step()
            return norm

        for seed in range(3):
            step(mine, a, seed)
            norm = step(theirs, b, seed, 0.5)
            self.assertAlmostEqual(mine.gradient_norm() / norm.item(), 1, places=5)
        copied = copy.deepcopy(mine)
        before = copy.deepcopy({**mine.__getstate__(), "_max_norm": 0.5})  # as older versions had it
        del before["_clips"]
        older = type(mine).__new__(type(mine))
        older.__setstate__(before)
        mine.load_state_dict(copy.deepcopy(mine.state_dict()))
        step(mine, a, 7)
        step(copied, copied.param_groups[0]["params"], 7)
        step(older, older.param_groups[0]["params"], 7)
        step(theirs, b, 7, 0.5)
        self.near(a, b)
        self.near(copied.param_groups[0]["params"], b)
        self.near(older.param_groups[0]["params"], b)
        mine.clip_gradient_norm(0)
        step(mine, a, 8)
        step(theirs, b, 8)
        self.near(a, b)
        for wrong in (-1, float("nan")):
            with self.assertRaisesRegex(ValueError, "needs a finite norm"):
                mine.clip_gradient_norm(wrong)
        with self.assertRaisesRegex(ValueError, "call that first"):
            mine.gradient_norm()

    def test_groups_are_clipped_by_their_own_norms_of_any_order_and_copies_too(self):
        a, b = parameters(), parameters()
        split = lambda params: [{"params": params[:1]}, {"params": params[1:]}]
        mine, theirs = self.mine(split(a), lr=0.1), self.theirs(split(b), lr=0.1)
        mine.clip_gradient_norm(0.5, norm_type=1, group=0)
        mine.clip_gradient_norm(0.25, norm_type=math.inf, group=1)
        copied = copy.deepcopy(mine)
        copies = [p for group in copied.param_groups for p in group["params"]]
        for seed in range(3):
            torch.manual_seed(seed)
            for ours, copied_one, other in zip(a, copies, b):
                ours.grad = torch.randn(ours.shape)
                copied_one.grad, other.grad = ours.grad.clone(), ours.grad.clone()
            torch.nn.utils.clip_grad_norm_(b[:1], 0.5, 1)
            torch.nn.utils.clip_grad_norm_(b[1:], 0.25, math.inf)
            mine.step()
            copied.step()
            theirs.step()
        self.near(a, b)
        self.near(copies, b)
        for wrong in ({"norm_type": 0}, {"norm_type": float("nan")}, {"group": 2}, {"group": -1}):
            with self.assertRaisesRegex(ValueError, "norm_type > 0|parameter group 2|numbered from 0"):
                mine.clip_gradient_norm(1.0, **wrong)
        with self.assertRaisesRegex(ValueError, "set that to 0 first"):
            mine.clip_gradient_norm(1.0)
        mine.clip_gradient_norm(0, group=0)
        mine.clip_gradient_norm(0, group=1)
        mine.clip_gradient_norm(0.5, norm_type=1)
        for p, other in zip(a, b):
            p.grad = torch.ones(p.shape)
            other.grad = torch.ones(p.shape)
        torch.nn.utils.clip_grad_norm_(b, 0.5, 1)
        mine.step()
        theirs.step()
        self.near(a, b)

    def test_a_state_dict_goes_on_to_the_bit_and_a_copy_too(self):
        for dtype in (torch.float32, torch.bfloat16):
            with self.subTest(dtype):
                a = parameters(dtype)
                optimizer = self.mine(a, lr=0.1, momentum=0.9, maximize=True, **self.changed)
                train(optimizer, a)
                b = copy.deepcopy(a)
                other = self.mine(b)
                other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
                self.assertTrue(other.param_groups[0]["maximize"])
                train(optimizer, a, range(4, 7))
                train(other, b, range(4, 7))
                self.assertTrue(all(map(torch.equal, a, b)))

    def test_a_state_has_the_tensors_that_its_options_need(self):
        for options, names in self.tensors:
            params = parameters()
            optimizer = self.mine(params, **options)
            train(optimizer, params)
            self.assertEqual(set(optimizer.state[params[0]]), {"step", *names})

    def test_what_does_not_belong_is_refused(self):
        params = parameters()
        kinds = (pacer.FusedAdam, pacer.FusedSgd, pacer.FusedRmsprop)
        saved = {kind: kind(params) for kind in kinds}
        for optimizer in saved.values():
            train(optimizer, params)
        for other, optimizer in saved.items():
            if other is not self.mine:
                for one, two in ((self.mine, other), (other, self.mine)):
                    with self.assertRaisesRegex(ValueError, "another optimizer saved it"):
                        one(params).load_state_dict(saved[two].state_dict())
        with self.assertRaisesRegex(TypeError, "betas"):
            self.mine(params, betas=(0.9, 0.99))
        with self.assertRaisesRegex(ValueError, "momentum"):
            self.mine(params, momentum=1.0)
        with self.assertRaisesRegex(ValueError, "differentiable"):
            self.mine([{"params": params, "differentiable": True}])

    def test_options_changed_between_steps_are_honoured(self):
        a, b = parameters(), parameters()
        pair = self.mine(a, lr=0.1, momentum=0.9), self.theirs(b, lr=0.1, momentum=0.9)
        for optimizer, params in zip(pair, (a, b)):
            train(optimizer, params)
            optimizer.param_groups[0].update(lr=0.05, momentum=0.5, weight_decay=0.1, maximize=True)
            train(optimizer, params, range(4, 7))
            optimizer.param_groups[0].update(self.later)
            train(optimizer, params, range(7, 9))
        self.near(a, b)


class FusedSgd(Rule, unittest.TestCase):
    mine, theirs = pacer.FusedSgd, torch.optim.SGD
    cases = [
        case
        for case in combinations({
            "momentum": (0.0, 0.9), "dampening": (0.0, 0.3), "weight_decay": (0.0, 0.1),
            "nesterov": (False, True), "maximize": (False, True),
        })  # fmt: skip
        if not case["nesterov"] or (case["momentum"] and not case["dampening"])
    ]
    changed, later = {"dampening": 0.2}, {"nesterov": True}
    tensors = [({}, ()), ({"momentum": 0.9}, ("momentum_buffer",))]

    def test_nesterovs_momentum_needs_a_momentum(self):
        with self.assertRaisesRegex(ValueError, "momentum above 0"):
            pacer.FusedSgd(parameters(), nesterov=True)


class FusedRmsprop(Rule, unittest.TestCase):
    mine, theirs = pacer.FusedRmsprop, torch.optim.RMSprop
    cases = combinations({
        "alpha": (0.9, 0.99), "eps": (1e-8, 0.1), "weight_decay": (0.0, 0.1), "momentum": (0.0, 0.9),
        "centered": (False, True), "maximize": (False, True),
    })  # fmt: skip
    changed, later = {"alpha": 0.9, "centered": True}, {"alpha": 0.8, "eps": 0.01}
    tensors = [
        ({}, ("square_avg",)),
        ({"momentum": 0.9}, ("square_avg", "momentum_buffer")),
        ({"centered": True}, ("square_avg", "grad_avg")),
    ]


if __name__ == "__main__":
    unittest.main()
