#!/usr/bin/env python3
"""The slow network: what it measures, that links are as slow as asked, and that nothing of it stays behind.

slow_network.py SCRIPT PROGRAM

Skipped, with the script's own reason, where this machine cannot have such a network.
"""
import csv
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

CANNOT = 77
GBIT = 0.1  # so slow that the time of the fp32 step is the link's
PARAMETERS = 1_576_448  # of the small model


def expect(condition, text):
    if not condition:
        sys.exit(text)


def namespaces():
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return {line.split()[0] for line in listed.splitlines() if line.startswith("pacer-")}


def command(script, program, folder, *more):
    return [sys.executable, script, "--program", program, "--output", folder, "--gbit", str(GBIT), *more]


def measures(script, program):
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(command(script, program, folder, "--seconds", "0.2", "--congestion", "reno"),
                              capture_output=True, text=True, timeout=240, check=False)
        if done.returncode == CANNOT:
            print(f"PACER_SKIPPED: {done.stderr.strip()}")
            sys.exit(CANNOT)
        expect(done.returncode == 0, f"ended with {done.returncode}:\n{done.stdout}{done.stderr}")
        expect("reno controlled TCP's congestion" in done.stdout, f"said {done.stdout}")
        with open(Path(folder) / "measurements.csv", encoding="utf-8", newline="") as file:
            rows = {(row["optimizer"], float(row["gbit_per_s"])): row for row in csv.DictReader(file)}
    names = ["FusedAdamW fp32", "FusedAdamW bf16", "OneBitAdam"]
    expect(set(rows) == {(name, gbit) for name in names for gbit in (0, GBIT)}, f"measured {sorted(rows)}")
    for (name, _), row in rows.items():
        sent = int(row["bytes_per_step"])
        # Two ranks: half of everything twice.
        least, most = {names[0]: (4, 4.01), names[1]: (2, 2.01), names[2]: (0.125, 0.14)}[name]
        expect(least <= sent / PARAMETERS <= most, f"{name} sent {sent} bytes for {PARAMETERS} parameters")
    slow = rows[names[0], GBIT]
    least = int(slow["bytes_per_step"]) * 8e-6 / GBIT
    expect(float(slow["slowest_rank_ms"]) > 0.8 * least, f"{slow} is faster than the link, which needs {least} ms")
    print(f"fp32 over {GBIT} Gbit/s: {slow['slowest_rank_ms']} ms, the link alone {least:.1f} ms")


MEET = """
import socket, sys
here, there = sys.argv[1:]
if there:
    end = socket.create_connection((there, 7000), timeout=20)
else:
    with socket.create_server((here, 7000)) as door:
        door.settimeout(20)
        print("ready", flush=True)
        end = door.accept()[0]
print(end.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\\0").decode())
end.close()
"""


def controls_congestion():
    """At both ends of a connection, whatever this machine is set to."""
    from network import Network
    for congestion in Path("/proc/sys/net/ipv4/tcp_available_congestion_control").read_text(encoding="utf-8").split():
        with Network(2, congestion) as network:
            def start(host, there, network=network):
                return subprocess.Popen([*network.inside(host), sys.executable, "-c", MEET, network.address(host), there],
                                        stdout=subprocess.PIPE, text=True)
            with start(0, "") as server:
                server.stdout.readline()
                with start(1, network.address(0)) as client:
                    used = [process.communicate(timeout=40)[0].strip() for process in (server, client)]
        expect(used == [congestion, congestion], f"{used} control congestion, not {congestion}")


EXCHANGE = """
import socket, sys, threading
own, *others = sys.argv[1:]
door = socket.create_server((own, 7000))
print("ready", flush=True)
sys.stdin.readline()
out = [socket.create_connection((other, 7000), timeout=20) for other in others]
ends = [door.accept()[0] for _ in others]
def take(end):
    while end.recv(1 << 20):
        pass
def give(end):
    for _ in range(200):
        end.sendall(bytes(1 << 20))
    end.close()
threads = [threading.Thread(target=take, args=(end,)) for end in ends]
threads += [threading.Thread(target=give, args=(end,)) for end in out]
for thread in threads: thread.start()
for thread in threads: thread.join()
"""


