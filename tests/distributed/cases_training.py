"""Training on processes, beside one process that does the same."""
import os

from ranks import Ranks
from run_ranks import case

LONG = os.environ.get("PACER_TEST_LONG") == "1"


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
def compressed_by_hand(worker):
    """Compressed means and 1-bit optimizers over Gloo, beside threads: ranks and nodes as workers."""
    play(worker, "compress", 3, steps=20)
    play(worker, "compress", 4, steps=20, ranks_per_node=2)


@case
def resume(worker):
    """Four ranks, two nodes of two where nodes matter, to the bit."""
    play(worker, "train_resume", 4, folder="{folder}", ranks_per_node=2)
