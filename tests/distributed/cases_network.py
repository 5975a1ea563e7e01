"""F6: several hosts in network namespaces, whose links lose packets, go down for a while, or lose their connections. A run
ends as one without faults does, to the bit, or by an error in time that lets a new run go on from the last checkpoint."""
import contextlib
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from ranks import LONG, Ranks, expect, in_time
from run_ranks import case

sys.path.append(str(Path(__file__).parents[2] / "examples/07_slow_network"))
from network import Network, Unavailable, congestion_here  # noqa: E402

HOSTS = 3
DEADLINE = 4.0  # seconds, of each operation
PORT = 29571  # free, because the hosts are new
LOAD = in_time(6.0)  # seconds that a machine with more processes than cores may take more


def in_a_network(scene):
    """Calls it with a Network, or says why there is none."""
    try:
        with Network(HOSTS, congestion_here()) as network:
            scene(network)
    except Unavailable as reason:
        print(f"PACER_SKIPPED: {reason}")


def train(network, worker, folder, deadline=DEADLINE, **arguments):
    return Ranks(worker, "faults", HOSTS, inside=network.inside, host=network.address(0), port=PORT, folder=folder,
                 timeout=int(deadline * 1000), **arguments)


def hash_of(ranks):
    for rank in ranks:
        rank.end()
    return {rank.said("^hash (.*)")[0][1] for rank in ranks}


@case
def places(worker):
    """Ranks that know an address only find out that each of them is alone on its host."""
    def scene(network):
        with Ranks(worker, "environment", HOSTS, inside=network.inside, only=()) as ranks:
            for number in range(HOSTS):
                ranks.start(number, environment={"RANK": str(number), "WORLD_SIZE": str(HOSTS), "MASTER_PORT": str(PORT),
                                                 "MASTER_ADDR": network.address(0)})
            for number, rank in enumerate(ranks):
                rank.end()
                expect(rank.said(f"rank {number} of {HOSTS}, here 0 of 1, by nodes of 1$"), rank.story())

    in_a_network(scene)


