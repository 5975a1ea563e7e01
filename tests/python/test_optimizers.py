#!/usr/bin/env python3
"""The fused optimizers of the Python package, against torch.optim and against C++.

PYTHONPATH names the package; PACER_REFERENCE names pacer-python-reference, without which comparisons with C++ are skipped.
"""
import copy
import io
import os
import pickle
import subprocess
import tempfile
import unittest

import torch

import pacer
from pacer import _option_help

PAIRS = [(pacer.FusedAdam, torch.optim.Adam), (pacer.FusedAdamW, torch.optim.AdamW)]
ALL = [pacer.FusedAdam, pacer.FusedAdamW, pacer.FusedLamb]
SIZES = [(3, 5), (7,), (40, 30), (), (1000,)]


def parameters(dtype=torch.float32, sizes=SIZES):
    generator = torch.Generator().manual_seed(1)
    return [torch.nn.Parameter(torch.randn(size, generator=generator).to(dtype)) for size in sizes]


def set_gradients(params, seed):
    generator = torch.Generator().manual_seed(seed)
    for parameter in params:
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter)


def train(optimizer, params, steps=range(4), each=lambda: None):
    for step in steps:
        set_gradients(params, 10 + step)
        optimizer.step()
        each()


class Case(unittest.TestCase):
    def near(self, mine, theirs):
        for a, b in zip(mine, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-6)

    def equal(self, mine, theirs):
        for a, b in zip(mine, theirs, strict=True):
            self.assertTrue(torch.equal(a, b))


