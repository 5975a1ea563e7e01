#!/usr/bin/env python3
"""SequenceLength and LayerDrop of the Python package, against formulas and against C++, and rates of C++ against torch's.

PYTHONPATH names the package; PACER_REFERENCE names pacer-python-reference, without which comparisons with C++ are skipped.
"""
import math
import os
import subprocess
import tempfile
import unittest

import torch
from torch.utils.checkpoint import checkpoint

import pacer


def numbers(count, salt):
    index = torch.arange(count, dtype=torch.int64)
    return ((index * 7919 + salt * 104729) % 2001 - 1000).float() / 1024


class SequenceLength(unittest.TestCase):
    def test_a_ramp_grows_from_the_first_to_the_last_length(self):
        curriculum = pacer.SequenceLength(8, 32, ramp_steps=20)
        ids = torch.arange(4 * 32).view(4, 32)
        for step in range(30):
            length = min(32, math.floor(8 + 24 * step / 20) // 8 * 8)
            self.assertEqual(curriculum.length, length)
            self.assertEqual(curriculum.settled, step >= 20)
            x, y = curriculum(ids, ids + 1)
            self.assertTrue(torch.equal(x, ids[:, :length]) and torch.equal(y, ids[:, :length] + 1))
            self.assertTrue(x.is_contiguous())
            curriculum.step()

    def test_tokens_are_those_of_all_micro_batches_and_ranks(self):
        curriculum = pacer.SequenceLength(8, 32, ramp_tokens=1_000, world_size=3)
        curriculum(torch.zeros(4, 32))
        curriculum(torch.zeros(4, 32))
        self.assertEqual(curriculum.tokens, 0)
        curriculum.step()
        self.assertEqual(curriculum.tokens, 3 * 2 * 4 * 8)
        self.assertEqual(curriculum.length, math.floor(8 + 24 * 192 / 1_000) // 8 * 8)

    def test_tables_masks_and_reshape(self):
        curriculum = pacer.SequenceLength(8, 32, table=[(10, 16), (20, 32)])
        x, mask, label = curriculum(torch.zeros(2, 32, 5), torch.zeros(2, 1, 32, 32), torch.zeros(2))
        self.assertEqual([tuple(t.shape) for t in (x, mask, label)], [(2, 8, 5), (2, 1, 8, 8), (2,)])
        curriculum.steps = 10
        self.assertEqual(curriculum.length, 16)
        pieces = pacer.SequenceLength(8, 32, ramp_steps=4, mode="reshape")
        ids = torch.arange(2 * 32).view(2, 32)
        self.assertTrue(torch.equal(pieces(ids)[0], ids.view(8, 8)))
        columns = pacer.SequenceLength(8, 32, ramp_steps=4, dimensions=[[0], []])
        x, y = columns(torch.zeros(32, 2), torch.zeros(7, 7))
        self.assertEqual((tuple(x.shape), tuple(y.shape)), ((8, 2), (7, 7)))

    def test_progress_is_saved_and_loaded(self):
        first, second = (pacer.SequenceLength(8, 32, ramp_tokens=400) for _ in range(2))
        for _ in range(7):
            first(torch.zeros(4, 32))
            first.step()
        second.load_state_dict(first.state_dict())
        self.assertEqual((second.length, second.tokens, second.steps), (first.length, first.tokens, 7))
        self.assertGreater(second.length, 8)
        with self.assertRaisesRegex(ValueError, 'no "tokens"'):
            second.load_state_dict({"steps": 3})

    def test_what_cannot_work_is_refused_in_one_sentence(self):
        for message, make in {
            "no way from 8 to 32": lambda: pacer.SequenceLength(8, 32),
            "give the one that it shall follow": lambda: pacer.SequenceLength(8, 32, ramp_steps=1, ramp_tokens=1),
            "must not exceed the last one": lambda: pacer.SequenceLength(32, 8, ramp_steps=1),
            "the table of sequence lengths ends at 16": lambda: pacer.SequenceLength(8, 32, table=[(3, 16)]),
            'must be one of "truncate", "reshape"': lambda: pacer.SequenceLength(8, 32, ramp_steps=1, mode="cut"),
            "wants sequences of 32 tokens, but the batch has 16": lambda: pacer.SequenceLength(8, 32, ramp_steps=0)(
                torch.zeros(2, 16)
            ),
            "finds no sequence in the batch": lambda: pacer.SequenceLength(8, 32, ramp_steps=0)(torch.zeros(2)),
        }.items():
            with self.assertRaisesRegex(ValueError, message) as caught:
                make()
            self.assertNotIn("\n", str(caught.exception))

    def test_whole_numbers_are_taken_however_they_are_written(self):
        curriculum = pacer.SequenceLength(8, 64.0, ramp_steps=1e1, table=())
        curriculum.steps = 10
        self.assertEqual(curriculum.length, 64)
        for name in ("ramp_steps", "ramp_tokens"):
            self.assertEqual(pacer.SequenceLength(8, 64, **{name: 0.0}).length, 64)
        for name in ("ramp_steps", "ramp_tokens", "difficulty_step"):
            with self.assertRaisesRegex(TypeError, f"SequenceLength: {name} is '', but must be a whole number"):
                pacer.SequenceLength(8, 64, **{"ramp_steps": 10, name: ""})
        for error, message, arguments, options in [
            (ValueError, "SequenceLength: last is 64.5, but must be a whole number", (8, 64.5), {"ramp_steps": 10}),
            (TypeError, "SequenceLength: last is '64', but must be a whole number", (8, "64"), {"ramp_steps": 10}),
            (TypeError, "SequenceLength: first is None, but must be a whole number", (None, 64), {"ramp_steps": 10}),
            (ValueError, "SequenceLength: ramp_steps is nan, but", (8, 64), {"ramp_steps": float("nan")}),
            (ValueError, "SequenceLength: table is 8.5, but", (8, 64), {"table": [(1, 8.5)]}),
        ]:
            with self.assertRaisesRegex(error, message):
                pacer.SequenceLength(*arguments, **options)


class Shift(torch.nn.Module):
    """A block that C++ computes, too."""

    def __init__(self, i):
        super().__init__()
        self.i = i
        self.weight = torch.nn.Parameter(torch.ones(16))

    def forward(self, x):
        return torch.tanh(x * self.weight) + self.i


class Stack(torch.nn.Module):
    def __init__(self, recompute=False, **options):
        super().__init__()
        self.blocks = torch.nn.ModuleList([Shift(i) for i in range(4)])
        self.layer_drop = pacer.LayerDrop(self.blocks, **options)
        self.recompute = recompute

    def forward(self, x):
        for i in range(4):
            x = checkpoint(self.layer_drop, i, x, use_reentrant=False) if self.recompute else self.layer_drop(i, x)
        return x


class Rates(unittest.TestCase):
    """torch's lr_scheduler for restarts, one cycle and chains; for stable schedules the formulas of Megatron-LM's
    optimizer_param_scheduler.py and of modded-nanogpt."""

    @unittest.skipUnless(os.environ.get("PACER_REFERENCE"), "PACER_REFERENCE names no program")
    def test_factors_of_cpp_are_those_of_others(self):
        with tempfile.TemporaryDirectory() as folder:
            file = os.path.join(folder, "rates")
            subprocess.run([os.environ["PACER_REFERENCE"], "Rates", "fp64", file], check=True)
            rows = torch.load(file, weights_only=True).tolist()
        of_torch, stable, momentum = rows[:5], rows[5:-1], rows[-1]
        torchs = torch.optim.lr_scheduler

        def one_cycle(optimizer, steps, share, **options):
            return torchs.OneCycleLR(optimizer, 1.0, steps, pct_start=share, cycle_momentum=False, **options)

        def chain(optimizer):
            parts = [torchs.LambdaLR(optimizer, lambda step: min((step + 1) / 100, 1)),
                     torchs.CosineAnnealingWarmRestarts(optimizer, 70, eta_min=0.1),
                     torchs.StepLR(optimizer, 10, 0.5),
                     one_cycle(optimizer, 200, 0.25)]  # the last one, since it sets the rate that the others begin with
            return torchs.SequentialLR(optimizer, parts, [300, 600, 800])

        for found, make in zip(of_torch, [
            lambda optimizer: torchs.CosineAnnealingWarmRestarts(optimizer, 70, 1, eta_min=0.1),
            lambda optimizer: torchs.CosineAnnealingWarmRestarts(optimizer, 30, 2, eta_min=0.1),
            lambda optimizer: one_cycle(optimizer, 1000, 0.25),
            lambda optimizer: one_cycle(optimizer, 1000, 0.4, anneal_strategy="linear", div_factor=10, final_div_factor=100),
            chain,
        ], strict=True):
            optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
            scheduler = make(optimizer)
            self.assertEqual(len(found), 1000)
            for factor in found:
                self.assertLess(abs(factor - optimizer.param_groups[0]["lr"]), 1e-15)
                optimizer.step()
                scheduler.step()
        optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0, momentum=0.9)
        scheduler = torchs.OneCycleLR(optimizer, 1.0, 1000, pct_start=0.25)  # momentum goes the other way
        for found in momentum:
            self.assertLess(abs(found - optimizer.param_groups[0]["momentum"]), 1e-15)
            optimizer.step()
            scheduler.step()
        left = [lambda x: 1 - x, lambda x: 0.5 * (math.cos(math.pi * x) + 1), lambda x: 2 * math.pow(0.5, x) - 1,
                lambda x: 1 - math.sqrt(x), lambda x: (1 - x) ** 1.2]
        self.assertEqual(len(stable), len(left))
        for found, of in zip(stable, left):
            for step, factor in enumerate(found):
                x = min(max((step - 600) / 300, 0), 1)
                expected = (step + 1) / 100 if step < 100 else 0.1 + 0.9 * of(x)
                self.assertLess(abs(factor - expected), 1e-15)


class Averages(unittest.TestCase):
    @unittest.skipUnless(os.environ.get("PACER_REFERENCE"), "PACER_REFERENCE names no program")
    def test_averages_of_cpp_are_those_of_swa_utils(self):
        with tempfile.TemporaryDirectory() as folder:
            file = os.path.join(folder, "averages")
            subprocess.run([os.environ["PACER_REFERENCE"], "Averages", "fp32", file], check=True)
            found = torch.load(file, weights_only=True)
        of_swa_utils = torch.optim.swa_utils
        for row, function, steps in (
            (found[0], of_swa_utils.get_ema_multi_avg_fn(0.9), range(1, 31)),
            (found[1], of_swa_utils.get_swa_multi_avg_fn(), range(1, 31)),
            (found[2], of_swa_utils.get_swa_multi_avg_fn(), range(12, 31, 3)),
        ):
            model = torch.nn.Module()
            model.values = torch.nn.Parameter(torch.zeros(1000))
            average = of_swa_utils.AveragedModel(model, multi_avg_fn=function)
            for step in steps:
                model.values.data.copy_(numbers(1000, step - 1))
                average.update_parameters(model)
            self.assertTrue(torch.equal(row, average.module.values))


class LayerDrop(unittest.TestCase):
    def test_blocks_are_kept_as_often_as_the_paper_says_and_scaled(self):
        model = Stack(theta_bar=0.5, gamma=0.0)
        drop = pacer.LayerDrop(model.blocks, theta_bar=0.5, gamma=10.0, seed=3)
        kept = torch.zeros(4)
        for step in range(2_000):
            drop.steps = step + 10  # theta is theta_bar from there on
            kept += torch.tensor([float(drop.keeps(i)) for i in range(4)])
        for i in range(4):
            p = 1 - (i + 1) / 4 * 0.5
            self.assertLess(abs(kept[i].item() / 2_000 - p), 4 * math.sqrt(p * (1 - p) / 2_000))
        x = numbers(16, 1)
        for step in range(10, 20):
            drop.steps = step
            expected = x + (model.blocks[3](x) - x) / 0.5 if drop.keeps(3) else x
            torch.testing.assert_close(drop(3, x), expected)

    @unittest.skipUnless(os.environ.get("PACER_REFERENCE"), "PACER_REFERENCE names no program")
    def test_bits_are_those_of_cpp(self):
        with tempfile.TemporaryDirectory() as folder:
            file = os.path.join(folder, "gated")
            subprocess.run([os.environ["PACER_REFERENCE"], "LayerDrop", "fp32", file], check=True)
            expected = torch.load(file, weights_only=True)
        model, results = Stack(theta_bar=0.5, gamma=0.1, seed=7), []
        for step in range(20):
            results.append(model(numbers(16, step)))
            model.layer_drop.micro_step()
            results.append(model(numbers(16, step)))
            model.layer_drop.step()
        self.assertTrue(torch.equal(torch.stack(results), expected))

    def test_in_eval_every_block_runs_unscaled(self):
        model = Stack(theta_bar=0.1, gamma=10.0).eval()
        model.layer_drop.steps = 100
        x = y = numbers(16, 2)
        for block in model.blocks:
            y = block(y)
        self.assertTrue(torch.equal(model(x), y))

    def test_the_models_names_stay_and_dropped_blocks_get_a_gradient_of_zero(self):
        model = Stack(theta_bar=0.2, gamma=10.0, seed=1)
        self.assertEqual([name for name in model.state_dict()], [f"blocks.{i}.weight" for i in range(4)])
        dropped_ever = False
        for _ in range(20):
            model.zero_grad()
            kept = [model.layer_drop.keeps(i) for i in range(4)]
            model(numbers(16, 3).requires_grad_()).sum().backward()
            model.layer_drop.fill_gradients()
            for block, keeps in zip(model.blocks, kept):
                self.assertEqual(block.weight.grad.abs().sum().item() > 0, keeps)
            dropped_ever |= not all(kept)
            model.layer_drop.step()
        self.assertTrue(dropped_ever)

    def test_recomputed_blocks_see_their_own_decision(self):
        plain, again = Stack(theta_bar=0.3, gamma=10.0), Stack(recompute=True, theta_bar=0.3, gamma=10.0)
        for _ in range(10):
            for model in (plain, again):
                model.zero_grad()
                model(numbers(16, 4).requires_grad_()).sum().backward()
                model.layer_drop.fill_gradients()
                model.layer_drop.step()
            for a, b in zip(plain.parameters(), again.parameters()):
                self.assertTrue(torch.equal(a.grad, b.grad))

    def test_what_cannot_work_is_refused_in_one_sentence(self):
        blocks = [torch.nn.Linear(4, 3)]
        for options in [{"theta_bar": 0.0}, {"gamma": -1.0}, {"seed": -1}]:
            with self.assertRaises(ValueError):
                pacer.LayerDrop(blocks, **options)
        with self.assertRaisesRegex(ValueError, "given no block"):
            pacer.LayerDrop([])
        with self.assertRaisesRegex(ValueError, r"block 0 turned shape \(2, 4\) into shape \(2, 3\)"):
            pacer.LayerDrop(blocks)(0, torch.zeros(2, 4))


if __name__ == "__main__":
    unittest.main()
