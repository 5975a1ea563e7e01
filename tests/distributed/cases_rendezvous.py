"""How ranks meet: through files and at addresses, with missing, killed and doubled ranks, and with strangers."""
import os
import random
import socket
import struct
import threading
import time
from pathlib import Path

from ranks import (PATIENCE, Ranks, expect, free_port, in_time, is_loopback, own_address, run_in_own_network,
                   run_with_hosts)
from run_ranks import case

FILE = {"file": "{folder}/meeting"}


def store():
    """A store that rank 0 keeps, as for several hosts."""
    return {"host": "127.0.0.1", "port": free_port(), "listen": "127.0.0.1"}


def places():
    """All kinds of places to meet."""
    return FILE, {"host": "127.0.0.1", "port": free_port()}, store()


def listeners_of(ranks):
    return {entry[0] for rank in ranks for entry in rank.sockets() if entry[2] == "listening"}


@case
def listeners(worker):
    """Nothing listens or is connected beyond this host, and a file that was met through is gone."""
    for place in places():
        with Ranks(worker, "meet", 3, stay=1, **place) as ranks:
            ranks.wait_for("met after")
            found = [entry for rank in ranks for entry in rank.sockets()]
            expect(any(state == "listening" for _, _, state in found), f"the test sees no listener: {found}")
            expect(all(is_loopback(address) for address, _, _ in found), f"beyond this host: {found}")
            expect(not os.listdir(ranks.folder), f"left behind: {os.listdir(ranks.folder)}")
            expect(not any(rank.warnings for rank in ranks), [rank.warnings for rank in ranks])


@case
def beyond_this_host(worker):
    """A listener beyond this host is at the address that was named, and is announced once."""
    address = own_address()
    if not address:
        print("PACER_SKIPPED: this host has no other address than loopback")
        return
    with Ranks(worker, "meet", 2, stay=1, host=address, port=free_port()) as ranks:
        ranks.wait_for("met after")
        expect(listeners_of(ranks) == {address, "127.0.0.1"}, f"listening at {listeners_of(ranks)}")
        time.sleep(0.2)
        # c10d says more where the host's address has no name.
        said = [[line for line in rank.warnings if line.startswith("pacer: ")] for rank in ranks]
        expect(len(said[0]) == 1 and address in said[0][0] and not said[1], said)


@case
def listen_address(worker):
    """Rank 0 listens where it was told to, also where the host has a loopback address by the name that was given."""
    with Ranks(worker, "meet", 2, stay=1, host="127.0.1.1", port=free_port(), listen="127.0.0.5") as ranks:
        ranks.wait_for("met after")
        expect(listeners_of(ranks) == {"127.0.0.5", "127.0.0.1"}, f"listening at {listeners_of(ranks)}")


@case
def several_addresses(worker):
    """Of a host with several addresses each is tried."""
    address = own_address()
    if not address:
        print("PACER_SKIPPED: this host has no other address than loopback")
        return

    def meet():
        with Ranks(worker, "meet", 2, only=(0,), host=address, port=free_port()) as ranks:
            ranks.start(1, host="two.test")
            ranks.end()

    if not run_with_hosts(meet, f"127.0.0.1 localhost\n127.0.0.1 two.test\n{address} two.test\n"):
        print("PACER_SKIPPED: this user may not mount a file over /etc/hosts")


@case
def missing(worker):
    """A rank that never comes is named, at the deadline."""
    for place in places():
        with Ranks(worker, "meet", 3, only=(0, 1), timeout=2000, **place) as ranks:
            start = time.monotonic()
            ranks.wait_for("starting")
            ranks.end(3)
            took = time.monotonic() - start
            for rank in ranks:
                expect(rank.said("error: only 2 of 3 ranks came to .* within 2000 ms, without rank 2;"), rank.story())
            expect(1.5 < took < in_time(10), f"took {took:.1f} s")
            expect(not os.listdir(ranks.folder), f"left behind: {os.listdir(ranks.folder)}")
    for place in places()[1:]:
        with Ranks(worker, "meet", 3, only=(1, 2), timeout=2000, **place) as ranks:
            ranks.end(3)
            for rank in ranks:
                expect(rank.said(r"error: nobody answers rank \d at 127.0.0.1 port \d+ within 2000 ms; start rank 0"),
                       rank.story())


