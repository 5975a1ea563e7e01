#!/usr/bin/env python3
"""pacer.Muon beside torch.optim.Muon, and what a state_dict of it brings back."""
import copy
import unittest

import torch

import pacer
from ranks import run_job
from samples import random_parameters, train

SIZES = [(24, 16), (16, 24), (32, 32)]


def matrices():
    return random_parameters(SIZES)


def job_shared(rank, folder):
    """Two ranks share the products: each sends the results of its own, and parameters move as by one rank."""
    world = pacer.Communicator()
    params, alone = matrices(), matrices()
    optimizer = pacer.Muon(params)
    optimizer.share_products(world)
    train(optimizer, params, range(3))
    assert world.bytes_sent() > 0
    train(pacer.Muon(alone), alone, range(3))
    for mine, its in zip(params, alone):
        assert torch.allclose(mine, its, rtol=0, atol=1e-6)
    optimizer.share_products(None)
    sent = world.bytes_sent()
    train(optimizer, params, range(3, 4))
    assert world.bytes_sent() == sent


class Muon(unittest.TestCase):
    def test_ranks_share_products(self):
        run_job(__file__, "shared").cleanup()

    def test_steps_are_torchs_within_the_rounding_of_its_products(self):
        options = {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.1, "ns_steps": 5}
        for rule in ("original", "match_rms_adamw"):
            for nesterov in (False, True):
                with self.subTest(rule, nesterov=nesterov):
                    a, b = matrices(), matrices()
                    train(pacer.Muon(a, adjust_lr_fn=rule, nesterov=nesterov, precision="bf16", **options), a, range(20))
                    train(torch.optim.Muon(b, adjust_lr_fn=rule, nesterov=nesterov, **options), b, range(20))
                    for mine, theirs, before in zip(a, b, matrices()):
                        # Products in bf16, 8 digits: a hundredth of what a step moves, as often as there are steps.
                        off = (mine - theirs).norm() / (theirs - before).norm()
                        self.assertLess(off.item(), 0.02)

    def test_a_group_of_vectors_takes_adamw(self):
        a, b = [torch.nn.Parameter(torch.ones(7))], [torch.nn.Parameter(torch.ones(7))]
        hidden = matrices()
        muon = pacer.Muon([{"params": hidden}, {"params": a, "orthogonalize": False, "lr": 0.01}])
        train(muon, a, range(3))
        train(pacer.FusedAdamW(b, lr=0.01, weight_decay=0.1), b, range(3))
        self.assertTrue(torch.equal(a[0], b[0]))

    def test_what_is_no_matrix_is_refused_before_a_step(self):
        vector, hidden = torch.nn.Parameter(torch.ones(7)), matrices()
        empty, odd = torch.nn.Parameter(torch.ones(0, 4)), torch.nn.Parameter(torch.ones(7, 4))
        optimizer = pacer.Muon(hidden)
        for wrong, options, word in ((vector, {}, "orthogonalize"), (empty, {}, "no matrix"), (odd, {"split": 2}, "split")):
            with self.subTest(word):
                with self.assertRaisesRegex(ValueError, word):
                    pacer.Muon([wrong], **options)
                with self.assertRaisesRegex(ValueError, word):
                    optimizer.add_param_group({"params": [wrong], **options})
                self.assertEqual(len(optimizer.param_groups), 1)
                train(optimizer, hidden, range(1))
        optimizer.add_param_group({"params": [vector], "orthogonalize": False})
        optimizer.param_groups[1]["orthogonalize"] = True
        with self.assertRaisesRegex(RuntimeError, "orthogonalize"):
            train(optimizer, [vector], range(1))
        self.assertTrue(torch.equal(vector, torch.ones(7)))

    def test_a_loaded_state_goes_on_to_the_bit(self):
        params = matrices()
        optimizer = pacer.Muon(params, normalize_rows=True, cautious_decay=True)
        train(optimizer, params, range(3))
        self.assertEqual(set(optimizer.state[params[0]]), {"step", "exp_avg", "row_moment"})
        self.assertEqual(optimizer.state[params[0]]["row_moment"].shape, (24,))
        state = copy.deepcopy(optimizer.state_dict())
        others = [torch.nn.Parameter(parameter.detach().clone()) for parameter in params]
        other = pacer.Muon(others, normalize_rows=True)
        other.load_state_dict(state)
        train(optimizer, params, range(3, 6))
        train(other, others, range(3, 6))
        for mine, its in zip(params, others):
            self.assertTrue(torch.equal(mine, its))
        with self.assertRaisesRegex(ValueError, "another optimizer|exp_avg_sq"):
            other.load_state_dict(pacer.FusedAdamW(others).state_dict())


if __name__ == "__main__":
    unittest.main(verbosity=2)
