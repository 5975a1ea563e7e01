"""Groups and lanes over Gloo: random programs, messages that cross, and killed ranks."""
import random
import time

from ranks import LONG, Ranks, expect, in_time
from run_ranks import case

LONG_PATIENCE = 550 if LONG else 60


def play_programs(worker, world_size, programs, **arguments):
    with Ranks(worker, "random_programs", world_size, programs=programs, **arguments) as ranks:
        ranks.end(patience=LONG_PATIENCE)
        expect(all(rank.said(f"played {programs}") for rank in ranks), ranks[0].story())


@case
def random_programs(worker):
    """Ordered sums among other operations, for which each rank waits in an order of its own."""
    for world_size, programs in ((2, 30), (3, 15), (8, 2)):
        play_programs(worker, world_size, 1000 if LONG else programs, fresh=20 if LONG else 1)


def kill_in_programs(worker, world_size, runs, grace=8, **arguments):
    """A rank is killed at a random point: all others end in time, with its number."""
    rng = random.Random(5)
    for run in range(runs):
        culprit, at = rng.randrange(world_size), rng.randrange(25)
        with Ranks(worker, "random_programs", world_size, programs=2, first=1000 + 2 * run, culprit=culprit, at=at,
                   timeout=20000, **arguments) as ranks:
            ranks[culprit].end(-9)
            start = time.monotonic()
            for rank in ranks:
                if rank is ranks[culprit]:
                    continue
                rank.end(None)
                # Who had nothing left to do with it may have come to the end.
                expect(rank.said(f"error: .*rank {culprit}\\b") or rank.said("played 2"), f"run {run}: {rank.story()}")
            took = time.monotonic() - start
            expect(took < in_time(grace), f"run {run}: the others needed {took:.1f} s")


@case
def killed_in_programs(worker):
    for world_size in (3, 4):
        kill_in_programs(worker, world_size, 100 if LONG else 4)


@case
def killed_in_a_pair(worker):
    """Ranks in groups without the killed one go on."""
    with Ranks(worker, "pairs", 4, timeout=20000) as ranks:
        ranks[3].end(-9)
        ranks[2].end(3)
        expect(ranks[2].said("error: .* in pair failed on rank 2 of 4: rank 3 left: its process has ended"),
               ranks[2].story())
        for rank in ranks[:2]:
            expect(rank.end().said("went on"), rank.story())


@case
def crossing(worker):
    """The two messages between neighbours of a pipeline cross, together or in a lane for each direction."""
    for lanes in ({}, {"lanes": 1}):
        with Ranks(worker, "crossing", 4, rounds=1000 if LONG else 60, **lanes) as ranks:
            ranks.end(patience=LONG_PATIENCE)
            print(f"  {ranks[1].lines}")
