#!/usr/bin/env python3
"""Checkpoints of the ranks of a 1-bit optimizer: each writes its part, and ranks of either language go on from them.

PYTHONPATH names the package; PACER_REFERENCE names pacer-python-reference, without which comparisons with C++ are skipped.
"""
import json
import os
import resource
import signal
import subprocess
import tempfile
import time
import unittest

import torch

import pacer
from ranks import DEVICE, numbers, run_job

HAS_REFERENCE = unittest.skipUnless(os.environ.get("PACER_REFERENCE"), "PACER_REFERENCE names no program")


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up = torch.nn.Linear(16, 32)
        self.down = torch.nn.Linear(32, 8)
        self.register_buffer("scale", torch.ones(8))
        for i, parameter in enumerate(self.parameters()):
            parameter.data = (numbers(parameter.numel(), i) / 4).view_as(parameter)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x))) * self.scale


def make(kind=pacer.OneBitAdam, lr=0.01, **options):
    net = Net().to(DEVICE)
    return net, kind(net.parameters(), lr=lr, **{"freeze_step": 5, **options})


def train(net, optimizer, rank, steps):
    for step in steps:
        optimizer.zero_grad()
        x = numbers(64, step + 10 * rank).view(4, 16).to(DEVICE)
        y = numbers(32, step + 50).view(4, 8).to(DEVICE)
        torch.nn.functional.mse_loss(net(x), y).backward()
        optimizer.step()


def require_same(a, b):
    for name, value in a.state_dict().items():
        assert torch.equal(value, b.state_dict()[name]), name


# ---- What a rank does; called by its name. ----


def job_save_and_die(rank, folder, root, kind, steps):
    net, optimizer = make(getattr(pacer, kind))
    train(net, optimizer, rank, range(int(steps)))
    torch.manual_seed(1000 + rank)
    pacer.save_checkpoint(root, int(steps), net, optimizer)
    open(f"{folder}/saved-{rank}", "w").close()
    while not all(os.path.exists(f"{folder}/saved-{i}") for i in range(2)):  # not by a message, which a killed rank may cut off
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)


def job_go_on(rank, folder, root, kind, steps):
    """Goes on from a folder's newest checkpoint to where a run comes that was not interrupted, in which its file lies."""
    first, kind = int(steps), getattr(pacer, kind)
    net, optimizer = make(kind, lr=0.5)
    assert pacer.load_checkpoint(root, net, optimizer) == first
    assert optimizer.param_groups[0]["lr"] == 0.01 and optimizer.attempts == first
    expected = torch.rand(3, generator=torch.Generator().manual_seed(1000 + rank))
    assert torch.equal(torch.rand(3), expected), "each rank has its own random state again"
    train(net, optimizer, rank, range(first, 9))
    whole, other = make(kind)
    train(whole, other, rank, range(9))
    require_same(net, whole)
    pacer.save_checkpoint(root, 9, net, optimizer)


def job_from_cpp(rank, folder, root):
    """Goes on where ranks of C++ were after step 6, and comes where they came after step 9."""
    net, optimizer = make()
    assert pacer.load_checkpoint(f"{root}/step-0000000006", net, optimizer) == 6
    assert (optimizer.frozen_at, optimizer.attempts, optimizer.param_groups[0]["freeze_step"]) == (5, 6, 5)
    train(net, optimizer, rank, range(6, 9))
    expected = Net()
    assert pacer.load_checkpoint(root, expected) == 9
    require_same(net, expected)


def job_fail(rank, folder):
    """What goes wrong on rank 1 alone is an error on both, and changes nothing on either."""
    root = f"{folder}/root"
    net, optimizer = make()
    train(net, optimizer, rank, range(6))
    pacer.save_checkpoint(root, 6, net, optimizer)
    train(net, optimizer, rank, range(6, 7))
    kept = {name: value.clone() for name, value in net.state_dict().items()}

    def fails(words, work):
        try:
            work()
        except (RuntimeError, ValueError) as error:
            assert words in str(error) and "\n" not in str(error), error
        else:
            raise AssertionError(f"no error with {words}")

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    fails("rank 1 could not write its part of a checkpoint", lambda: pacer.save_checkpoint(root, 7, net, optimizer))
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [name for name in os.listdir(root) if not name.startswith(".")] == ["step-0000000006"], os.listdir(root)
    fails("out of step", lambda: pacer.save_checkpoint(root, 7 + rank, net, optimizer))

    if rank == 1:
        net.register_buffer("more", torch.zeros(2))
    fails(
        'has no "more"' if rank == 1 else "rank 1 could not continue from the checkpoint",
        lambda: pacer.load_checkpoint(root, net, optimizer),
    )
    assert optimizer.attempts == 7
    for name, value in kept.items():
        assert torch.equal(value, net.state_dict()[name]), name


