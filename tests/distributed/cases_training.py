"""Training on processes, beside one process that does the same."""
import os
import random
import re
import signal
import tempfile
import time

from ranks import LONG, Ranks, expect
from run_ranks import case



def play(worker, scenario, world_size, **arguments):
    with Ranks(worker, scenario, world_size, timeout=60000, **arguments) as ranks:
        for rank in ranks:
            rank.end(patience=600)
        return ranks


@case
def pairs_of_hooks(worker):
    """Every pair of the hooks that matter most, to the bit."""
    for world_size in (1, 2, 3, 4):
        play(worker, "train_pairs", world_size, steps=500 if LONG else 6)


@case
def all_hooks_for_long(worker):
    play(worker, "train_long", 4, steps=500 if LONG else 100)


@case
def shards(worker):
    for world_size in (2, 3):
        play(worker, "train_shards", world_size, steps=500 if LONG else 20)
    play(worker, "train_shards", 4, steps=500 if LONG else 10, ranks_per_node=2)
    for world_size in (2, 3):
        play(worker, "train_split_head", world_size, steps=60 if LONG else 12)
        play(worker, "train_deferred", world_size, steps=3)


@case
def unordered_sums(worker):
    for world_size in (2, 4):
        play(worker, "train_unordered", world_size, steps=500 if LONG else 50)


@case
def compressed_momentum(worker):
    """1-bit Adam over Gloo, beside threads."""
    for world_size in (2, 3):
        play(worker, "train_compressed", world_size, steps=500 if LONG else 20)
    play(worker, "train_compressed", 4, steps=500 if LONG else 20, ranks_per_node=2)


@case
def compressed_ahead(worker):
    """1-bit optimizers over Gloo whose buckets travel while backward runs."""
    play(worker, "train_ahead", 3, steps=200 if LONG else 12)


@case
def compressed_by_hand(worker):
    """Compressed means and 1-bit optimizers over Gloo, beside threads: ranks and nodes as workers."""
    play(worker, "compress", 3, steps=20)
    play(worker, "compress", 4, steps=20, ranks_per_node=2)


@case
def resume(worker):
    """Four ranks, two nodes of two where nodes matter, to the bit."""
    play(worker, "train_resume", 4, folder="{folder}", ranks_per_node=2)


def rounds_of(ranks):
    """What each rank said of each round, as {(rank, round): hash}."""
    return {(rank.number, int(found[1])): found[2] for rank in ranks for found in rank.said(r"^round (\d+) (\S+)$")}


@case
def gan_killed(worker):
    """A GAN in two Sessions on two ranks, which are killed at random places until it is done: both networks go on from one
    moment, and every round has the bits of an unbroken run."""
    setting = {"world_size": 2, "timeout": 60000, "rounds": 200 if LONG else 60}
    with tempfile.TemporaryDirectory() as folder, Ranks(worker, "train_gan", folder=folder, **setting) as ranks:
        ranks.end()
        wanted = rounds_of(ranks)
    kills = repeated = last = 0
    random.seed(7)
    with tempfile.TemporaryDirectory() as folder:
        while True:
            with Ranks(worker, "train_gan", folder=folder, **setting) as ranks:
                start = int(ranks[0].wait_for(r"^resumed (\d+)$")[1])
                # A save, of every second round or more, begins once the one before it is complete.
                expect(last - 3 <= start <= last + 1, f"a run that was killed after round {last} went on from round {start}")
                if start + 12 < setting["rounds"]:
                    ranks[0].wait_for(f"^round {start + random.randint(1, 12)} ")
                    time.sleep(random.choice((0, random.uniform(0, 0.02))))
                    for rank in ranks:
                        rank.kill()
                    kills += 1
                for rank in ranks:
                    rank.end(status=None)
                found = rounds_of(ranks)
                ended = all(rank.said("^ended$") for rank in ranks)
            for key, value in found.items():
                expect(value == wanted[key], f"after {kills} kills, rank {key[0]} is another in round {key[1]}")
            repeated += sum(key[1] <= last for key in found)
            last = max([last, *(number for _, number in found)])
            if ended:
                break
    expect(kills >= 3 and repeated > 0, f"{kills} kills, {repeated} rounds done twice: that shows nothing")
    print(f"  {kills} kills, {repeated} rounds of a rank done twice")


