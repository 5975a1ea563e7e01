"""The same over NCCL, one GPU a rank: training beside one process, resumption, and F2, killed and stopped ranks."""
import tempfile

import cases_faults
import cases_groups
from cases_training import go_on, part, play
from ranks import LONG, Ranks, gpus
from run_ranks import case
from soak import soak



def worlds():
    """World sizes that this machine has GPUs for."""
    found = [size for size in (2, 4) if size <= gpus()]
    if not found:
        print("PACER_SKIPPED: needs 2 GPUs")
    return found


@case
def training(worker):
    for world_size in worlds():
        play(worker, "train_pairs", world_size, nccl=1, steps=50 if LONG else 5)
        play(worker, "train_long", world_size, nccl=1, steps=500 if LONG else 50)
        play(worker, "train_unordered", world_size, nccl=1, steps=500 if LONG else 50)
        play(worker, "memory_order", world_size, nccl=1)


@case
def batch_norm(worker):
    """Statistics of all ranks' rows, which travel beside gradients."""
    for world_size in worlds():
        play(worker, "train_batch_norm", world_size, nccl=1, steps=100 if LONG else 8)
        play(worker, "batch_norm_mistake", world_size, nccl=1)


@case
def shards(worker):
    for world_size in worlds():
        play(worker, "train_shards", world_size, nccl=1, steps=500 if LONG else 30)
        play(worker, "train_shards", world_size, nccl=1, steps=10, ranks_per_node=max(1, world_size // 2))
        for what in ("gradients", "parameters"):
            wanted = cases_faults.unbroken(worker, world_size, nccl=1, shards=what)
            cases_faults.suffer(worker, wanted, "data:7:inside", 1, "KILL", world_size, grace=10, nccl=1, shards=what)
        play(worker, "train_split_head", world_size, nccl=1, steps=60 if LONG else 12)
        play(worker, "train_deferred", world_size, nccl=1, steps=3)


@case
def flat(worker):
    """Memory of host and device; soak.py --nccl is the long form."""
    for world_size in worlds()[:1]:
        soak(worker, steps=200, ranks=world_size, looks=8, patience=240, nccl=1)


@case
def pipeline(worker):
    """Two stages, and where there are four GPUs two pipelines, to the bit."""
    for world_size in worlds():
        play(worker, "train_pipelines", world_size, nccl=1, steps=200 if LONG else 10)
        play(worker, "train_pipeline_parts", world_size, nccl=1, steps=50 if LONG else 5)


@case
def pipeline_resume(worker):
    """Any number of stages go on from a checkpoint of any other, with FusedAdamW and with torch's optimizers."""
    if not worlds():
        return
    for optimizer in ("FusedAdamW", "Adam", "SGD", *(("AdamW", "RMSprop", "Adagrad") if LONG else ())):
        with tempfile.TemporaryDirectory() as folder:
            wanted, _ = part(worker, folder, 1, stages=0, steps=5, optimizer=optimizer, nccl=1)
        parts = [(2, 2, "1f1b", 2), (1, 0, "", 3), (2, 2, "gpipe", 5)]
        go_on(worker, wanted, parts, optimizer=optimizer, nccl=1)


@case
def parameters(worker):
    """Parameters that join, leave or sit out, and gradients touched on their way."""
    for world_size in worlds():
        play(worker, "parameters_join", world_size, nccl=1)
        play(worker, "parameters_sit_out", world_size, nccl=1)
        play(worker, "parameters_touch", world_size, nccl=1)


@case
def compressed(worker):
    """Compressed means and 1-bit Adam on GPUs have the bits of threads on the CPU."""
    for world_size in worlds():
        play(worker, "compress", world_size, nccl=1, steps=200 if LONG else 30)
        if world_size % 2 == 0:
            play(worker, "compress", world_size, nccl=1, steps=30, ranks_per_node=2)


@case
def compressed_ahead(worker):
    """1-bit optimizers whose buckets travel while backward runs."""
    for world_size in worlds():
        play(worker, "train_ahead", world_size, nccl=1, steps=200 if LONG else 30)


@case
def resume(worker):
    for world_size in worlds():
        play(worker, "train_resume", world_size, nccl=1, folder="{folder}")


@case
def groups(worker):
    """Random programs on groups and lanes, messages that cross, killed ranks."""
    for world_size in worlds():
        cases_groups.play_programs(worker, world_size, 1000 if LONG else 60, nccl=1, fresh=50 if LONG else 20)
        cases_groups.kill_in_programs(worker, world_size, 20 if LONG else 2, grace=15, nccl=1)
        for lanes in ({}, {"lanes": 1}):
            with Ranks(worker, "crossing", world_size, nccl=1, rounds=1000 if LONG else 100, **lanes) as ranks:
                ranks.end(patience=cases_groups.LONG_PATIENCE)
                print(f"  {ranks[0].lines}")


@case
def killed_or_stopped(worker):
    """F2. Waiting for a GPU has a deadline, and a second run on the same GPUs works."""
    points = ("data:3", "data:9:inside", "control:6", "backward", "before_kernel", "in_save")
    for world_size in worlds():
        wanted = cases_faults.unbroken(worker, world_size, nccl=1)
        for number, point in enumerate(points):
            for signal in ("KILL", "STOP"):
                if LONG or (number + (signal == "STOP")) % 2 == 0:
                    cases_faults.suffer(worker, wanted, point, number % world_size, signal, world_size, grace=10, nccl=1)


@case
def killed_or_stopped_by_nodes(worker):
    """The same in the groups of a node and between nodes."""
    if gpus() < 4:
        print("PACER_SKIPPED: needs 4 GPUs")
        return
    setting = {"optimizer": "OneBitAdam by nodes", "ranks_per_node": 2, "nccl": 1}
    wanted = cases_faults.unbroken(worker, **setting)
    for point, rank, signal in (("all_to_all:4:inside", 3, "KILL"), ("all_to_all:7", 1, "STOP")):
        cases_faults.suffer(worker, wanted, point, rank, signal, grace=10, **setting)
