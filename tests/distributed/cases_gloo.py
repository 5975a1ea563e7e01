"""Operations of the Gloo transport, and what they do when a rank is killed, stopped or late."""
import contextlib
import time

from ranks import LONG, Ranks, expect, free_port, in_time
from run_ranks import case

OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "receive", "send")


@case
def operations(worker):
    for world_size in (2, 3, 4):
        with Ranks(worker, "operations", world_size) as ranks:
            ranks.end()
        with Ranks(worker, "rank_order", world_size, host="127.0.0.1", port=free_port()) as ranks:
            ranks.end()
    with Ranks(worker, "at_once", 3) as ranks:
        ranks.end()


@case
def early_end(worker):
    for world_size in (2, 4):
        with Ranks(worker, "early_end", world_size, rounds=12) as ranks:
            ranks.end()


@case
def killed(worker):
    """Everybody who waits for a killed rank knows at once, far before the deadline."""
    for operation in ("all_reduce", "all_to_all", "broadcast", "receive"):
        with Ranks(worker, "absent", 4, operation=operation, call=30000) as ranks:
            ranks.wait_for("ready")
            time.sleep(0.3)
            ranks[3].kill()
            start = time.monotonic()
            for rank in ranks[:3]:
                rank.end()
            took = time.monotonic() - start
            expect(took < in_time(5), f"{operation}: the others needed {took:.2f} s to end")
            ranks[3].end(-9)
            for rank in ranks[:3]:
                expect(rank.said(rf"{operation}: failed after .*Gloo: .*[Cc]onnection|closed"), rank.story())
                expect(not rank.warnings, f"{operation}: {rank.warnings}")
            print(f"  {operation}: {took:.2f} s, {[r.lines[1:] for r in ranks[:3]]}")


@case
def stopped(worker):
    """Who waits for a stopped rank knows at the deadline of the call, whatever that of the group."""
    for operation in OPERATIONS:
        with Ranks(worker, "absent", 3, operation=operation, call=1000, timeout=20000) as ranks:
            ranks[2].wait_for("ready")
            ranks[2].stop()
            for rank in ranks[:2]:
                found = rank.wait_for(rf"{operation}: (timeout|failed) after (\d+) ms")
                rank.end()
                expect(900 <= int(found[2]) <= 2000, f"{operation}: {rank.story()}")
            expect(any(rank.said("timeout after") for rank in ranks[:2]), f"{operation}: nobody saw a timeout")
            print(f"  {operation}: {[r.lines[1] for r in ranks[:2]]}")


def expect_deadlines(rank, end):
    """Of the scenario alone_in_operations. `end`: milliseconds in which the connections must have ended."""
    rank.end()
    for operation in OPERATIONS:
        found = rank.said(rf"^{operation}: timeout after (\d+) ms")
        expect(len(found) == 1 and 1000 <= int(found[0][1]) <= 2000, f"{operation}: {rank.story()}")
    ended = [int(found[1]) for found in rank.said(r"^ended after (\d+) ms")]
    expect(len(ended) == len(OPERATIONS) and max(ended) < end, rank.story())
    expect(len(rank.said("^earlier: failed after .* closed")) == len(OPERATIONS), rank.story())


@case
def stuck(worker):
    """A write inside Gloo never returns: the deadline is kept, and so is the end of the transport and of the process."""
    with Ranks(worker, "alone_in_operations", 2, own_program=True, stuck=1) as ranks:
        expect_deadlines(ranks[0], end=3000)


@case
def stuck_program(worker):
    """A program hears of it by the usual error; where it was a small message that was stuck, on both ranks."""
    for operation in ("all_reduce", "barrier", "exchange", "split", "lane") if LONG else ("split",):
        with Ranks(worker, "stuck_program", 2, own_program=True, operation=operation, timeout=2000) as ranks:
            for rank in ranks:
                first = rank.wait_for(r"first call failed after (\d+) ms: .* \(step 7\) failed on rank \d of 2: .*not done after 2000 ms")
                expect(2000 <= int(first[1]) < 6000, f"{operation}: {rank.story()}")
                second = rank.wait_for(r"second call failed after (\d+) ms: ")
                expect(int(second[1]) < 500, f"{operation}: {rank.story()}")
                rank.end(patience=10)
            print(f"  {operation}: {[rank.lines[0] for rank in ranks]}")