@case
def pipeline(worker):
    """Every schedule, beside one process and beside two data-parallel ones, to the bit."""
    for world_size in (2, 4):
        play(worker, "train_pipelines", world_size, steps=200 if LONG else 4)
    play(worker, "train_pipeline_parts", 2, steps=50 if LONG else 3)


@case
def parameters(worker):
    """Parameters that join, leave or sit out: the bits of every rank, and one process beside them. Gradients touched on their way."""
    for world_size in (2, 3):
        play(worker, "parameters_join", world_size)
        play(worker, "parameters_sit_out", world_size)
        play(worker, "parameters_touch", world_size)


@case
def batch_norm(worker):
    """Statistics of all ranks' rows, beside one process with the whole batch; and a rank whose input does not fit."""
    for world_size in (2, 3):
        play(worker, "train_batch_norm", world_size, steps=100 if LONG else 8)
    play(worker, "batch_norm_mistake", 3)


@case
def memory_order(worker):
    """Parameters in another memory order are refused on one rank, and train on all."""
    play(worker, "memory_order", 2)


def part(worker, folder, world_size, **arguments):
    """The state that a part of a run had after each step, as {(step, name): checksum}, and where it resumed."""
    with Ranks(worker, "train_pipeline_part", world_size, timeout=60000, folder=folder, **arguments) as ranks:
        ranks.end()
    states = {}
    for rank in ranks:
        for found in rank.said(r"^state (\d+) (\S+) (\S+)$"):
            step, name, checksum = found.groups()
            stored = states.setdefault((int(step), name), checksum)
            expect(stored == checksum, f"{rank} has another {name} after step {step}")
    return states, int(ranks[0].said(r"^resumed (\d+)$")[0][1])


def go_on(worker, wanted, parts, **arguments):
    """Parts of a run, one after the other from each other's checkpoints: (ranks, stages, schedule, last step)."""
    with tempfile.TemporaryDirectory() as folder:
        last = 0
        for world_size, stages, schedule, steps in parts:
            what = f"{schedule} of {stages} stages on {world_size} ranks from step {last} of {parts}"
            states, resumed = part(worker, folder, world_size, stages=stages, schedule=schedule, steps=steps, **arguments)
            expect(resumed == last, f"{what}: it resumed after step {resumed}")
            expected = {key: value for key, value in wanted.items() if max(last, 1) <= key[0] <= steps}
            other = sorted(key for key in expected.keys() | states.keys() if expected.get(key) != states.get(key))
            expect(not other, f"{what}: {len(other)} tensors of {len(expected)} differ, the first {other[:1]}")
            last = steps


@case
def pipeline_resume(worker):
    """Any number of stages, and none, go on from a checkpoint of any other, with all of AdamW's state, to the bit."""
    with tempfile.TemporaryDirectory() as folder:
        wanted, _ = part(worker, folder, 1, stages=0, steps=8)
    go_on(worker, wanted, [(2, 2, "1f1b", 2), (1, 0, "", 3), (4, 4, "zero-bubble", 5), (1, 0, "", 6), (2, 2, "interleaved", 8)])
    go_on(worker, wanted, [(1, 0, "", 3), (2, 2, "gpipe", 5)])
    with tempfile.TemporaryDirectory() as folder:  # with two replicas
        wanted, _ = part(worker, folder, 2, stages=0, steps=6)
    go_on(worker, wanted, [(4, 2, "zero-bubble", 2), (2, 0, "", 4), (4, 2, "1f1b", 6)])
    with tempfile.TemporaryDirectory() as folder:  # tied weights, whose gradients add up alike where stages do
        wanted, _ = part(worker, folder, 2, stages=2, schedule="1f1b", tied=1, steps=5)
    go_on(worker, wanted, [(2, 2, "1f1b", 3), (1, 0, "", 3), (2, 2, "gpipe", 5)], tied=1)
    for optimizer in ("Adam", *(("AdamW", "SGD", "RMSprop", "Adagrad") if LONG else ())):  # torch's
        with tempfile.TemporaryDirectory() as folder:
            wanted, _ = part(worker, folder, 1, stages=0, steps=5, optimizer=optimizer)
        go_on(worker, wanted, [(2, 2, "1f1b", 2), (1, 0, "", 3), (2, 2, "gpipe", 5)], optimizer=optimizer)


