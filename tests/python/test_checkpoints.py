#!/usr/bin/env python3
"""Checkpoints that both languages read: runs that change from Python to C++ and back.

PYTHONPATH names the package; PACER_REFERENCE names pacer-python-reference, without which comparisons with C++ are skipped.
"""
import fcntl
import json
import os
import subprocess
import tempfile
import unittest
import warnings

import torch

import pacer


def numbers(count, salt):
    index = torch.arange(count, dtype=torch.int64)
    return ((index * 7919 + salt * 104729) % 2001 - 1000).float() / 1024


class Net(torch.nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.up = torch.nn.Linear(16, width)
        self.down = torch.nn.Linear(width, 8)
        self.register_buffer("scale", torch.ones(8))

    def forward(self, x):
        return self.down(torch.tanh(self.up(x))) * self.scale


def make(kind, start=1, **options):
    torch.manual_seed(start)
    net = Net()
    net.scale += 0.25
    return net, kind(net.parameters(), **options)


def train(net, optimizer, steps):
    for step in steps:
        optimizer.zero_grad()
        x = numbers(64, step).view(4, 16) + torch.rand(1)
        torch.nn.functional.mse_loss(net(x), numbers(32, step + 50).view(4, 8)).backward()
        optimizer.step()


class Checkpoints(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name

    def same(self, a, b):
        for (name, x), y in zip(a.state_dict().items(), b.state_dict().values(), strict=True):
            self.assertTrue(torch.equal(x, y), name)

    @unittest.skipUnless(os.environ.get("PACER_REFERENCE"), "PACER_REFERENCE names no program")
    def test_a_run_goes_from_python_to_cpp_and_back_to_the_bit(self):
        for kind in (pacer.FusedAdamW, pacer.FusedLamb):
            with self.subTest(kind.__name__):
                root = os.path.join(self.folder, kind.__name__)
                whole, optimizer = make(kind, lr=0.01, weight_decay=0.1)
                train(whole, optimizer, range(9))
                net, optimizer = make(kind, lr=0.01, weight_decay=0.1)
                train(net, optimizer, range(3))
                pacer.save_checkpoint(root, 3, net, optimizer)
                subprocess.run(
                    [os.environ["PACER_REFERENCE"], "Session", kind.__name__, root], check=True, stderr=subprocess.DEVNULL
                )
                net, optimizer = make(kind, start=2, lr=0.5)
                self.assertEqual(pacer.load_checkpoint(root, net, optimizer), 6)
                self.assertEqual(optimizer.param_groups[0]["lr"], 0.01)
                self.assertEqual(optimizer.state[net.up.weight]["step"], 6)
                train(net, optimizer, range(6, 9))
                self.same(net, whole)

    def test_python_goes_on_to_the_bit(self):
        for kind, options in [
            (pacer.FusedAdam, {"amsgrad": True}),
            (pacer.FusedAdamW, {"betas": (0.8, 0.95), "master_weights": "fp32", "finite_check": True, "seed": 5}),
            (pacer.OneBitAdam, {"freeze_step": 2, "compress_alone": True, "scale": "l1"}),
            (pacer.OneBitLamb, {"freeze_step": 2, "compress_alone": True}),
        ]:
            with self.subTest(kind.__name__):
                root = os.path.join(self.folder, kind.__name__)
                net, optimizer = make(kind, lr=0.01, **options)
                train(net, optimizer, range(4))
                path = pacer.save_checkpoint(root, 4, net, optimizer)
                train(net, optimizer, range(4, 7))
                rule = {"freeze_step": 2} if "freeze_step" in options else {}
                other, resumed = make(kind, start=2, lr=0.5, **rule)
                self.assertEqual(pacer.load_checkpoint(path, other, resumed), 4)
                for name, value in {"lr": 0.01, **options}.items():
                    self.assertEqual((resumed.param_groups[0][name], type(resumed.param_groups[0][name])), (value, type(value)))
                train(other, resumed, range(4, 7))
                self.same(net, other)

    def test_a_wrapped_model_has_its_own_names(self):
        net, optimizer = make(pacer.FusedAdamW)
        path = pacer.save_checkpoint(self.folder, 0, torch.compile(net, backend="eager"), optimizer)
        with open(f"{path}/manifest.json") as manifest:
            self.assertEqual(json.load(manifest)["step"], 0)
        other, _ = make(pacer.FusedAdamW, start=2)
        pacer.load_checkpoint(self.folder, other)
        self.same(net, other)

    def test_the_newest_is_loaded_and_the_oldest_removed(self):
        net, optimizer = make(pacer.FusedAdamW)
        self.assertIsNone(pacer.load_checkpoint(f"{self.folder}/none", net, optimizer))
        for step in range(1, 5):
            pacer.save_checkpoint(self.folder, step, net, optimizer, keep=2)
        self.assertEqual(len(os.listdir(self.folder)), 2)
        self.assertEqual(pacer.load_checkpoint(self.folder, net, optimizer), 4)
        with open(f"{self.folder}/step-0000000004/model.safetensors", "r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(b"\x55")
        self.assertEqual(pacer.load_checkpoint(self.folder, net, optimizer), 3)
        with self.assertRaisesRegex(RuntimeError, "model.safetensors") as caught:
            pacer.load_checkpoint(f"{self.folder}/step-0000000004", net, optimizer)
        self.assertNotIn("\n", str(caught.exception))

    def test_the_newest_with_finite_parameters_stays_and_is_loaded(self):
        net, optimizer = make(pacer.FusedAdamW)
        with torch.no_grad():
            net.scale[0] = float("inf")  # a buffer is no parameter
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            pacer.save_checkpoint(self.folder, 1, net, optimizer, keep=2)
        with torch.no_grad():
            net.down.weight[0, 0] = float("nan")
        for step in (2, 3, 4):
            with self.assertWarnsRegex(UserWarning, f"step-000000000{step} are not finite") as caught:
                pacer.save_checkpoint(self.folder, step, net, optimizer, keep=2)
            self.assertEqual(caught.filename, __file__)
        names = [name for name in sorted(os.listdir(self.folder)) if not name.startswith(".")]
        self.assertEqual(names, ["step-0000000001", "step-0000000003", "step-0000000004"])
        for step, is_finite in [(1, True), (3, False), (4, False)]:
            with open(f"{self.folder}/step-000000000{step}/manifest.json") as manifest:
                self.assertEqual(json.load(manifest).get("finite_parameters", True), is_finite, step)
        self.assertEqual(pacer.load_checkpoint(self.folder, net, optimizer), 1)
        self.assertTrue(torch.isfinite(net.down.weight).all())

    def test_a_folder_that_another_run_writes_to_is_refused(self):
        net, optimizer = make(pacer.FusedAdamW)
        with open(f"{self.folder}/.checkpoints.lock", "w", encoding="utf-8") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            print("process 1 on another machine, since yesterday", file=lock, flush=True)
            with self.assertRaisesRegex(RuntimeError, "is in use for checkpoints by process 1 on another machine"):
                pacer.save_checkpoint(self.folder, 1, net, optimizer)
        self.assertEqual(os.listdir(self.folder), [".checkpoints.lock"])
        pacer.save_checkpoint(self.folder, 1, net, optimizer)
        self.assertEqual(os.listdir(self.folder), ["step-0000000001"])
        with self.assertRaisesRegex(RuntimeError, "save_checkpoint needs the name of a folder"):
            pacer.save_checkpoint("", 2, net, optimizer)

    def test_the_optimizer_of_another_model_is_refused(self):
        net, _ = make(pacer.FusedAdamW)
        _, stranger = make(pacer.FusedAdamW, start=2)
        train(net, stranger, range(1))
        words = "parameter 0 of group 0, of shape .32, 16., is none of this model's"
        with self.assertRaisesRegex(ValueError, words):
            pacer.save_checkpoint(self.folder, 1, net, stranger)
        self.assertEqual(os.listdir(self.folder), [])
        # One parameter too many is enough.
        extra = torch.nn.Parameter(torch.ones(3))
        both = pacer.FusedAdamW([*net.parameters(), extra])
        with self.assertRaisesRegex(ValueError, "parameter 4 of group 0, of shape .3,., is none"):
            pacer.save_checkpoint(self.folder, 1, net, both)
        own, optimizer = make(pacer.FusedAdamW)
        pacer.save_checkpoint(self.folder, 1, own, optimizer)
        before = {name: value.clone() for name, value in net.state_dict().items()}
        with self.assertRaisesRegex(ValueError, words):
            pacer.load_checkpoint(self.folder, net, stranger)
        for name, value in net.state_dict().items():
            self.assertTrue(torch.equal(value, before[name]), name)

    def test_what_does_not_fit_is_refused_and_changes_nothing(self):
        net, optimizer = make(pacer.FusedAdamW)
        train(net, optimizer, range(2))
        pacer.save_checkpoint(self.folder, 2, net, optimizer)
        wide = Net(width=64)
        with self.assertRaisesRegex(ValueError, r'"up.weight" is torch.float32 of shape \(32, 16\) in the checkpoint'):
            pacer.load_checkpoint(self.folder, wide)
        with self.assertRaisesRegex(ValueError, 'has no "0.bias", which this model has'):
            pacer.load_checkpoint(self.folder, torch.nn.Sequential(torch.nn.Linear(16, 32)))
        other, lamb = make(pacer.FusedLamb, start=2)
        before = {name: value.clone() for name, value in other.state_dict().items()}
        with self.assertRaises(ValueError):
            pacer.load_checkpoint(self.folder, other, lamb)
        for name, value in other.state_dict().items():
            self.assertTrue(torch.equal(value, before[name]))
        with self.assertRaisesRegex(TypeError, "this is AdamW; use torch.save"):
            pacer.save_checkpoint(self.folder, 3, net, torch.optim.AdamW(net.parameters()))
        for step, keep in [(-1, 1), (1, 0)]:
            with self.assertRaisesRegex(RuntimeError, "save_checkpoint needs"):
                pacer.save_checkpoint(self.folder, step, net, optimizer, keep=keep)


if __name__ == "__main__":
    unittest.main()