@case
def thrown(worker):
    """Gloo's reading thread throws, where nobody catches: the program goes on, with an error at the deadline."""
    with Ranks(worker, "thrown", 2, own_program=True) as ranks:
        for rank in ranks:
            rank.end()
            expect(rank.said("^ended"), rank.story())
        expect(ranks[0].said(r"message: timeout after 2\d\d\d ms"), ranks[0].story())
        expect(any("a thread of Gloo has failed and stops" in line for line in ranks[0].warnings), ranks[0].story())


@case
def late(worker):
    """Below the deadline of the call: success. Above: a timeout, within a second. Never the group's deadline."""
    for operation in ("all_reduce", "all_to_all", "receive"):
        poll = {"poll": 1} if operation != "all_to_all" else {}
        runs = []
        with contextlib.ExitStack() as stack:
            # The group's deadline, that of the call, and how late the last rank is.
            for timeout, call, delay in ((5000, 20000, 6000), (20000, 3000, 1500), (20000, 3000, 2700),
                                         (20000, 1000, 1100), (20000, 1000, 5000)):
                run = Ranks(worker, "late", 2, operation=operation, timeout=timeout, call=call, late=delay, **poll)
                runs.append((stack.enter_context(run), call, delay))
            for ranks, call, delay in runs:
                ranks[0].end()
                if delay < call:
                    expect(ranks[0].said("success"), f"{operation} {call} {delay}: {ranks[0].story()}")
                else:
                    found = ranks[0].said(r"timeout after (\d+) ms")
                    expect(found and call <= int(found[0][1]) <= call + 1000,
                           f"{operation} {call} {delay}: {ranks[0].story()}")


@case
def abort(worker):
    for backwards in ({}, {"backwards": 1}):
        with Ranks(worker, "abort", 2, **backwards) as ranks:
            found = [int(found[1]) for found in ranks[0].end().said(r"failed after (\d+) ms")]
            expect(len(found) == 6 and max(found) < 2500, ranks[0].story())
            ended = ranks[0].said(r"ended after (\d+) ms")
            expect(int(ended[0][1]) < 1000, ranks[0].story())
            print(f"  {ranks[0].lines}")
    # The others wait for the one that ends its connections, or for one that does.
    with Ranks(worker, "abort_of_absent", 4) as ranks:
        ranks.end()
        for rank in ranks[1:]:
            found = rank.said(r"failed after (\d+) ms")
            expect(len(found) == 1 and int(found[0][1]) < 2500, rank.story())
            print(f"  {rank.lines}")


@case
def gone(worker):
    """Who writes to a rank that was killed meanwhile has an error, and is not ended by SIGPIPE. On a busy machine Gloo
    now and then does not see that the connection has ended; then it is that of the deadline, once in all at most."""
    with Ranks(worker, "signals", 2) as ranks:
        ranks.end()
        for rank in ranks:  # the threads of both groups, but not the program's own
            blocked, others = map(int, rank.said(r"blocked in (\d+), not in (\d+)")[0].groups())
            expect(blocked >= 4 and others >= 1, rank.story())
    unseen = []
    for operation in OPERATIONS:
        for late in (0, 0.2):
            with Ranks(worker, "gone", 3, operation=operation) as ranks:
                ranks.wait_for("ready")
                ranks[2].kill()
                ranks[2].process.wait()
                time.sleep(late)
                open(f"{ranks.folder}/meeting.killed", "w").close()
                for rank in ranks[:2]:
                    expect(rank.end().said("failed after|refused after|timeout after"), f"{operation}: {rank.story()}")
                if any(rank.said("timeout after") for rank in ranks[:2]):
                    unseen.append(f"{operation}: {ranks[0].story()}")
    expect(len(unseen) <= 1, f"nobody saw that a rank had gone: {unseen}")


@case
def dropped(worker):
    for first in ({}, {"works_first": 1}):
        with Ranks(worker, "dropped", 3, **first) as ranks:
            for rank in ranks[:2]:
                ended = rank.end().said(r"ended after (\d+) ms")
                expect(int(ended[0][1]) < 2000, rank.story())
    with Ranks(worker, "dropped_messages", 2) as ranks:
        ranks.end()


@case
def contradictions(worker):
    """Messages whose two ends have different sizes: both ends fail, at the deadline of the call."""
    for how in ({}, {"first_sends_more": 1}, {"all_to_all": 1}):
        with Ranks(worker, "contradiction", 2, **how) as ranks:
            ranks.end()
            for rank in ranks:
                expect(rank.said(r"message: (timeout|failed) after (9|1\d)\d\d ms"), rank.story())
