#!/usr/bin/env python3
"""pacer.FusedSgd beside torch.optim.SGD: steps with every option, and state that goes from one to the other."""
import copy
import itertools
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


def combinations():
    for momentum, dampening, decay, nesterov, maximize in itertools.product((0.0, 0.9), (0.0, 0.3), (0.0, 0.1), *[(False, True)] * 2):
        if not nesterov or (momentum and not dampening):
            yield {"momentum": momentum, "dampening": dampening, "weight_decay": decay, "nesterov": nesterov, "maximize": maximize}


class FusedSgd(unittest.TestCase):
    def near(self, mine, theirs):
        for a, b in zip(mine, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-6)

    def test_steps_are_torchs_for_every_combination_of_options(self):
        for options in combinations():
            with self.subTest(**options):
                a, b = parameters(), parameters()
                train(pacer.FusedSgd(a, lr=0.1, **options), a)
                train(torch.optim.SGD(b, lr=0.1, **options), b)
                self.near(a, b)

    def test_state_goes_to_torchs_and_back(self):
        for options in combinations():
            with self.subTest(**options):
                a, b = parameters(), parameters()
                mine, theirs = pacer.FusedSgd(a, lr=0.1, **options), torch.optim.SGD(b, lr=0.1, **options)
                train(mine, a)
                train(theirs, b)
                back, taken = torch.optim.SGD(b, lr=0.5), pacer.FusedSgd(a, lr=0.5)
                back.load_state_dict(copy.deepcopy(mine.state_dict()))
                taken.load_state_dict(copy.deepcopy(theirs.state_dict()))
                self.assertEqual({name: taken.param_groups[0][name] for name in options}, options)
                train(taken, a, range(4, 7))
                train(back, b, range(4, 7))
                self.near(a, b)

    def test_a_state_dict_goes_on_to_the_bit_and_a_copy_too(self):
        for dtype in (torch.float32, torch.bfloat16):
            with self.subTest(dtype):
                a = parameters(dtype)
                optimizer = pacer.FusedSgd(a, lr=0.1, momentum=0.9, dampening=0.2, maximize=True)
                train(optimizer, a)
                b = copy.deepcopy(a)
                other = pacer.FusedSgd(b)
                other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
                self.assertTrue(other.param_groups[0]["maximize"])
                train(optimizer, a, range(4, 7))
                train(other, b, range(4, 7))
                self.assertTrue(all(map(torch.equal, a, b)))

    def test_a_parameter_without_a_momentum_has_a_step_count_alone(self):
        params = parameters()
        plain, buffered = pacer.FusedSgd(params, lr=0.1), pacer.FusedSgd(params, lr=0.1, momentum=0.9)
        for optimizer, names in ((plain, {"step"}), (buffered, {"step", "momentum_buffer"})):
            train(optimizer, params)
            self.assertEqual(set(optimizer.state[params[0]]), names)

    def test_what_does_not_belong_is_refused(self):
        params = parameters()
        optimizer, adam = pacer.FusedSgd(params, momentum=0.9), pacer.FusedAdam(params)
        for one in (optimizer, adam):
            train(one, params)
        for one, words in ((optimizer, '"betas"'), (adam, '"dampening"')):
            with self.assertRaisesRegex(ValueError, words):
                one.load_state_dict((adam if one is optimizer else optimizer).state_dict())
        with self.assertRaisesRegex(TypeError, "betas"):
            pacer.FusedSgd(params, betas=(0.9, 0.99))
        with self.assertRaisesRegex(ValueError, "momentum above 0"):
            pacer.FusedSgd(params, nesterov=True)
        with self.assertRaisesRegex(ValueError, "differentiable"):
            pacer.FusedSgd([{"params": params, "differentiable": True}])

    def test_options_changed_between_steps_are_honoured(self):
        a, b = parameters(), parameters()
        pair = pacer.FusedSgd(a, lr=0.1, momentum=0.9), torch.optim.SGD(b, lr=0.1, momentum=0.9)
        for optimizer, params in zip(pair, (a, b)):
            train(optimizer, params)
            optimizer.param_groups[0].update(lr=0.05, momentum=0.5, weight_decay=0.1, maximize=True)
            train(optimizer, params, range(4, 7))
            optimizer.param_groups[0].update(nesterov=True)
            train(optimizer, params, range(7, 9))
        self.near(a, b)


if __name__ == "__main__":
    unittest.main()
