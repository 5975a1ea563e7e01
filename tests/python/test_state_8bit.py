#!/usr/bin/env python3
"""state_bits=8: what the state is, that it resumes to the bit, and that it loads from and into 32 bits."""
import copy
import unittest

import torch

import pacer
from samples import random_parameters, train

SIZES = [(24, 16), (33,), ()]


def parameters():
    return random_parameters(SIZES)


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b))


class StateIn8Bits(unittest.TestCase):
    def test_moments_are_codes_with_scales(self):
        for kind in (pacer.FusedAdam, pacer.FusedAdamW, pacer.FusedLamb):
            params = parameters()
            optimizer = kind(params, lr=0.01, state_bits=8)
            train(optimizer, params, range(2))
            for parameter in params:
                state = optimizer.state[parameter]
                self.assertEqual((state["exp_avg"].dtype, state["exp_avg_sq"].dtype), (torch.int8, torch.uint8))
                self.assertEqual(state["exp_avg"].shape, parameter.shape)
                self.assertEqual(state["exp_avg_scale"].dtype, torch.float16)
                self.assertEqual(state["exp_avg_sq_scale"].shape, ((parameter.numel() + 31) // 32,))

    def test_a_state_dict_and_a_copy_go_on_to_the_bit(self):
        a, b = parameters(), parameters()
        optimizer, other = pacer.FusedAdamW(a, lr=0.01, state_bits=8), pacer.FusedAdamW(b, lr=0.01)
        train(optimizer, a, range(3))
        train(other, b, range(3))
        c = copy.deepcopy(a)
        third = pacer.FusedAdamW(c, lr=0.01, state_bits=8)
        third.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        self.assertEqual(other.param_groups[0]["state_bits"], 8)
        with torch.no_grad():
            for mine, theirs in zip(b, a):
                mine.copy_(theirs)
        for mine, params in ((optimizer, a), (other, b), (third, c)):
            train(mine, params, range(3, 6))
        self.assertTrue(same(a, b) and same(a, c))

    def test_a_matrix_of_muon_has_one_moment_in_codes(self):
        params = random_parameters([(24, 16), (5, 9)])
        optimizer = pacer.Muon(params, lr=0.01, state_bits=8)
        train(optimizer, params, range(2))
        for parameter in params:
            state = optimizer.state[parameter]
            self.assertEqual(state["exp_avg"].dtype, torch.int8)
            self.assertEqual(state["exp_avg_scale"].shape, ((parameter.numel() + 31) // 32,))
            self.assertNotIn("exp_avg_sq_scale", state)
        again = copy.deepcopy(params)
        other = pacer.Muon(again, lr=0.01, state_bits=8)
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        train(optimizer, params, range(2, 5))
        train(other, again, range(2, 5))
        self.assertTrue(same(params, again))

    def test_a_group_changes_its_bits_between_steps(self):
        params, wide = parameters(), parameters()
        optimizer = pacer.FusedAdamW([{"params": params[:1], "state_bits": 8}, {"params": params[1:]}], lr=0.01)
        train(optimizer, params, range(3))
        self.assertEqual(optimizer.state[params[0]]["exp_avg"].dtype, torch.int8)
        self.assertEqual(optimizer.state[params[1]]["exp_avg"].dtype, torch.float32)
        optimizer.param_groups[0]["state_bits"] = 32
        train(optimizer, params, range(3, 6))
        train(pacer.FusedAdamW(wide, lr=0.01), wide, range(6))
        self.assertEqual(optimizer.state[params[0]]["exp_avg"].dtype, torch.float32)
        self.assertLess((params[0] - wide[0]).abs().max().item(), 0.02)
        self.assertTrue(same(params[1:], wide[1:]))

    def test_what_does_not_fit_is_refused(self):
        params = parameters()
        with self.assertRaisesRegex(ValueError, "state_bits must be 8 or 32, not 16"):
            pacer.FusedAdamW(params, state_bits=16)
        with self.assertRaisesRegex(ValueError, "amsgrad"):
            pacer.FusedAdamW(params, state_bits=8, amsgrad=True)
        with self.assertRaisesRegex(ValueError, "each rank's own stays in 32 bits"):
            pacer.OneBitMuon([torch.nn.Parameter(torch.ones(4, 4))], state_bits=8)
        with self.assertRaisesRegex(TypeError, "state_bits"):
            pacer.OneBitAdam(params, state_bits=8)
        optimizer = pacer.FusedAdamW(params, state_bits=8)
        train(optimizer, params, range(1))
        state = copy.deepcopy(optimizer.state_dict())
        state["state"][0]["exp_avg_scale"] = torch.zeros(3, dtype=torch.float16)
        with self.assertRaisesRegex(ValueError, "exp_avg_scale"):
            optimizer.load_state_dict(state)


if __name__ == "__main__":
    unittest.main()