@case
def killed(worker):
    """A rank that is killed while others are still missing is noticed at once."""
    for place in places():
        with Ranks(worker, "meet", 3, only=(0, 1), timeout=60000, **place) as ranks:
            ranks.wait_for("starting")
            if place is FILE:
                path = Path(ranks.folder, "meeting")
                while not path.exists() or path.read_bytes().count(b"rank") < 2:
                    time.sleep(0.01)
            else:
                time.sleep(3)
            ranks[1].kill()
            start = time.monotonic()
            ranks[0].end(3)
            took = time.monotonic() - start
            expect(took < in_time(5), f"took {took:.1f} s")
            expect(ranks[0].said("error: rank 1 .process \\d+. has ended while the ranks met"), ranks[0].story())


@case
def left_over(worker):
    """What a killed run leaves behind makes the next one fail, at once and saying why; never hang, never join."""
    with Ranks(worker, "meet", 3, only=(0, 1)) as ranks:
        path = Path(ranks.folder, "meeting")
        while not path.exists() or path.read_bytes().count(b"rank") < 2:
            time.sleep(0.01)
        for rank in ranks:
            rank.kill()
        for rank in ranks:
            rank.end(-9)
        start = time.monotonic()
        for number in range(3):
            ranks.start(number)
        for rank in ranks[2:]:
            rank.end(3)
        expect(time.monotonic() - start < 15, f"took {time.monotonic() - start:.1f} s")
        for rank in ranks[2:4]:
            expect(rank.said("error: rank . of 3 is at .* already"), rank.story())
        expect(ranks[4].said("error: rank . .process .* has ended while the ranks met"), ranks[4].story())


@case
def left_over_port(worker):
    """At a loopback address a killed run is in nobody's way, whether it had met or not."""
    with Ranks(worker, "meet", 3, only=(0, 1), host="127.0.0.1", port=free_port()) as ranks:
        ranks.wait_for("starting")
        time.sleep(1)
        for rank in ranks:
            rank.kill()
            rank.end(-9)
        for number in range(3):
            ranks.start(number)
        for rank in ranks[2:]:
            rank.end()


@case
def contradictions(worker):
    """Two of one rank, and ranks that count differently: refused."""
    for place in places():
        with Ranks(worker, "meet", 3, only=(0, 1, 1), timeout=3000, **place) as ranks:
            ranks.end(3)
            expect(sum(bool(rank.said("error: rank 1 of 3 is at .* already")) for rank in ranks) == 1,
                   [rank.story() for rank in ranks])
        with Ranks(worker, "meet", 3, only=(0, 1), timeout=20000, **place) as ranks:
            ranks.start(2, world_size=4)
            ranks.end(3)
            for rank in ranks:
                expect(rank.said("error: rank . counts . ranks, but rank . counts ."), rank.story())


@case
def folders(worker):
    """A file that others could reach, or that is something else, is refused before anybody waits."""
    with Ranks(worker, "meet", 2, only=()) as ranks:
        folder = Path(ranks.folder)
        for name in ("open", "private"):
            (folder / name).mkdir(mode=0o700)
        (folder / "open").chmod(0o750)
        (folder / "link").symlink_to(folder / "private")
        (folder / "private" / "link").symlink_to(folder / "private" / "elsewhere")
        (folder / "private" / "file").write_text("something else\n" * 10)
        (folder / "private" / "short").write_text("other")
        (folder / "private" / "folder").mkdir()
        os.mkfifo(folder / "private" / "pipe")
        for path, words in (("open/m", "other users may enter the folder"), ("link/m", "it is a link or no folder"),
                            ("missing/m", "No such file or directory"), ("private/link", "it is no plain file"),
                            ("private/file", "a file of something else"), ("private/folder", "Is a directory"),
                            ("private/short", "a file of something else"), ("private/pipe", "it is no plain file"),
                            ("private/", "names no file")):
            rank = ranks.start(0, file=f"{{folder}}/{path}")
            rank.end(3)
            expect(rank.said(f"error: .*{words}"), f"{path}: {rank.story()}")
        expect((folder / "private" / "short").read_text() == "other", "a file of something else was written to")
        if os.geteuid() == 0:
            (folder / "foreign").mkdir(mode=0o700)
            os.chown(folder / "foreign", 12345, 12345)
            rank = ranks.start(0, file="{folder}/foreign/m").end(3)
            expect(rank.said("error: .*belongs to another user"), rank.story())


