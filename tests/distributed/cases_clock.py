"""A wall clock that jumps by hours, as when it is set, changes no deadline."""
import os
import time

from cases_gloo import expect_deadlines
from cases_rendezvous import FILE, store
from ranks import Ranks, expect, in_time
from run_ranks import case

JUMPING = {"LD_PRELOAD": os.environ.get("PACER_JUMPING_CLOCK", "")}


@case
def meeting(worker):
    """A rank that never comes is named at the deadline, and one that comes is met."""
    for place in (FILE, store()):
        with Ranks(worker, "meet", 2, JUMPING, only=(0,), timeout=2000, **place) as ranks:
            ranks.wait_for("starting")
            start = time.monotonic()
            ranks.end(3)
            took = time.monotonic() - start
            expect(ranks[0].said("error: only 1 of 2 ranks came"), ranks[0].story())
            expect(1.5 < took < in_time(10), f"took {took:.1f} s")
        with Ranks(worker, "meet", 2, JUMPING, **place) as ranks:
            ranks.end()


@case
def operations(worker):
    """Who waits for a rank in vain knows at the deadline of the call, and the connections end as quickly as ever."""
    with Ranks(worker, "alone_in_operations", 2, JUMPING) as ranks:
        expect_deadlines(ranks[0], end=900)


@case
def connecting(worker):
    """A rank stops after it has met the others and before it is connected."""
    with Ranks(worker, "half_connected", 3, JUMPING, call=1000) as ranks:
        for rank in ranks[:2]:
            found = rank.wait_for(r"failed after (\d+) ms: ")
            expect(int(found[1]) < 3500, rank.story())
            rank.end()