class AgainstTorch(Case):
    def test_steps_are_torchs_for_every_option(self):
        for (mine, theirs), options in [
            (pair, options)
            for pair in PAIRS
            for options in [{}, {"lr": 0.1}, {"betas": (0.8, 0.95)}, {"eps": 1e-4}, {"weight_decay": 0.3}, {"amsgrad": True}]
        ]:
            with self.subTest(mine.__name__, **options):
                a, b = parameters(), parameters()
                train(mine(a, **options), a)
                train(theirs(b, **options), b)
                self.near(a, b)

    def test_a_group_has_its_own_options_and_the_defaults_of_others(self):
        for mine, theirs in PAIRS:
            a, b = parameters(), parameters()
            groups = lambda p: [{"params": p[:2], "lr": 0.1}, {"params": p[2:], "betas": (0.5, 0.9), "weight_decay": 0.2}]
            x, y = mine(groups(a), lr=0.02), theirs(groups(b), lr=0.02)
            self.assertEqual([g["lr"] for g in x.param_groups], [g["lr"] for g in y.param_groups])
            train(x, a)
            train(y, b)
            self.near(a, b)

    def test_options_changed_between_steps_are_honoured(self):
        for mine, theirs in PAIRS:
            for change in [{"lr": 0.3}, {"betas": (0.2, 0.9)}, {"weight_decay": 0.5}, {"eps": 1e-2}]:
                with self.subTest(mine.__name__, **change):
                    a, b = parameters(), parameters()
                    for optimizer, params in [(mine(a), a), (theirs(b), b)]:
                        train(optimizer, params, range(2))
                        optimizer.param_groups[0].update(change)
                        train(optimizer, params, range(2, 4))
                    self.near(a, b)

    def test_a_group_added_later_trains(self):
        for mine, theirs in PAIRS:
            a, b = parameters(), parameters()
            for optimizer, params in [(mine(a[:3]), a), (theirs(b[:3]), b)]:
                train(optimizer, params, range(2))
                optimizer.add_param_group({"params": params[3:], "lr": 0.5})
                train(optimizer, params, range(2, 4))
            self.near(a, b)

    def test_a_learning_rate_may_be_a_tensor_that_changes_in_place(self):
        a, b = parameters(), parameters()
        for optimizer, params in [(pacer.FusedAdamW(a, lr=torch.tensor(0.1)), a), (torch.optim.AdamW(b, lr=torch.tensor(0.1)), b)]:
            train(optimizer, params, range(2))
            optimizer.param_groups[0]["lr"].fill_(0.01)
            train(optimizer, params, range(2, 4))
        self.near(a, b)

    def test_the_closure_is_called_with_gradients_on_and_its_loss_returned(self):
        for kind in ALL:
            weight = torch.nn.Parameter(torch.ones(4))
            optimizer = kind([weight], lr=0.1)

            def closure():
                optimizer.zero_grad()
                loss = (weight**2).sum()
                loss.backward()
                return loss

            with torch.no_grad():
                self.assertEqual(optimizer.step(closure).item(), 4.0)
            self.assertLess(weight.detach().max().item(), 1.0)

    def test_parameters_without_a_gradient_sit_the_step_out(self):
        for mine, theirs in PAIRS:
            a, b = parameters(), parameters()
            for optimizer, params in [(mine(a), a), (theirs(b), b)]:
                train(optimizer, params, range(2))
                set_gradients(params, 5)
                params[1].grad = None
                params[2].requires_grad_(False)
                params[2].grad = None
                optimizer.step()
                optimizer.zero_grad()
                optimizer.step()
            self.near(a, b)
            self.assertEqual(optimizer.state[b[1]]["step"], 2)

    def test_state_is_torchs(self):
        for mine, theirs in PAIRS:
            a, b = parameters(), parameters()
            x, y = mine(a, amsgrad=True), theirs(b, amsgrad=True)
            self.assertEqual(len(x.state), 0)
            train(x, a)
            train(y, b)
            self.assertEqual(set(x.state[a[0]]), set(y.state[b[0]]))
            for p, q in zip(a, b):
                self.assertEqual(x.state[p]["step"], y.state[q]["step"])
                self.assertEqual(x.state[p]["step"].dtype, y.state[q]["step"].dtype)
                for name in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"):
                    self.near([x.state[p][name]], [y.state[q][name]])

    def test_state_may_be_changed_in_place(self):
        a, b = parameters(), parameters()
        for optimizer, params in [(pacer.FusedAdamW(a), a), (torch.optim.AdamW(b), b)]:
            train(optimizer, params, range(2))
            optimizer.state[params[0]]["exp_avg"].zero_()
            train(optimizer, params, range(2, 4))
        self.near(a, b)

    def test_state_goes_to_torch_and_comes_from_it(self):
        for mine, theirs in PAIRS:
            for first, second in [(mine, theirs), (theirs, mine)]:
                with self.subTest(f"{first.__module__} to {second.__module__}", optimizer=mine.__name__):
                    a, b = parameters(), parameters()
                    whole = theirs(a, lr=0.01, weight_decay=0.1)
                    train(whole, a, range(6))
                    half = first(b, lr=0.01, weight_decay=0.1)
                    train(half, b, range(3))
                    other = second(b, lr=1.0)
                    other.load_state_dict(half.state_dict())
                    self.assertEqual(other.param_groups[0]["lr"], 0.01)
                    train(other, b, range(3, 6))
                    self.near(a, b)

    def test_a_grad_scaler_skips_steps_that_are_not_finite(self):
        for kind in ALL:
            params = parameters()
            before = [p.detach().clone() for p in params]
            optimizer, scaler = kind(params), torch.amp.GradScaler("cpu", init_scale=8.0)
            loss = sum((p.float() ** 2).sum() for p in params)
            scaler.scale(loss).backward()
            params[0].grad.view(-1)[0] = float("inf")
            scaler.step(optimizer)
            scaler.update()
            self.equal(params, before)
            self.assertEqual(scaler.get_scale(), 4.0)

    def test_a_grad_scaler_gives_unscaled_gradients(self):
        a, b = parameters(), parameters()
        for (optimizer, params), scale in [((pacer.FusedAdamW(a), a), 1.0), ((pacer.FusedAdamW(b), b), 8.0)]:
            scaler = torch.amp.GradScaler("cpu", init_scale=scale)
            scaler.scale(sum((p**2).sum() for p in params)).backward()
            scaler.step(optimizer)
        self.equal(a, b)