# What all ranks are told where the last one differs; {first} is the first rank of its pipeline.
DISAGREE = 'CommunicationError: the ranks disagree: rank 0 has "{}", but rank {{last}} has "{}"; build the same model'
DIFFERENCES = {
    "micro-batches": DISAGREE.format("micro-steps: 4", "micro-steps: 8"),
    "schedule": DISAGREE.format("pipeline: 1f1b over 2 ranks, 1 stages a rank", "pipeline: gpipe over 2 ranks, 1 stages a rank"),
    "chunks": DISAGREE.format("pipeline: 1f1b over 2 ranks, 1 stages a rank", "pipeline: interleaved over 2 ranks, 2 stages a rank"),
    "cut": DISAGREE.format(r"hook pipeline: .*cut at \[0, 4, 8\].*", r"hook pipeline: .*cut at \[0, 3, 8\].*"),
    "shape": DISAGREE.format("tensor of the model: .*", "tensor of the model: .*"),
    "batch": "CommunicationError: rank {first} and rank {last} of one pipeline were given different batches; load the same one",
    "rows": "CommunicationError: .*rank {last} left: an exception ended its training",
}
WRONG_ROWS = r"InvalidArgument: a tensor of the batch given to the Pipeline has shape \[5, 12\], but 4 micro-batches need"


@case
def pipeline_differences(worker):
    """A rank that differs is an error on every rank, before any activation or gradient is sent."""
    for world_size in (2, 4):
        places = {"first": world_size // 2 - 1, "last": world_size - 1}
        for rank in play(worker, "pipeline_differences", world_size):
            for name, wanted in DIFFERENCES.items():
                text = rank.said(f"^{name}: (.*)")[0][1]
                if name == "rows" and rank.number == places["last"]:
                    wanted = WRONG_ROWS
                expect(re.match(wanted.format(**places), text), f"{rank} of {world_size}: {name}: {text}")
                expect(rank.said(f"^{name} payloads: 0$"), f"{rank} of {world_size}: {name}: it sent activations or gradients")


def stopped_runs(worker, folder, **arguments):
    return Ranks(worker, "train_stop", 2, timeout=60000, folder=folder, **arguments)


def ends(ranks):
    """What all ranks say at their end, which must be an exit with 0 and the same for all."""
    for rank in ranks:
        rank.end()
    found = {rank.said(r"^ended (\d+) (.*)$")[0].groups() for rank in ranks}
    expect(len(found) == 1, f"ranks ended differently: {found}")
    step, state = found.pop()
    return int(step), state


@case
def stop_by_signal(worker):
    """A signal to one rank stops both after the same step, with a checkpoint; the resumed run ends as an unbroken one."""
    steps = 30
    with tempfile.TemporaryDirectory() as folder, stopped_runs(worker, folder, steps=steps) as ranks:
        wanted = ends(ranks)
    for culprit, number in ((0, signal.SIGTERM), (1, signal.SIGTERM), (1, signal.SIGINT)):
        with tempfile.TemporaryDirectory() as folder:
            with stopped_runs(worker, folder, steps=steps, pause=50) as ranks:
                ranks[culprit].wait_for("^step 4$")
                ranks[culprit].ask_to_stop(number)
                step, _ = ends(ranks)
            expect(4 <= step < steps, f"the signal came after step 4 of {steps}, the run ended after step {step}")
            stored = sorted(name for name in os.listdir(folder) if not name.startswith("."))
            expect(stored == [f"step-{step:010d}"], f"stopped after step {step}, but stored are {stored}")
            with stopped_runs(worker, folder, steps=steps) as ranks:
                found = ends(ranks)
                for rank in ranks:
                    expect(rank.said(f"^resumed {step}$"), f"{rank} did not resume after step {step}")
            expect(found == wanted, f"a run stopped after step {step} ended at {found}, an unbroken one at {wanted}")
