"""Several hosts on one Linux machine: a network namespace for each, joined by a switch, every link as slow as asked.

with Network(hosts=4, congestion="cubic") as network:
    network.shape(gbit=1)
    subprocess.Popen([*network.inside(0), "program"])

All of it, the switch too, is in namespaces of its own with names that nobody else has: nothing of the machine's network
is touched, and whoever deletes the namespaces has deleted everything.
"""
import os
import secrets
import shutil
import signal
import subprocess
from pathlib import Path


class Unavailable(Exception):
    """This machine cannot do it; one sentence says what is missing and what to do."""


PRIVILEGES = "in a container, start it with --privileged (making networks needs CAP_NET_ADMIN and CAP_SYS_ADMIN)"


def run(*words, advice=PRIVILEGES):
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise Unavailable(f"'{' '.join(words)}' said: {(done.stderr or done.stdout).strip()}; {advice}")


def require_tools():
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        raise Unavailable(f"{' and '.join(missing)} not found on PATH; install iproute2 (apt-get install iproute2)")
    if os.geteuid() != 0:
        raise Unavailable("only root can make network namespaces; start it with sudo")


def every_core():
    """As Linux writes sets of them: 32 to a word, the last word first."""
    words = []
    left = os.cpu_count()
    while left > 0:
        words.insert(0, f"{(1 << min(left, 32)) - 1:x}")
        left -= 32
    return ",".join(words)


def congestion_here():
    return Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text(encoding="ascii").strip()


class Network:
    def __init__(self, hosts, congestion):
        """congestion: what controls it at both ends of TCP connections, as Linux calls it."""
        require_tools()
        self.hosts = hosts
        self.congestion = congestion
        self.name = f"pacer-{secrets.token_hex(4)}"
        self.switch = f"{self.name}-switch"
        self.made = []

    def host(self, number):
        return f"{self.name}-{number}"

    def address(self, number):
        return f"10.77.{(number + 1) // 256}.{(number + 1) % 256}"

    def inside(self, number):
        return ["ip", "netns", "exec", self.host(number)]

    def __enter__(self):
        try:
            self.add(self.switch)
            run("ip", "-n", self.switch, "link", "add", "br0", "type", "bridge")
            run("ip", "-n", self.switch, "link", "set", "br0", "up")
            for number in range(self.hosts):
                host, port = self.host(number), f"port{number}"
                self.add(host)
                run("ip", "-n", self.switch, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", host)
                run("ip", "-n", self.switch, "link", "set", port, "master", "br0", "up")
                run("ip", "-n", host, "addr", "add", f"{self.address(number)}/16", "dev", "eth0")
                run("ip", "-n", host, "link", "set", "eth0", "up")
                run("ip", "-n", host, "link", "set", "lo", "up")
                self.keep_order(host, "eth0")
                self.keep_order(self.switch, port)
                run("ip", "-n", host, "route", "replace", "10.77.0.0/16", "dev", "eth0", "congctl", self.congestion,
                    advice="/proc/sys/net/ipv4/tcp_available_congestion_control lists what this machine has")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        # Not to be interrupted half-way, not even by another Ctrl-C.
        handlers = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
        while self.made:
            subprocess.run(["ip", "netns", "del", self.made.pop()], capture_output=True, check=False,
                           start_new_session=True)
        for number, handler in handlers.items():
            signal.signal(number, handler)

    def add(self, namespace):
        self.made.append(namespace)  # first: whoever is interrupted in between cleans up too much, not too little
        run("ip", "netns", "add", namespace)

    def keep_order(self, namespace, device):
        """What comes out of a cable comes in the order it went in, which TCP relies on: it takes a packet that comes
        late for a lost one, and slows down. A veth device has whichever core is at it handle a packet, so that several
        cores mix them up; Linux's receive packet steering keeps each connection to a core, as network cards do."""
        run("ip", "netns", "exec", namespace, "sh", "-c", 'for queue in "$1"/rx-*; do echo "$0" > "$queue/rps_cpus" || exit; done',
            every_core(), f"/sys/class/net/{device}/queues", advice="it needs a kernel with CONFIG_RPS, and root")

    def shape(self, gbit):
        """What each link carries, each way; 0: as much as it can."""
        for number in range(self.hosts):
            for namespace, device in ((self.host(number), "eth0"), (self.switch, f"port{number}")):
                where = ["tc", "-n", namespace, "qdisc"]
                if gbit == 0:
                    subprocess.run([*where, "del", "dev", device, "root"], capture_output=True, check=False)
                    continue
                # What may leave at once: a millisecond's worth, but no less than the largest packet. Much more, and
                # whole messages would pass unslowed.
                burst = max(64 * 1024, int(gbit * 1e9 / 8 * 1e-3))
                run(*where, "replace", "dev", device, "root", "tbf", "rate", f"{int(gbit * 1e9)}bit",
                    "burst", str(burst), "latency", "50ms")