class Copies(Case):
    def test_a_state_dict_goes_round_to_the_bit(self):
        for kind in ALL:
            for dtype in (torch.float32, torch.bfloat16):
                with self.subTest(kind.__name__, dtype=dtype):
                    a, b = parameters(dtype), parameters(dtype)
                    whole, half = kind(a, lr=0.01), kind(b, lr=0.01)
                    train(whole, a, range(6))
                    train(half, b, range(3))
                    file = io.BytesIO()
                    torch.save(half.state_dict(), file)
                    file.seek(0)
                    other = kind(b)
                    other.load_state_dict(torch.load(file, weights_only=True))
                    train(other, b, range(3, 6))
                    self.equal(a, b)

    def test_copies_and_pickles_go_on_to_the_bit_and_apart(self):
        for kind in ALL:
            for make_copy in (copy.deepcopy, lambda both: pickle.loads(pickle.dumps(both))):
                a = parameters()
                optimizer = kind(a, lr=0.01)
                train(optimizer, a, range(2))
                other, b = make_copy((optimizer, a))
                train(optimizer, a, range(2, 4))
                train(other, b, range(2, 4))
                self.equal(a, b)
                train(other, b, range(4, 5))
                self.assertFalse(torch.equal(a[0], b[0]))

    def test_a_load_that_fails_changes_nothing(self):
        a, b = parameters(), parameters()
        optimizer, twin = pacer.FusedAdamW(a), pacer.FusedAdamW(b)
        train(optimizer, a, range(2))
        train(twin, b, range(2))
        foreign = torch.optim.AdamW(parameters(), maximize=True)
        with self.assertRaisesRegex(ValueError, "maximize"):
            optimizer.load_state_dict(foreign.state_dict())
        train(optimizer, a, range(2, 4))
        train(twin, b, range(2, 4))
        self.equal(a, b)

    def test_bf16_keeps_what_its_dtype_cannot_hold(self):
        a = parameters(torch.bfloat16)
        optimizer = pacer.FusedAdamW(a)
        train(optimizer, a)
        self.assertEqual(optimizer.state[a[0]]["remainder"].dtype, torch.int16)
        self.assertEqual(optimizer.state[a[0]]["exp_avg"].dtype, torch.float32)
        b = parameters(torch.bfloat16)
        optimizer = pacer.FusedAdamW(b, master_weights="fp32")
        train(optimizer, b)
        self.assertEqual(optimizer.state[b[0]]["master"].dtype, torch.float32)
        self.equal(a, b)

    def test_bf16_with_remainders_of_8_bits(self):
        a = parameters(torch.bfloat16)
        b = [x.detach().clone().requires_grad_() for x in a]
        options = {"master_weights": "remainder_8", "state_bits": 8}
        optimizer, twin = pacer.FusedAdamW(a, **options), pacer.FusedAdamW(b, **options)
        train(optimizer, a, range(2))
        self.assertEqual(optimizer.state[a[0]]["remainder"].dtype, torch.int8)
        train(twin, b, range(2))
        resumed = pacer.FusedAdamW(b, **options)
        resumed.load_state_dict(twin.state_dict())
        self.assertEqual(resumed.state[b[0]]["remainder"].dtype, torch.int8)
        self.assertEqual(resumed.param_groups[0]["master_weights"], "remainder_8")
        train(optimizer, a, range(2, 4))
        train(resumed, b, range(2, 4))
        self.equal(a, b)
        c = parameters(torch.float16)
        refused = pacer.FusedAdamW(c, master_weights="remainder_8")
        with self.assertRaisesRegex(RuntimeError, "is fp16"):
            train(refused, c, range(1))


class Refusals(Case):
    def test_unknown_options_are_refused_with_the_nearest_name(self):
        with self.assertRaisesRegex(TypeError, 'no option "weight_deacy"; did you mean "weight_decay"'):
            pacer.FusedAdamW(parameters(), weight_deacy=0.1)
        with self.assertRaisesRegex(ValueError, 'no option "wieght_decay"; did you mean "weight_decay"'):
            pacer.FusedAdamW([{"params": parameters(), "wieght_decay": 0.1}])
        with self.assertRaisesRegex(TypeError, 'no option "fused"; there are: betas, eps'):
            pacer.FusedAdamW(parameters(), fused=True)
        pacer.FusedAdamW([{"params": parameters(), "layer": 3}])  # a key of the user's own
        with self.assertRaisesRegex(TypeError, "amsgrad"):
            pacer.FusedLamb(parameters(), amsgrad=True)

    def test_values_out_of_range_are_refused(self):
        for options in [{"lr": -1.0}, {"betas": (1.0, 0.9)}, {"eps": -1e-8}, {"weight_decay": -1.0}, {"rounding": "up"}]:
            for kind in ALL:
                with self.subTest(kind.__name__, **options), self.assertRaises(ValueError):
                    kind(parameters(), **options)

    def test_tensors_that_no_kernel_takes_are_refused(self):
        for kind in ALL:
            with self.assertRaises((ValueError, RuntimeError)):
                kind([torch.nn.Parameter(torch.zeros(2, dtype=torch.complex64))])
            weight = torch.nn.Parameter(torch.zeros(4))
            optimizer = kind([weight])
            weight.grad = torch.zeros(4).to_sparse()
            with self.assertRaisesRegex(RuntimeError, "sparse|Sparse"):
                optimizer.step()
            with self.assertRaises(ValueError):
                kind([])

    def test_memory_that_runs_out_is_no_mistake_in_a_value(self):
        def runs_out():
            raise torch.OutOfMemoryError("CUDA out of memory")

        def does_not_fit():
            raise RuntimeError("no kernel takes it")

        with self.assertRaises(torch.OutOfMemoryError):
            pacer.FusedAdamW._call(runs_out)
        with self.assertRaisesRegex(ValueError, "no kernel takes it"):
            pacer.FusedAdamW._call(does_not_fit)

    def test_a_group_that_is_refused_leaves_no_trace(self):
        params = parameters()
        optimizer = pacer.FusedAdamW(params)
        with self.assertRaises(ValueError):
            optimizer.add_param_group({"params": parameters(), "eps": -1.0})
        train(optimizer, params)
        self.assertEqual(len(optimizer.param_groups), 1)

    def test_errors_name_the_parameter(self):
        weight = torch.nn.Parameter(torch.zeros(4))
        optimizer = pacer.FusedAdamW([("block.weight", weight)])
        weight.grad = torch.zeros(4).to_sparse()
        with self.assertRaisesRegex(RuntimeError, "block.weight"):
            optimizer.step()


