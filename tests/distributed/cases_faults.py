"""F1: one rank of four is killed or stopped somewhere in a run with checkpoints. The others end by an error, in time;
nothing is left behind; and a new run that goes on from the last checkpoint ends where a run without faults does."""
import concurrent.futures
import os
import re
import shutil
import tempfile
import time

from ranks import LONG, Ranks, expect, in_time
from run_ranks import case

WORLD_SIZE = 4
DEADLINE = 3.0  # seconds, of each operation
# How long survivors may take beyond what they must, on a machine with fewer cores than ranks.
LOAD = in_time(4.0)

# Where, and at which rank in the short form.
POINTS = {
    "rendezvous": 1, "after_rendezvous": 2, "control:2": 3, "control:4": 0, "data:1": 0, "data:3": 1, "data:3:inside": 2,
    "data:9": 3, "backward": 0, "after_backward": 1, "before_kernel": 2, "after_kernel": 3, "in_save": 0, "in_save ": 1,
    "control:30": 2, "in_load": 3,
}


def run(worker, folder, world_size, scenario="faults", **arguments):
    return Ranks(worker, scenario, world_size, timeout=int(DEADLINE * 1000), folder=folder, **arguments)


def result(ranks):
    for rank in ranks:
        rank.end()
    hashes = {rank.said("^hash (.*)")[0][1] for rank in ranks}
    expect(len(hashes) == 1, f"ranks ended with different models: {hashes}")
    return hashes.pop()


def unbroken(worker, world_size=WORLD_SIZE, **arguments):
    with tempfile.TemporaryDirectory() as folder, run(worker, folder, world_size, **arguments) as ranks:
        return result(ranks)


def suffer(worker, wanted, point, culprit, signal, world_size=WORLD_SIZE, grace=2, names_it=False, **arguments):
    what = f"{signal} of rank {culprit} of {world_size} at {point}"
    with tempfile.TemporaryDirectory() as folder:
        point = point.strip()
        if point == "in_load":  # there must be something to load
            with run(worker, folder, world_size, **arguments) as ranks:
                result(ranks)
            newest = sorted(name for name in os.listdir(folder) if name.startswith("step-"))[-1]
            shutil.rmtree(os.path.join(folder, newest))
        with run(worker, folder, world_size, culprit=culprit, point=point, signal=signal, **arguments) as ranks:
            ranks[culprit].wait_for("^fault$")
            start = time.monotonic()
            limit = (grace if signal == "KILL" else DEADLINE + grace) + LOAD
            if point == "rendezvous":
                limit = 2 * DEADLINE + LOAD  # nobody can know that somebody is missing before the deadline
            for rank in ranks:
                if rank.number == culprit:
                    continue
                rank.end(status=3, patience=limit + 20)
                text = rank.said("^error: (.*)")[0][1]
                vague = "" if names_it else "|cannot be reached|Connection"
                expect(re.search(f"rank(s [0-9, and]*| ){culprit}\\b{vague}", text),
                       f"{what}: {rank} does not suspect it: {text}")
            took = time.monotonic() - start
            expect(took < limit, f"{what}: survivors needed {took:.1f} s")
            ranks[culprit].kill()
            ranks[culprit].process.wait()
        with run(worker, folder, world_size, **arguments) as ranks:
            expect(result(ranks) == wanted, f"{what}: the resumed run ended elsewhere")
            resumed = ranks[0].said("^resumed (.*)")[0][1]
        left = [name for name in os.listdir(folder) if not name.startswith("step-")]
        expect(not left, f"{what}: {left} are left")
        print(f"  {what}: survivors ended after {took:.2f} s, resumed after step {resumed}")


# In the compressed step: before and in both of its collectives, and where the errors of a rank are saved. Freezing after two
# steps makes these the operations of steps 3 and later.
COMPRESSED_POINTS = {"all_to_all:1": 0, "all_to_all:2:inside": 1, "all_gather:1": 2, "all_gather:2:inside": 3,
                     "all_to_all:3": 1, "in_save": 2}


@case
def in_compressed_steps(worker):
    wanted = unbroken(worker, optimizer="OneBitAdam")
    for number, (point, rank) in enumerate(COMPRESSED_POINTS.items()):
        for culprit in range(WORLD_SIZE) if LONG else [rank]:
            suffer(worker, wanted, point, culprit, "STOP" if number == 2 else "KILL", optimizer="OneBitAdam")