class Ranks(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = f"{folder.name}/root"

    def go_round(self, device):
        for kind in ("OneBitAdam", "OneBitLamb"):
            for steps in ("3", "7"):  # in warm-up, and after the variance froze
                with self.subTest(kind, steps=steps):
                    root = f"{self.root}/{kind}-{steps}"
                    run_job(__file__, "save_and_die", root, kind, steps, device=device, ends_with=-signal.SIGKILL).cleanup()
                    run_job(__file__, "go_on", root, kind, steps, device=device).cleanup()

    def test_ranks_that_were_killed_go_on_to_the_bit(self):
        self.go_round("cpu")
        folder = f"{self.root}/OneBitAdam-7/step-0000000007"
        with open(f"{folder}/manifest.json") as manifest:
            self.assertEqual(json.load(manifest)["world_size"], 2)
        for kind in ("errors", "optimizer", "session"):
            for rank in range(2):
                self.assertTrue(os.path.exists(f"{folder}/{kind}-rank-0000{rank}-of-00002.safetensors"))

    @unittest.skipUnless(torch.cuda.device_count() > 1, "fewer than two GPUs")
    def test_ranks_on_gpus_that_were_killed_go_on_to_the_bit(self):
        self.go_round("cuda")

    def test_fewer_ranks_go_on(self):
        run_job(__file__, "save_and_die", self.root, "OneBitAdam", "7", ends_with=-signal.SIGKILL).cleanup()
        net, optimizer = make(freeze_step=2, compress_alone=True)  # errors are joined
        self.assertEqual(pacer.load_checkpoint(self.root, net, optimizer), 7)
        train(net, optimizer, 0, range(7, 9))
        self.assertTrue(all(torch.isfinite(value).all() for value in net.state_dict().values()))
        self.assertEqual(optimizer.attempts, 9)

    def test_what_fails_on_one_rank_fails_on_all_and_changes_nothing(self):
        run_job(__file__, "fail").cleanup()

    @HAS_REFERENCE
    def test_ranks_of_cpp_go_on_from_ranks_of_python(self):
        for steps in ("3", "6"):
            root = f"{self.root}/{steps}"
            run_job(__file__, "save_and_die", root, "OneBitAdam", steps, ends_with=-signal.SIGKILL).cleanup()
            self.run_cpp(root)
            straight = f"{self.root}/straight"
            self.run_cpp(straight)
            resumed, whole = Net(), Net()
            self.assertEqual(pacer.load_checkpoint(root, resumed), 9)
            self.assertEqual(pacer.load_checkpoint(straight, whole), 9)
            require_same(resumed, whole)

    @HAS_REFERENCE
    def test_ranks_of_python_go_on_from_ranks_of_cpp_also_with_fewer(self):
        self.run_cpp(self.root)
        run_job(__file__, "from_cpp", self.root).cleanup()
        net, optimizer = make(freeze_step=2, compress_alone=True)
        self.assertEqual(pacer.load_checkpoint(f"{self.root}/step-0000000006", net, optimizer), 6)
        train(net, optimizer, 0, range(6, 9))
        self.assertTrue(all(torch.isfinite(value).all() for value in net.state_dict().values()))

    def run_cpp(self, root):
        """Two ranks of OneBitAdam, from the folder's newest checkpoint or from the start, to step 9."""
        subprocess.run([os.environ["PACER_REFERENCE"], "Session", "OneBitAdam", root], check=True, stderr=subprocess.DEVNULL)


if __name__ == "__main__":
    unittest.main()