def annoy(ports, until):
    """Connects and closes, sends rubbish, and holds connections open, until told to stop. Returns how often."""
    held, count = [], 0
    while not until.is_set():
        for port in ports():
            try:
                stranger = socket.create_connection(("127.0.0.1", port), timeout=1)
            except OSError:
                continue
            count += 1
            try:
                if count % 3 == 1:
                    stranger.sendall(random.randbytes(random.randint(1, 4096)))
                if count % 10 == 2:
                    stranger.sendall(b"\x00")
                    held.append(stranger)
                    continue
            except OSError:
                pass
            stranger.close()
        time.sleep(0.002)
    return count


@case
def strangers(worker):
    """Rubbish at the port where ranks meet does not matter."""
    port, until, counts = free_port(), threading.Event(), []
    thread = threading.Thread(target=lambda: counts.append(annoy(lambda: [port], until)))
    with Ranks(worker, "meet", 3, host="127.0.0.1", port=port, listen="127.0.0.1") as ranks:
        thread.start()
        try:
            ranks.end()
        finally:
            until.set()
            thread.join()
        expect(counts[0] > 20, f"only {counts[0]} connections of strangers")
        print(f"  {counts[0]} strangers; {[rank.lines for rank in ranks]}, {[rank.warnings for rank in ranks]}")


def forge(port):
    """Says at a store what rank 2 of 3 would say there. False where nobody answers."""
    def text(value):
        return struct.pack("=Q", len(value)) + value

    me = b"3 1 - a b"
    record = text(text(b"rank") + text(b"2") + text(me))
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1) as stranger:
            stranger.sendall(b"\0" + struct.pack("=I", 0x3C85F7CE) +  # the greeting of a TCPStore
                             b"\1" + text(b"/pacer//1/here/2") + text(me) + b"\x09" + text(b"/pacer//1/here") + text(record))
            time.sleep(0.1)
        return True
    except OSError:
        return False


@case
def other_users(worker):
    """Other users of the host, who know the port and what ranks say, cannot join ranks that meet at a loopback address."""
    port = free_port()
    with Ranks(worker, "meet", 3, only=(), host="127.0.0.1", port=port) as ranks:
        environment = {"XDG_RUNTIME_DIR": ranks.folder}
        for number in (0, 1):
            ranks.start(number, environment)
        ranks.wait_for("starting")
        answers, tries, folder = 0, 0, Path(ranks.folder, "pacer")
        while tries < 20 or not list(folder.glob("*")):
            expect(tries < 10 * PATIENCE, "the ranks do not meet through a file")
            answers, tries = answers + forge(port), tries + 1
            time.sleep(0.1)
        expect(answers == 0, f"a store answered strangers {answers} times")
        modes = [path.stat().st_mode & 0o777 for path in (folder, *folder.iterdir())]
        ranks.start(2, environment)
        ranks.end()
        expect(modes == [0o700, 0o600], f"others may enter: {[oct(mode) for mode in modes]}")
        expect(not os.listdir(folder), f"left behind: {os.listdir(folder)}")


@case
def nobody_yet(worker):
    """Who waits where nobody listens yet may be connected to itself, and does not take that for rank 0."""
    def wait_there():
        for port in (40010, 40031):
            with Ranks(worker, "meet", 2, only=(1,), host="127.0.0.1", port=port, listen="127.0.0.1") as ranks:
                ranks.wait_for("starting")
                time.sleep(3)
                ranks.start(0)
                ranks.end()

    # So few that each of them comes up several times in a second.
    if not run_in_own_network(wait_there, ports="40000 40063"):
        print("PACER_SKIPPED: this user may not make a network namespace")


@case
def again(worker):
    """One communicator after the other, and two at a time, at one address."""
    for place in places()[1:]:
        with Ranks(worker, "meet_again", 3, **place) as ranks:
            ranks.end()


@case
def news(worker):
    for place in places():
        with Ranks(worker, "news", 3, **place) as ranks:
            ranks.end()


@case
def silent_store(worker):
    """A store whose host stands still is unknown after a second, no trouble, and answers when its host goes on."""
    with Ranks(worker, "silent_store", 2, after=1000, **store()) as ranks:
        ranks.wait_for("ready")
        ranks[0].stop()
        for _ in range(2):
            found = ranks[1].wait_for(r"refused after (\d+) ms")
            expect(900 <= int(found[1]) <= 3000, found[0])
            expect(ranks[1].wait_for("trouble: (.*)")[1] == "unknown", ranks[1].story())
        ranks[0].go_on()
        ranks[1].wait_for("goes on")
        ranks[1].end()
