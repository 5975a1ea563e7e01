"""Strangers at the ports of ranks that start."""
import random
import socket
import threading
import time

from cases_rendezvous import FILE, store
from ranks import Ranks, expect, in_time
from run_ranks import case


class Junk:
    """Everything that strangers send to ports: to each 1,000 connections that close at once, 1 MiB of random bytes, and
    one byte a second on a connection that stays."""

    def __init__(self):
        self.ports, self._until, self._threads = set(), threading.Event(), []

    def send(self, port):
        """Returns when all but the slow bytes are sent."""
        self.ports.add(port)
        drip = threading.Thread(target=self._drip, args=(port,))
        drip.start()
        self._threads.append(drip)
        for _ in range(1000):
            socket.create_connection(("127.0.0.1", port), timeout=5).close()
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=0.5) as stranger:
                stranger.sendall(random.randbytes(1 << 20))
        except OSError:
            pass  # nobody reads that much

    def _drip(self, port):
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=5) as stranger:
                while True:
                    stranger.sendall(random.randbytes(1))
                    if self._until.wait(1):
                        return
        except OSError:
            pass  # it was closed, or the job has ended

    def end(self):
        self._until.set()
        for thread in self._threads:
            thread.join()


def own_listeners(rank):
    return {port for _, port, state in rank.sockets() if state == "listening"}


def start_among_junk(worker, place):
    """Starts two ranks, each of which stands still while every port that the other one opens gets its junk. Returns how
    many ports there were, and how long the ranks took when left alone, in seconds."""
    junk = Junk()
    with Ranks(worker, "meet", 2, only=(0,), stay=1, **place) as ranks:
        try:
            ranks[0].wait_for("starting")
            if "listen" in place:  # the store, before anybody else comes
                while not own_listeners(ranks[0]):
                    time.sleep(0.01)
                for port in own_listeners(ranks[0]):
                    junk.send(port)
            ranks.start(1)
            quiet_since, ports_before = time.monotonic(), len(junk.ports)
            while len(junk.ports) < ports_before + 4:  # each rank listens for data and for small messages
                expect(time.monotonic() - quiet_since < 30, f"the test sees no listeners but {junk.ports}")
                for rank, other in ((ranks[0], ranks[1]), (ranks[1], ranks[0])):
                    for port in own_listeners(rank) - junk.ports:
                        other.stop()
                        junk.send(port)
                        other.go_on()
                        quiet_since = time.monotonic()
            ranks.wait_for("staying")
            took = time.monotonic() - quiet_since
            for rank in ranks:
                expect(rank.is_running(), rank.story())
        finally:
            junk.end()
    return len(junk.ports), took


@case
def at_every_port(worker):
    """What strangers send to the ports of ranks that start, the store's and those of the data, neither keeps them from
    starting nor becomes a rank."""
    for place, ports in ((FILE, 4), (store(), 5)):
        found, took = start_among_junk(worker, place)
        print(f"  {found} ports, started {took:.2f} s after the last of their junk")
        expect(found == ports, f"{found} ports instead of {ports}")
        expect(took < in_time(5), f"started only after {took:.1f} s")