# By nodes. A compressed step adds three buckets inside nodes (all_to_all and all_gather 1 to 3), exchanges signs between nodes (all_to_all 4,
# all_gather 5), and puts what came together inside them (all_gather 4 and 6).
NODE_POINTS = {"all_to_all:1": 0, "all_gather:2:inside": 3, "all_to_all:4": 1, "all_gather:4:inside": 2,
               "all_gather:5:inside": 0, "all_to_all:10": 3, "in_save": 2}


@case
def in_steps_by_nodes(worker):
    setting = {"optimizer": "OneBitAdam by nodes", "ranks_per_node": 2}
    wanted = unbroken(worker, **setting)
    for number, (point, rank) in enumerate(NODE_POINTS.items()):
        for culprit in range(WORLD_SIZE) if LONG else [rank]:
            suffer(worker, wanted, point, culprit, "STOP" if number == 2 else "KILL", **setting)


# Sharded: among the sums of parts, in each of three micro-steps, the gathering of parameters, and that of state for a checkpoint.
SHARD_POINTS = {"data:2": 0, "data:7:inside": 1, "data:20": 2, "backward": 3, "after_backward": 1, "after_kernel": 2, "in_save": 0,
                "in_load": 3}


@case
def in_sharded_steps(worker):
    for what in ("gradients", "parameters"):
        wanted = unbroken(worker, shards=what)
        for number, (point, rank) in enumerate(SHARD_POINTS.items()):
            if LONG or number % 2 == (what == "gradients"):
                for culprit in range(WORLD_SIZE) if LONG else [rank]:
                    suffer(worker, wanted, point, culprit, "STOP" if number == 3 else "KILL", shards=what)
    by_nodes = {"shards": "parameters", "ranks_per_node": 2}
    suffer(worker, unbroken(worker, **by_nodes), "data:7:inside", 3, "KILL", **by_nodes)
    onebit = {"shards": "gradients", "ranks_per_node": 2, "optimizer": "OneBitAdam by nodes"}
    wanted = unbroken(worker, **onebit)
    suffer(worker, wanted, "all_to_all:2:inside", 0, "KILL", **onebit)
    suffer(worker, wanted, "in_save", 2, "KILL", **onebit)


# In the middle of three stages: before ranks agree, in the messages of both directions, in both passes, where norms come together,
# and while a checkpoint is saved.
PIPELINE_POINTS = ("begin", "receive from 0:15:inside", "in_forward", "send to 2:15:inside", "receive from 2:14:inside", "in_backward",
                   "all_gather:4:inside", "in_save")


@case
def in_pipeline(worker):
    """Several runs at once: most of a run with a stopped rank is waiting for the deadline."""
    chain = {"scenario": "faults_in_pipeline", "schedule": "1f1b", "world_size": 3, "names_it": True}
    pairs = {"scenario": "faults_in_pipeline", "schedule": "zero-bubble", "stages": 2, "world_size": 4, "names_it": True}
    runs = [(chain, point, culprit, signal) for number, point in enumerate(PIPELINE_POINTS)
            for signal in (("STOP", "KILL") if LONG else ("STOP",) if number % 4 == 0 else ("KILL",))
            for culprit in (range(3) if LONG and ":" not in point else [1])]
    runs.append((pairs, "receive from 0:15:inside", 3, "KILL"))
    with concurrent.futures.ThreadPoolExecutor(3) as executor:
        wanted = {}
        for setting in (chain, pairs):
            arguments = {name: value for name, value in setting.items() if name != "names_it"}
            wanted[setting["world_size"]] = executor.submit(unbroken, worker, **arguments)
        results = [executor.submit(suffer, worker, wanted[setting["world_size"]].result(), point, culprit, signal, **setting)
                   for setting, point, culprit, signal in runs]
        for result_of_run in results:
            result_of_run.result()


@case
def killed_or_stopped(worker):
    wanted = unbroken(worker)
    for number, (point, rank) in enumerate(POINTS.items()):
        if LONG:
            for culprit in range(WORLD_SIZE):
                for signal in ("KILL", "STOP"):
                    suffer(worker, wanted, point, culprit, signal)
        elif number % 2 == 0 or point in ("in_load", "data:9"):
            suffer(worker, wanted, point, rank, "STOP" if number % 4 == 0 else "KILL")
