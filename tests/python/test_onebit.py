#!/usr/bin/env python3
"""The 1-bit optimizers of the Python package, over process groups of torch.distributed, against C++.

The tests start the ranks (ranks.py). PYTHONPATH names the package; PACER_REFERENCE names pacer-python-reference,
without which comparisons with C++ are skipped.
"""
import copy
import os
import pickle
import socket
import subprocess
import sys
import tempfile
import unittest
import unittest.mock
import warnings

import torch
import torch.distributed as dist

import pacer
from pacer import _option_help
from ranks import DEVICE, numbers, run_job

ALL = [pacer.OneBitAdam, pacer.OneBitLamb]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
SIZES = [1, 7, 1000, 5000]

def parameters(dtype=torch.float32):
    return [torch.nn.Parameter(numbers(n, i, dtype).to(DEVICE)) for i, n in enumerate(SIZES)]


def train(optimizer, params, steps, rank):
    for step in steps:
        for i, p in enumerate(params):
            p.grad = numbers(p.numel(), 100 * (step + 1) + 10 * rank + i, p.dtype).to(DEVICE)
        optimizer.param_groups[0]["lr"] = 0.01 / (step + 1)
        optimizer.step()


# ---- What a rank does; called by its name. ----


def job_train(rank, folder):
    world = pacer.Communicator()
    for kind in ALL:
        for dtype in DTYPES:
            train_and_resume(rank, f"{folder}/{kind.__name__}-{dtype}-{rank}", kind, DTYPES[dtype], world)


def train_and_resume(rank, path, kind, dtype, world):
    """Trains straight on, and once more from state_dicts saved in warm-up and after the freeze."""
    params = parameters(dtype)
    options = {"lr": 0.01, "weight_decay": 0.1, "freeze_step": 5, "compress_vectors": True}
    optimizer = kind(params, communicator=world, **options)
    for first, last in [(0, 3), (3, 9), (9, 15)]:
        train(optimizer, params, range(first, last), rank)
        assert optimizer.frozen_at == (5 if last > 5 else None), optimizer.frozen_at
        torch.save({"parameters": [p.detach() for p in params], "optimizer": optimizer.state_dict()}, f"{path}-{last}")
    assert optimizer.bytes_sent() > 0 and optimizer.attempts == 15
    assert 0 < optimizer.compression_error() < 1
    phases = {line["phase"] for line in optimizer.communicator.traffic()}
    assert {"warm-up", "compressed"} <= phases, phases
    for resumed_from in (3, 9):
        saved = torch.load(f"{path}-{resumed_from}", weights_only=True)
        others = [torch.nn.Parameter(p) for p in saved["parameters"]]
        other = kind(others, communicator=world, **{**options, "lr": 1.0})
        other.load_state_dict(saved["optimizer"])
        train(other, others, range(resumed_from, 15), rank)
        for a, b in zip(params, others):
            assert torch.equal(a, b), f"{kind.__name__} resumed from step {resumed_from} went elsewhere"
    torch.save(torch.cat(params).detach().cpu(), path)


def job_wrong_rank(rank, folder):
    params = parameters()
    optimizer = pacer.OneBitAdam(params, freeze_step=1, compress_vectors=True)  # finds the default group by itself
    train(optimizer, params, range(2), rank)
    torch.save(optimizer.state_dict(), f"{folder}/rank-{rank}")
    dist.barrier()
    before = [p.detach().clone() for p in params]
    try:
        optimizer.load_state_dict(torch.load(f"{folder}/rank-{1 - rank}"))
        raise AssertionError("the other rank's state was loaded")
    except ValueError as error:
        assert f"has the errors of rank {1 - rank} of 2, but this is rank {rank} of 2" in str(error), error
    train(optimizer, params, range(2, 3), rank)  # the load changed nothing
    assert not torch.equal(before[3], params[3])