def keeps_order():
    """Of packets, at a rate that takes several cores: none comes after one that was sent later."""
    from network import Network
    with Network(4, "cubic") as network:
        network.shape(3)
        hosts = range(network.hosts)
        addresses = [network.address(host) for host in hosts]
        processes = [subprocess.Popen([*network.inside(host), sys.executable, "-c", EXCHANGE, addresses[host],
                                       *addresses[:host], *addresses[host + 1:]],
                                      stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for host in hosts]
        try:
            for process in processes:
                process.stdout.readline()
            for process in processes:
                process.stdin.write("go\n")
                process.stdin.flush()
            for process in processes:
                process.communicate(timeout=60)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        expect(not any(process.returncode for process in processes), "an exchange failed")
        late = []
        for host in hosts:
            text = subprocess.run([*network.inside(host), "cat", "/proc/net/netstat"], capture_output=True, text=True,
                                  check=True).stdout.splitlines()
            late.append(int(dict(zip(text[0].split(), text[1].split()))["TCPOFOQueue"]))
    print(f"packets out of order: {late}")
    expect(not any(late), f"{late} packets came out of order")


# The script, which gets a signal while it holds the lock of its first rank's Popen.
AT_POLL = """
import os, runpy, signal, subprocess, sys, threading
class Lock:
    left = 1
    def __init__(self):
        self.lock = threading.Lock()
    def acquire(self, *how):
        taken = self.lock.acquire(*how)
        Lock.left -= 1
        if Lock.left == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        return taken
    def release(self):
        self.lock.release()
    def __enter__(self):
        self.lock.acquire()
    def __exit__(self, *_):
        self.lock.release()
start = subprocess.Popen.__init__
def started(self, words, **options):
    start(self, words, **options)
    if "sleep" in words:
        self._waitpid_lock = Lock()
subprocess.Popen.__init__ = started
sys.argv[:] = sys.argv[1:]
sys.path.insert(0, os.path.dirname(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def cleans_up(script, program, number, exit_code):
    with tempfile.TemporaryDirectory() as folder:
        with subprocess.Popen(command(script, program, folder, "--seconds", "60"), text=True, stdout=subprocess.PIPE,
                              stderr=subprocess.PIPE) as process:
            process.stdout.readline()  # rank 0 is at work
            process.send_signal(number)
            errors = process.communicate(timeout=60)[1]
    expect(process.returncode == exit_code, f"after {number.name}: exit code {process.returncode}\n{errors}")


def ends_at_any_moment(script):
    """A signal may come in the middle of Popen.poll, which is called all the time, and holds a lock then."""
    with subprocess.Popen([sys.executable, "-c", AT_POLL, script, "--gbit", "1", "--command", "sleep 100"], text=True,
                          stderr=subprocess.PIPE) as process:
        try:
            errors = process.communicate(timeout=60)[1]
        except subprocess.TimeoutExpired:
            process.kill()
            sys.exit("a signal in the middle of Popen.poll left the script waiting")
    expect(process.returncode == 128 + signal.SIGTERM and errors == "slow_network: interrupted\n",
           f"after a signal in the middle of Popen.poll: exit code {process.returncode}\n{errors}")


def says_what_is_wrong(script, program):
    done = subprocess.run(command(script, program, "/dev/null/folder"), capture_output=True, text=True, check=False)
    expect(done.returncode == 1 and done.stderr.startswith("slow_network: "), f"said {done.stderr!r}")
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(command(script, program, folder, "--congestion", "hope"), capture_output=True, text=True,
                              check=False)
        expect(done.returncode == CANNOT and "hope" in done.stderr and "tcp_available_congestion_control" in done.stderr,
               f"said {done.stderr!r}")
        done = subprocess.run(command(script, program, folder, "--model", "gpt5"), capture_output=True, text=True,
                              timeout=120, check=False)
    expect(done.returncode == 1 and "--model cannot be 'gpt5'; did you mean 'gpt2'?" in done.stderr, f"said {done.stderr!r}")


def runs_commands(script):
    """Another program as the ranks, at each bandwidth."""
    told = "echo rank $RANK of $WORLD_SIZE meets at $MASTER_ADDR:$MASTER_PORT"
    words = [sys.executable, script, "--gbit", "1", "--ranks", "4", "--ranks-per-host", "2", "--command"]
    done = subprocess.run([*words, f"sh -c '{told}'"], capture_output=True, text=True, timeout=120, check=False)
    rank = "rank 0 of 4 meets at 10.77.0.1:29500\n"
    expect(done.returncode == 0 and f"links as fast as they go:\n{rank}links of 1 Gbit/s:\n{rank}" in done.stdout,
           f"said {done.stdout!r}, {done.stderr!r}")
    done = subprocess.run([*words, "sh -c 'echo of no use >&2; exit 4'"], capture_output=True, text=True, timeout=120,
                          check=False)
    expect(done.returncode == 1 and "ended with 4:\nof no use" in done.stderr, f"said {done.stderr!r}")
    done = subprocess.run([*words, "no-such-program 1"], capture_output=True, text=True, check=False)
    expect(done.returncode == 2 and "--command does not begin with a program: 'no-such-program 1'" in done.stderr,
           f"said {done.stderr!r}")


def main(script, program):
    measures(script, program)
    runs_commands(script)
    sys.path.insert(0, str(Path(script).parent))
    before = namespaces()
    controls_congestion()
    keeps_order()
    says_what_is_wrong(script, program)
    cleans_up(script, program, signal.SIGINT, 130)
    cleans_up(script, program, signal.SIGTERM, 128 + signal.SIGTERM)
    ends_at_any_moment(script)
    expect(namespaces() <= before, f"left behind: {namespaces() - before}")


main(*sys.argv[1:])