@contextlib.contextmanager
def losses(network, percent):
    """Every host drops this share of the packets that it sends."""
    def nft(number, command):
        done = subprocess.run([*network.inside(number), "nft", command], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise Unavailable(f"nft said: {done.stderr.strip()}")

    try:
        for number in range(HOSTS):
            nft(number, "add table inet loss; add chain inet loss out { type filter hook output priority 0; }; "
                        f"add rule inet loss out numgen random mod 100 < {percent} drop")
        yield
    except FileNotFoundError:
        raise Unavailable("nft not found on PATH; install nftables (apt-get install nftables)") from None
    finally:
        for number in range(HOSTS):
            subprocess.run([*network.inside(number), "nft", "delete table inet loss"], capture_output=True, check=False)


@case
def lost_packets(worker):
    """What is lost is sent again: the result is that of a sound network, or the deadline was too short and says so."""
    def scene(network):
        with tempfile.TemporaryDirectory() as folder, train(network, worker, folder) as ranks:
            wanted = hash_of(ranks)
        expect(len(wanted) == 1, f"ranks ended with different models: {wanted}")
        for percent in (1, 5, 20) if LONG else (5,):
            start = time.monotonic()
            with losses(network, percent), tempfile.TemporaryDirectory() as folder, \
                    train(network, worker, folder, deadline=60) as ranks:
                expect(hash_of(ranks) == wanted, f"with {percent} % of the packets lost the run ended elsewhere")
            print(f"  {percent} % lost: the same bits after {time.monotonic() - start:.1f} s")

    in_a_network(scene)


def set_link(network, host, state):
    subprocess.run(["ip", "-n", network.switch, "link", "set", f"port{host}", state], check=True)


def reset_connections(network, host, or_none=False):
    """All of this host at once: it prints those that it ends. `or_none`: the run may have ended before."""
    done = subprocess.run([*network.inside(host), "ss", "--kill", "--no-header", "state", "established", "dst", "10.77.0.0/16"],
                          capture_output=True, text=True, check=False)
    expect(or_none or done.stdout.count("10.77.") >= 2, f"ss ended no connection: {done.stderr}")


def disturb(network, worker, wanted, what, host, point):
    """The run meets the trouble at this point; `what` is a link that is down for so many seconds, or "reset"."""
    told = f"{what} of host {host} at {point}"
    with tempfile.TemporaryDirectory() as folder:
        with train(network, worker, folder, culprit=host, point=point, signal="NONE") as ranks:
            ranks[host].wait_for("^fault$")
            start = time.monotonic()
            if what == "reset":
                reset_connections(network, host)
            else:
                set_link(network, host, "down")
            try:
                if what != "reset" and what < DEADLINE:
                    time.sleep(what)
                    set_link(network, host, "up")
                for rank in ranks:
                    rank.end(status=None, patience=DEADLINE * 3 + 30)
            finally:
                set_link(network, host, "up")
            took = time.monotonic() - start
        hashes = {found[1] for rank in ranks for found in rank.said("^hash (.*)")}
        expect(hashes <= wanted, f"{told}: ended elsewhere")
        for rank in ranks:
            expect(rank.said("^hash ") or rank.said("^error: .*rank"), f"{told}: {rank.story()}")
        failed = [rank.number for rank in ranks if not rank.said("^hash ")]
        if what != "reset" and what < DEADLINE:
            expect(not failed, f"{told}: ranks {failed} did not wait for it")
        if what != "reset" and what > DEADLINE:
            expect(failed, f"{told}: nobody noticed")
        expect(took < DEADLINE + 2 + LOAD, f"{told}: it took {took:.1f} s")
        with train(network, worker, folder) as ranks:
            expect(hash_of(ranks) == wanted, f"{told}: the resumed run ended elsewhere")
        print(f"  {told}: {f'ranks {failed} ended by an error' if failed else 'the same bits'} after {took:.1f} s; resumed")


@case
def links_down_and_reset(worker):
    def scene(network):
        with tempfile.TemporaryDirectory() as folder, train(network, worker, folder) as ranks:
            wanted = hash_of(ranks)
        scenes = [(1.0, 1, "backward"), (10.0, 2, "after_backward"), ("reset", 0, "backward")]
        if LONG:
            scenes = [(what, host, point) for what in (1.0, 10.0, "reset") for host in range(HOSTS)
                      for point in ("backward", "after_backward", "before_kernel", "in_save")]
        for what, host, point in scenes:
            disturb(network, worker, wanted, what, host, point)

    in_a_network(scene)


@case
def long_messages(worker):
    """Between hosts they go to one rank after the other, where some have nothing for each other, too."""
    def scene(network):
        with Ranks(worker, "operations", HOSTS, inside=network.inside, host=network.address(0), port=PORT,
                   count=70_000) as ranks:
            ranks.end(patience=120)

    in_a_network(scene)


@case
def resets(worker):
    """All connections of a host are reset at a random moment of two steps, in which its ranks may be sending: every rank ends
    by itself, in time, and none is left in a call that does not return."""
    def scene(network):
        moments = random.Random(int(os.environ.get("PACER_TEST_SEED", "1")))
        errors, slowest = 0, 0.0
        for number in range(150 if LONG else 2):
            moment = moments.uniform(0, 0.35)
            told = f"reset {number}, {moment:.3f} s after the fault"
            with tempfile.TemporaryDirectory() as folder, \
                    train(network, worker, folder, culprit=0, point="backward", signal="NONE") as ranks:
                ranks[0].wait_for("^fault$")
                time.sleep(moment)
                start = time.monotonic()
                reset_connections(network, 0, or_none=True)
                for rank in ranks:
                    rank.end(status=None, patience=DEADLINE + 2 + LOAD)
                    expect(rank.said("^hash ") or rank.said("^error: .*rank"), f"{told}: {rank.story()}")
                    errors += len(rank.said("^error: "))
                slowest = max(slowest, time.monotonic() - start)
        print(f"  {number + 1} resets: {errors} ranks ended by an error, all after {slowest:.1f} s at most")

    in_a_network(scene)