def job_scaler(rank, folder):
    """One rank's gradient is not finite: no rank waits, and nothing changes on any."""
    params = parameters()
    optimizer = pacer.OneBitAdam(params, freeze_step=1, compress_vectors=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for step in range(3):
        before = [p.detach().clone() for p in params]
        scaler.scale(sum(((p - rank) ** 2).sum() for p in params)).backward()
        if step == 1 and rank == 1:
            params[2].grad[5] = float("inf")
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert torch.equal(before[3], params[3]) == (step == 1), step
    assert optimizer.skipped_steps() == 1
    assert scaler.get_scale() == (4.0 if rank == 1 else 8.0)


def job_muon(rank, folder):
    """Replicas of OneBitMuon stay equal, a state_dict goes on to the bit, and that of the other rank is refused."""
    shapes = [(24, 16), (16, 40), (9,)]
    make = lambda: [torch.nn.Parameter(numbers(torch.Size(s).numel(), i, torch.float32).view(s)) for i, s in enumerate(shapes)]

    def optimizer_of(params):
        return pacer.OneBitMuon([{"params": params[:2]}, {"params": params[2:], "orthogonalize": False}], lr=0.02)

    def train_muon(optimizer, params, steps):
        for step in steps:
            for i, p in enumerate(params):
                p.grad = numbers(p.numel(), 100 * (step + 1) + 10 * rank + i, p.dtype).view(p.shape)
            optimizer.step()

    params = make()
    optimizer = optimizer_of(params)
    train_muon(optimizer, params, range(3))
    assert optimizer.bytes_sent() > 0
    state = copy.deepcopy(optimizer.state_dict())
    assert "exp_avg" in state["state"][0]["this_rank"] and "exp_avg" not in state["state"][0]
    torch.save(state, f"{folder}/muon-{rank}")
    others = [torch.nn.Parameter(p.detach().clone()) for p in params]
    other = optimizer_of(others)
    other.load_state_dict(state)
    train_muon(optimizer, params, range(3, 6))
    train_muon(other, others, range(3, 6))
    flat = torch.cat([p.detach().flatten() for p in params])
    of_ranks = [torch.empty_like(flat) for _ in range(2)]
    dist.all_gather(of_ranks, flat)
    assert torch.equal(of_ranks[0], of_ranks[1])
    assert all(torch.equal(a, b) for a, b in zip(params, others))
    dist.barrier()
    try:
        other.load_state_dict(torch.load(f"{folder}/muon-{1 - rank}"))
        raise AssertionError("the other rank's state was loaded")
    except ValueError as error:
        assert f"has the errors of rank {1 - rank} of 2, but this is rank {rank} of 2" in str(error), error


def job_mean(rank, folder):
    """The sum of results and of what is carried is the sum of what went in."""
    mean = pacer.CompressedAllReduce(4096, pacer.Communicator())
    inputs = torch.zeros(4096, dtype=torch.float64)
    outputs = torch.zeros(4096, dtype=torch.float64)
    for call in range(20):
        buffer = numbers(4096, 50 * call + rank, torch.float32)
        inputs += buffer
        mean.reduce(buffer)
        outputs += buffer
    worker, server = mean.errors()
    carried = worker.double() / 2
    carried[2048 * rank : 2048 * (rank + 1)] += server.double()
    total = inputs / 2 - carried
    dist.all_reduce(total)
    torch.testing.assert_close(total, outputs, rtol=0, atol=1e-3)
    assert mean.bytes_sent() > 0


def job_group_and_address(rank, folder):
    """Ranks that seem to be on several hosts, and a group whose first rank is not the first of all."""
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    own_name, socket.gethostname = socket.gethostname, lambda: f"host-{rank}"
    world = pacer.Communicator()
    assert (world.rank, world.world_size) == (rank, 3)
    socket.gethostname = own_name
    group = dist.new_group([1, 2])
    if rank == 0:
        try:
            pacer.Communicator(group)
            raise AssertionError("a process outside the group made a Communicator")
        except ValueError as error:
            assert "does not belong to the process group" in str(error), error
    else:
        port = [0]
        if rank == 1:
            with socket.socket() as listener:
                listener.bind(("127.0.0.1", 0))
                port[0] = listener.getsockname()[1]
        dist.broadcast_object_list(port, group_src=0, group=group)
        world = pacer.Communicator(group, address=f"127.0.0.1:{port[0]}")
        assert (world.rank, world.world_size, world.backend) == (rank - 1, 2, "Gloo"), world.backend
        assert world.device == torch.device("cpu") and world.ranks_per_node == 2
    dist.barrier()


# ---- The tests. ----


class Ranks(unittest.TestCase):
    @unittest.skipUnless(os.environ.get("PACER_REFERENCE"), "PACER_REFERENCE names no program")
    def test_bits_are_those_of_cpp_through_the_freeze_and_after_a_resume(self):
        self.compare_with_cpp("cpu")

    @unittest.skipUnless(os.environ.get("PACER_REFERENCE"), "PACER_REFERENCE names no program")
    @unittest.skipUnless(torch.cuda.device_count() > 1, "fewer than two GPUs")
    def test_bits_on_gpus_are_those_of_cpp(self):
        self.compare_with_cpp("cuda")

    def compare_with_cpp(self, device):
        with run_job(__file__, "train", device=device) as folder:
            for kind in ALL:
                for dtype in DTYPES:
                    file = f"{folder}/reference"
                    program = [os.environ["PACER_REFERENCE"], kind.__name__, dtype, file]
                    subprocess.run(program, check=True, stderr=subprocess.DEVNULL)
                    expected = torch.load(file, weights_only=True)
                    for rank in range(2):
                        with self.subTest(kind.__name__, dtype=dtype, rank=rank):
                            trained = torch.load(f"{folder}/{kind.__name__}-{dtype}-{rank}", weights_only=True)
                            self.assertTrue(torch.equal(trained, expected))

    def test_the_state_of_another_rank_is_refused(self):
        run_job(__file__, "wrong_rank").cleanup()

    def test_a_grad_scaler_leaves_no_rank_waiting(self):
        run_job(__file__, "scaler").cleanup()

    def test_muon_keeps_replicas_equal_and_goes_on_to_the_bit(self):
        run_job(__file__, "muon").cleanup()

    def test_a_compressed_mean_loses_nothing_for_good(self):
        run_job(__file__, "mean").cleanup()

    def test_ranks_of_a_smaller_group_meet_at_an_address(self):
        run_job(__file__, "group_and_address", world_size=3).cleanup()


class Alone(unittest.TestCase):
    def test_a_single_process_needs_no_group(self):
        for kind in ALL:
            a, b = parameters(), parameters()
            optimizer = kind(a, freeze_step=2, compress_alone=True, compress_vectors=True)
            self.assertIsNone(optimizer.communicator)
            train(optimizer, a, range(4), 0)
            half = kind(b, freeze_step=2, compress_alone=True, compress_vectors=True)
            train(half, b, range(3), 0)
            other = kind(b, freeze_step=2, compress_alone=True, compress_vectors=True)
            other.load_state_dict(half.state_dict())
            train(other, b, range(3, 4), 0)
            for x, y in zip(a, b):
                self.assertTrue(torch.equal(x, y))

    def test_a_single_process_of_onebit_muon_is_muon(self):
        make = lambda: [torch.nn.Parameter(numbers(24 * 16, 1, torch.float32).view(24, 16))]
        a, b = make(), make()
        for optimizer, params in ((pacer.OneBitMuon(a, lr=0.02), a), (pacer.Muon(b, lr=0.02), b)):
            for step in range(3):
                params[0].grad = numbers(24 * 16, 7 + step, torch.float32).view(24, 16)
                optimizer.step()
        self.assertTrue(torch.equal(a[0], b[0]))

    def test_a_rank_that_a_launcher_started_says_whether_it_trains_alone(self):
        launched = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2",
                    "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}  # fmt: skip
        a, b = parameters(), parameters()
        train(pacer.OneBitAdam(a, freeze_step=2, compress_alone=True), a, range(4), 0)
        words = "torchrun started 2 ranks.*call torch.distributed.init_process_group first, or pass pacer.Communicator.alone()"
        with unittest.mock.patch.dict(os.environ, launched):
            for kind in [*ALL, pacer.OneBitMuon]:
                options = {"freeze_step": 2} if kind in ALL else {"orthogonalize": False}
                with self.assertRaisesRegex(ValueError, words.replace("()", r"\(\)")) as caught:
                    kind(b, **options)
                self.assertNotIn("\n", str(caught.exception))
            with self.assertRaisesRegex(ValueError, "pacer.Communicator.alone"):
                pacer.Communicator()
            alone = pacer.Communicator.alone()
            self.assertEqual((alone.rank, alone.world_size, alone.device), (0, 1, torch.device("cpu")))
            optimizer = pacer.OneBitAdam(b, freeze_step=2, compress_alone=True, communicator=alone)
            self.assertIs(optimizer.communicator, alone)
            train(optimizer, b, range(4), 0)
            self.assertEqual(alone.bytes_sent(), 0)
        for x, y in zip(a, b):
            self.assertTrue(torch.equal(x, y))
        for device in ("meta", "cuda:99"):
            with self.assertRaisesRegex(ValueError, f'device is "{device}", but'):
                pacer.Communicator.alone(device)

    def test_a_grad_scaler_gives_unscaled_gradients(self):
        results = []
        for scale, unscales in [(1.0, False), (8.0, False), (8.0, True)]:
            params = parameters()
            optimizer = pacer.OneBitAdam(params, freeze_step=1, compress_alone=True, compress_vectors=True)
            scaler = torch.amp.GradScaler("cpu", init_scale=scale)
            for _ in range(3):
                optimizer.zero_grad()
                scaler.scale(sum((p**2).sum() for p in params)).backward()
                if unscales:
                    scaler.unscale_(optimizer)
                scaler.step(optimizer)
                scaler.update()
            results.append(torch.cat(params))
        self.assertTrue(torch.equal(results[0], results[1]) and torch.equal(results[0], results[2]))

    def test_a_state_dict_from_before_the_first_step_loads(self):
        a, b = parameters(), parameters()
        first, second = pacer.OneBitAdam(a, freeze_step=2), pacer.OneBitAdam(b, freeze_step=2, lr=1.0)
        second.load_state_dict(first.state_dict())
        train(first, a, range(3), 0)
        train(second, b, range(3), 0)
        self.assertTrue(torch.equal(a[3], b[3]))

    def test_vectors_stay_in_full_precision_unless_asked(self):
        moved = []
        for options in ({"compress_vectors": True}, {}, {"compress": False}):
            params = parameters()
            train(pacer.OneBitAdam(params, freeze_step=2, compress_alone=True, **options), params, range(5), 0)
            moved.append(params[2])
        self.assertTrue(torch.equal(moved[1], moved[2]))
        self.assertFalse(torch.equal(moved[0], moved[1]))

    def test_a_frozen_state_of_before_version_3_goes_on_with_its_vectors_compressed(self):
        a, b = parameters(), parameters()
        first = pacer.OneBitAdam(a, freeze_step=2, compress_alone=True, compress_vectors=True)
        train(first, a, range(4), 0)
        saved = first.state_dict()
        del saved["param_groups"][0]["compress_vectors"]
        shared = saved["state"]["onebit"]["all_ranks"]
        del shared["group/0/compress_vectors"]
        shared["state_version"] = torch.full_like(shared["state_version"], 2)
        second = pacer.OneBitAdam(b, freeze_step=2, compress_alone=True)
        second.load_state_dict(saved)
        with torch.no_grad():
            for x, y in zip(a, b):
                y.copy_(x)
        train(first, a, range(4, 6), 0)
        train(second, b, range(4, 6), 0)
        for x, y in zip(a, b):
            self.assertTrue(torch.equal(x, y))

    def test_buckets_have_scales_of_their_own(self):
        a, b = parameters(), parameters()
        options = dict(freeze_step=1, compress_alone=True, compress_vectors=True, block_scales=False)
        train(pacer.OneBitAdam(a, **options), a, range(4), 0)
        train(pacer.OneBitAdam(b, bucket_bytes=1000, **options), b, range(4), 0)
        self.assertFalse(all(torch.equal(x, y) for x, y in zip(a, b)))
        with self.assertRaisesRegex(ValueError, "bucket_bytes must be at least 1 byte"):
            pacer.OneBitAdam(parameters(), bucket_bytes=0, freeze_step=1)

    def test_defaults_and_options_are_those_of_cpp(self):
        in_session_only = {"allow_early_freeze", "initial_lr", "overlap_backward"}
        for kind in ALL:
            described = set(_option_help.NAMES[kind.__name__].split()) - in_session_only
            optimizer = kind(parameters(), freeze_step=2)
            self.assertEqual(described, set(optimizer.param_groups[0]) - {"params"})
            bare = torch.classes.pacer.Optimizer(kind.__name__, {"freeze_step": 2.0}, {}, None)
            bare.add_group(parameters(), [], {"freeze_step": 2.0}, {})
            of_cpp, mine = bare.export_state(), optimizer.state["onebit"]["all_ranks"]
            for name, value in mine.items():
                self.assertTrue(torch.equal(value, of_cpp[name]), name)

    def test_names_of_deepspeed_are_taken_and_those_without_effect_named_once(self):
        plain = {"amsgrad": False, "eps_inside_sqrt": False, "cuda_aware": False, "max_grad_norm": 0.0}
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            pacer.OneBitAdam(parameters(), lr=1e-3, freeze_step=10, bias_correction=True, **plain)
            pacer.OneBitLamb(
                parameters(), freeze_step=10, max_coeff=10.0, min_coeff=0.01, coeff_beta=0.9, factor_max=4.0,
                factor_min=0.5, factor_threshold=0.1, **plain,
            )  # fmt: skip
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            pacer.OneBitAdam(parameters(), freeze_step=10, comm_backend_name="nccl", cuda_aware=True, max_grad_norm=1.0)
        self.assertEqual(len(seen), 1)
        for name in ("comm_backend_name", "cuda_aware", "max_grad_norm"):
            self.assertIn(name, str(seen[0].message))
        self.assertEqual(seen[0].filename, __file__)

    def test_what_cannot_work_is_refused_in_one_sentence(self):
        with self.assertRaisesRegex(ValueError, "has no amsgrad"):
            pacer.OneBitAdam(parameters(), freeze_step=2, amsgrad=True)
        with self.assertRaisesRegex(TypeError, 'no option "freeze_stpe"; did you mean "freeze_step"'):
            pacer.OneBitAdam(parameters(), freeze_stpe=2)
        with self.assertRaisesRegex(ValueError, "say when the variance freezes"):
            pacer.OneBitAdam(parameters())
        with self.assertRaisesRegex(TypeError, "must be a pacer.Communicator, not a int"):
            pacer.OneBitAdam(parameters(), 1e-3, 3, freeze_step=2)
        for options in ({"device": "cuda"}, {"device": "meta"}, {"address": "here"}):
            with tempfile.TemporaryDirectory() as folder:
                dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=0, world_size=1)
                try:
                    if options != {"device": "cuda"} or not torch.cuda.is_available():
                        with self.assertRaisesRegex(ValueError, "pacer.Communicator: .*, but "):
                            pacer.Communicator(**options)
                finally:
                    dist.destroy_process_group()
        with self.assertRaisesRegex(ValueError, "call torch.distributed.init_process_group first"):
            pacer.Communicator()
        optimizer = pacer.OneBitAdam(parameters(), freeze_step=2)
        for copies in (copy.deepcopy, pickle.dumps):
            with self.assertRaisesRegex(TypeError, "cannot be copied or pickled"):
                copies(optimizer)
        with self.assertRaisesRegex(ValueError, "none of a 1-bit optimizer"):
            optimizer.load_state_dict(torch.optim.AdamW(parameters()).state_dict())
        params = parameters()
        train(frozen := pacer.OneBitAdam(params, freeze_step=1), params, range(2), 0)
        with self.assertRaisesRegex(ValueError, "cannot be added after the variance froze"):
            frozen.add_param_group({"params": parameters()})


if __name__ == "__main__":
    unittest.main()