class Options(Case):
    def test_options_are_those_of_cpp(self):
        for kind in ALL:
            described = set(_option_help.NAMES[kind.__name__].split()) - {"initial_lr"}  # a key of torch's schedulers
            params = parameters()
            self.assertEqual(described, set(kind(params).param_groups[0]) - {"params"})


def numbers(count, salt, dtype):
    index = torch.arange(count, dtype=torch.int64)
    return (((index * 7919 + salt * 104729) % 2001 - 1000).float() / 1024).to(dtype)


@unittest.skipUnless(os.environ.get("PACER_REFERENCE"), "PACER_REFERENCE names no program")
class AgainstCpp(Case):
    def test_bits_are_those_of_cpp(self):
        for kind in ALL:
            for name, dtype in {"fp32": torch.float32, "bf16": torch.bfloat16}.items():
                with self.subTest(kind.__name__, dtype=name), tempfile.TemporaryDirectory() as folder:
                    file = os.path.join(folder, "parameters")
                    subprocess.run([os.environ["PACER_REFERENCE"], kind.__name__, name, file], check=True)
                    params = [torch.nn.Parameter(numbers(n, i, dtype)) for i, n in enumerate([1, 7, 1000, 5000])]
                    optimizer = kind(params, lr=0.01, weight_decay=0.1)
                    for step in range(5):
                        for i, parameter in enumerate(params):
                            parameter.grad = numbers(parameter.numel(), 100 * (step + 1) + i, dtype)
                        optimizer.param_groups[0]["lr"] = 0.01 / (step + 1)
                        optimizer.step()
                    self.equal([torch.cat(params)], [torch.load(file, weights_only=True)])


@unittest.skipUnless(torch.cuda.is_available(), "no GPU")
class OnGpu(Case):
    def test_bits_are_those_of_the_cpu_for_every_option(self):
        for kind in ALL:
            for options in [{}, {"finite_check": True}, {"bias_correction": False, "eps": 1e-4}]:
                for dtype in (torch.float32, torch.bfloat16):
                    with self.subTest(kind.__name__, dtype=dtype, **options):
                        a = parameters(dtype)
                        b = [torch.nn.Parameter(p.detach().cuda()) for p in a]
                        optimizer, on_gpu = kind(a, lr=0.01, **options), kind(b, lr=0.01, **options)
                        for step in range(4):
                            set_gradients(a, 10 + step)
                            for p, q in zip(a, b):
                                q.grad = p.grad.cuda()
                            optimizer.step()
                            on_gpu.step()
                        self.equal(a, [q.cpu() for q in b])

    def test_state_goes_to_torch_and_comes_from_it(self):
        for mine, theirs in PAIRS:
            for first, second in [(mine, theirs), (theirs, mine)]:
                a = [torch.nn.Parameter(p.detach().cuda()) for p in parameters()]
                b = [torch.nn.Parameter(p.detach().cuda()) for p in parameters()]
                whole, half = theirs(a, lr=0.01), first(b, lr=0.01)
                for params, optimizer, steps in [(a, whole, range(6)), (b, half, range(3))]:
                    train(optimizer, params, steps)
                other = second(b, lr=1.0)
                other.load_state_dict(half.state_dict())
                train(other, b, range(3, 6))
                self.near(a, b)

    def test_a_grad_scaler_skips_steps_that_are_not_finite(self):
        for kind in ALL:
            params = [torch.nn.Parameter(p.detach().cuda()) for p in parameters()]
            before = [p.detach().clone() for p in params]
            optimizer, scaler = kind(params), torch.amp.GradScaler("cuda", init_scale=8.0)
            scaler.scale(sum((p**2).sum() for p in params)).backward()
            params[0].grad.view(-1)[0] = float("inf")
            scaler.step(optimizer)
            scaler.update()
            self.equal(params, before)


if __name__ == "__main__":
    unittest.main()
