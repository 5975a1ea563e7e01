#!/usr/bin/env python3
"""pacer.ScheduleFreeAdamW: its weights beside a restatement in torch, what the parameters hold after eval(), and what a
state_dict of it brings back."""
import copy
import unittest

import torch

import pacer
from samples import random_parameters, train

SIZES = [(24, 16), (7,), ()]
OPTIONS = {"lr": 0.01, "betas": (0.9, 0.99), "weight_decay": 0.1, "warmup_steps": 3, "r": 0.5}


def expected(steps):
    """The weights of training and of evaluation after so many steps, with x stored (arXiv:2405.15682, algorithm 1)."""
    y = [p.detach().double() for p in random_parameters(SIZES)]
    z, x, v = [p.clone() for p in y], [p.clone() for p in y], [torch.zeros_like(p) for p in y]
    weights = 0.0
    for t in range(1, steps + 1):
        generator = torch.Generator().manual_seed(10 + t - 1)
        rate = 0.01 * min(1, t / 3)
        weight = t**0.5 * rate**2
        weights += weight
        for i, p in enumerate(y):
            gradient = torch.randn(p.shape, generator=generator).double()
            v[i] = 0.99 * v[i] + 0.01 * gradient**2
            update = gradient / ((v[i] / (1 - 0.99**t)).sqrt() + 1e-8) + 0.1 * p
            z[i] = z[i] - rate * update
            x[i] = (1 - weight / weights) * x[i] + weight / weights * z[i]
            y[i] = 0.1 * z[i] + 0.9 * x[i]
    return y, x


class ScheduleFree(unittest.TestCase):
    def assert_near(self, params, wanted):
        for mine, its in zip(params, wanted):
            self.assertLess((mine.double() - its).abs().max().item(), 2e-5)

    def test_training_and_evaluation_hold_the_weights_of_the_paper(self):
        params = random_parameters(SIZES)
        optimizer = pacer.ScheduleFreeAdamW(params, **OPTIONS)
        train(optimizer, params, range(20))
        y, x = expected(20)
        self.assert_near(params, y)
        before = [p.detach().clone() for p in params]
        optimizer.eval()
        self.assert_near(params, x)
        self.assertFalse(torch.equal(params[0], before[0]))
        for what in (optimizer.step, optimizer.state_dict, lambda: optimizer.load_state_dict({}), lambda: copy.copy(optimizer)):
            with self.assertRaisesRegex(ValueError, r"the parameters hold their average; call train\(\) before"):
                what()
        optimizer.train()
        for mine, its in zip(params, before):
            self.assertTrue(torch.equal(mine, its))

    def test_a_loaded_state_goes_on_to_the_bit(self):
        params = random_parameters(SIZES)
        optimizer = pacer.ScheduleFreeAdamW(params, **OPTIONS)
        train(optimizer, params, range(4))
        self.assertEqual(set(optimizer.state[params[0]]), {"step", "exp_avg", "exp_avg_sq", "weight_sum", "lr_max"})
        self.assertEqual(optimizer.state[params[0]]["lr_max"].item(), 0.01)
        state = copy.deepcopy(optimizer.state_dict())
        others = [torch.nn.Parameter(parameter.detach().clone()) for parameter in params]
        other = pacer.ScheduleFreeAdamW(others)
        other.load_state_dict(state)
        train(optimizer, params, range(4, 8))
        train(other, others, range(4, 8))
        for mine, its in zip(params, others):
            self.assertTrue(torch.equal(mine, its))
        optimizer.eval()
        other.eval()
        for mine, its in zip(params, others):
            self.assertTrue(torch.equal(mine, its))

    def test_states_of_other_optimizers_are_refused(self):
        params = random_parameters(SIZES)
        optimizer = pacer.ScheduleFreeAdamW(params)
        for other in (pacer.FusedAdamW(params), torch.optim.AdamW(params)):
            train(other, params, range(1))
            with self.assertRaisesRegex(ValueError, "another optimizer"):
                optimizer.load_state_dict(other.state_dict())
        with self.assertRaisesRegex(ValueError, "first beta must be > 0"):
            pacer.ScheduleFreeAdamW(params, betas=(0, 0.9))


if __name__ == "__main__":
    unittest.main(verbosity=2)
