"""A wall clock that jumps by hours, as when it is set, changes no deadline of a meeting."""
import os
import time

from cases_rendezvous import FILE, store
from ranks import Ranks, expect
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
            expect(1.5 < took < 10, f"took {took:.1f} s")
        with Ranks(worker, "meet", 2, JUMPING, **place) as ranks:
            ranks.end()
