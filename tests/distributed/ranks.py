"""Processes as ranks: starts one for each rank, reads what they say, kills, stops, and never leaves one behind.

    with Ranks(worker, "absent", 3, operation="all_reduce", call=5000) as ranks:
        ranks.wait_for("ready")
        ranks[2].kill()
        for rank in ranks[:2]:
            rank.end()
"""
import concurrent.futures
import ctypes
import fcntl
import os
import queue
import re
import signal
import socket
import struct
import subprocess
import tempfile
import threading
import time

LAUNCHERS = re.compile(r"(RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE)$|(MASTER|OMPI|PMI|PMIX|MPI|SLURM|TORCHELASTIC)_")
# Of anything that should come soon; far more than it takes.
PATIENCE = 60
LONG = os.environ.get("PACER_TEST_LONG") == "1"


def in_time(seconds):
    """The bound of something that takes far less by itself: four times as much but for the long form, for machines that have
    other work, too."""
    return seconds if LONG else 4 * seconds


def gpus():
    """How many there are for programs that this process starts."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([gpu for gpu in visible.split(",") if gpu])
    try:
        return subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False).stdout.count("GPU ")
    except FileNotFoundError:
        return 0


class Failure(Exception):
    """The case failed."""


def expect(condition, text):
    if not condition:
        raise Failure(text)


class ForkedProcess:
    """What subprocess.Popen is for a rank, but half a second sooner: forked off this process, which has loaded LibTorch and
    the ranks' library before."""
    _fork = threading.Lock()  # no other process inherits the pipes
    _library = None

    def __init__(self, path, words, environment):
        with self._fork:
            if self._library is None:
                os.environ["OMP_NUM_THREADS"] = environment["OMP_NUM_THREADS"]  # read when it is loaded
                ForkedProcess._library = ctypes.CDLL(path)
            outputs = [os.pipe(), os.pipe()]
            self.pid = os.fork()
            if self.pid == 0:
                try:
                    self._play([write for _, write in outputs], words, environment)
                finally:
                    os._exit(70)
            for _, write in outputs:
                os.close(write)
        self.stdout, self.stderr = (open(read, errors="replace") for read, _ in outputs)
        self._status = None

    def _play(self, outputs, words, environment):
        for number in (signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ):  # those that Python does not leave alone
            signal.signal(number, signal.SIG_DFL)
        for place, descriptor in enumerate([os.open(os.devnull, os.O_RDONLY), *outputs]):
            os.dup2(descriptor, place)
        os.closerange(3, 1 << 20)
        os.environ.clear()
        os.environ.update(environment)
        arguments = (ctypes.c_char_p * len(words))(*(word.encode() for word in words))
        status = self._library.pacer_play_rank(len(words), arguments)
        ctypes.CDLL(None).exit(status)  # with what a program does at its end

    def poll(self):
        if self._status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid != 0:
                self._status = os.waitstatus_to_exitcode(status)
        return self._status

    def wait(self, timeout=PATIENCE):
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("a rank", timeout)
            time.sleep(0.005)
        return self._status

    def send_signal(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)


def start_process(command, environment, own_program):
    library = os.environ.get("PACER_RANKS_LIBRARY")
    if library and not own_program:
        return ForkedProcess(library, command, environment)
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                            errors="replace", env=environment)


class Rank:
    """One process. What it says is kept."""

    def __init__(self, number, command, environment, own_program):
        self.number = number
        self.lines = []
        self.warnings = []  # of standard error
        self._news = queue.Queue()
        self.process = start_process(command, environment, own_program)
        self._readers = [threading.Thread(target=self._read_lines, daemon=True),
                         threading.Thread(target=self._read_warnings, daemon=True)]
        for reader in self._readers:
            reader.start()

    def _read_lines(self):
        for line in self.process.stdout:
            self._news.put(line.rstrip("\n"))
        self._news.put(None)

    def _read_warnings(self):
        for line in self.process.stderr:
            self.warnings.append(line.rstrip("\n"))

    def _next(self, deadline, wanted):
        try:
            news = self._news.get(timeout=max(0, deadline - time.monotonic()))
        except queue.Empty:
            raise Failure(f"{self}: no {wanted} in time; {self.story()}") from None
        if news is not None:
            self.lines.append(news)
        return news

    def __str__(self):
        return f"rank {self.number}"

    def story(self):
        return f"it said {self.lines}, stderr {self.warnings}"

    def story_so_far(self):
        """What it said, also where nobody waited for it."""
        while True:
            try:
                news = self._news.get_nowait()
            except queue.Empty:
                return self.story()
            if news is not None:
                self.lines.append(news)

    def wait_for(self, pattern, patience=PATIENCE):
        """The match of the next line that fits."""
        deadline = time.monotonic() + patience
        while (news := self._next(deadline, f"line {pattern!r}")) is not None:
            if found := re.search(pattern, news):
                return found
        raise Failure(f"{self} ended without a line {pattern!r}; {self.story()}")

    def said(self, pattern):
        """All matches so far; complete after end()."""
        return [found for line in self.lines if (found := re.search(pattern, line))]

    def kill(self):
        self.process.send_signal(signal.SIGKILL)

    def ask_to_stop(self, number=signal.SIGTERM):
        self.process.send_signal(number)

    def stop(self):
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self):
        self.process.send_signal(signal.SIGCONT)

    def is_running(self):
        return self.process.poll() is None

    def end(self, status=0, patience=PATIENCE):
        """Waits for the end; it must be of that exit status (negative: of that signal; None: of any)."""
        deadline = time.monotonic() + patience
        while self._next(deadline, "end") is not None:
            pass
        try:
            found = self.process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise Failure(f"{self} closed its output but did not end") from None
        for reader in self._readers:
            reader.join(5)
        expect(status in (None, found), f"{self} ended with {found} instead of {status}; {self.story()}")
        return self

    def sockets(self):
        """The TCP sockets that it has open, as (address, port, state)."""
        return sockets_of(self.process.pid)


class Ranks(list):
    """All ranks of a run. Arguments are those of the scenario; {folder} in them is a private folder of the run. `inside`
    gives the words before the command of a rank, by its number. Ranks with such words, those on GPUs, and where something is
    loaded before LibTorch or stands before its functions, are programs of their own."""

    def __init__(self, worker, scenario, world_size, environment=None, only=None, inside=None, own_program=False, **arguments):
        super().__init__()
        self._inside = inside or (lambda number: [])
        self._own_program = own_program or inside is not None or "nccl" in arguments
        self._folder = tempfile.TemporaryDirectory(prefix="pacer-ranks-")
        self.folder = self._folder.name
        self._worker, self._scenario, self._world_size = worker, scenario, world_size
        # Not the launcher of this script, if it has one.
        inherited = {name: value for name, value in os.environ.items() if not LAUNCHERS.match(name)}
        self._environment = {**inherited, "OMP_NUM_THREADS": "1", **(environment or {})}
        if not {"file", "host"} & set(arguments):
            arguments["file"] = "{folder}/meeting"
        self._arguments = arguments
        for number in range(world_size) if only is None else only:
            self.start(number)

    def start(self, number, environment=None, **other):
        """One more process; `other` arguments instead of those of the run."""
        arguments = {**self._arguments, **other}
        world_size = arguments.pop("world_size", self._world_size)
        words = [f"{name}={value}".replace("{folder}", self.folder) for name, value in arguments.items()]
        command = [*self._inside(number), self._worker, self._scenario, str(number), str(world_size), *words]
        environment = {**self._environment, **(environment or {})}
        self.append(Rank(number, command, environment, self._own_program or "LD_PRELOAD" in environment))
        return self[-1]

    def wait_for(self, pattern):
        return [rank.wait_for(pattern) for rank in self]

    def end(self, status=0, patience=PATIENCE):
        for rank in self:
            rank.end(status, patience)

    def __enter__(self):
        return self

    def __exit__(self, _, error, __):
        # What one rank says of a failure is often only half of it.
        if isinstance(error, Failure):
            error.args = ("; ".join([str(error), *(f"{rank}: {rank.story_so_far()}" for rank in self)]),)
        for rank in self:
            if rank.is_running():
                rank.kill()
                rank.process.wait()
        self._folder.cleanup()


STATES = {"01": "established", "0A": "listening"}


def sockets_of(process):
    """The TCP sockets of a process, as (address, port, state), from the kernel's tables."""
    inodes = set()
    for descriptor in os.listdir(f"/proc/{process}/fd"):
        try:
            target = os.readlink(f"/proc/{process}/fd/{descriptor}")
        except FileNotFoundError:
            continue
        if found := re.match(r"socket:\[(\d+)\]", target):
            inodes.add(found[1])
    sockets = []
    for table in ("tcp", "tcp6"):
        with open(f"/proc/{process}/net/{table}") as lines:
            for line in list(lines)[1:]:
                fields = line.split()
                if fields[9] in inodes:
                    address, port = fields[1].split(":")
                    sockets.append((readable(address), int(port, 16), STATES.get(fields[3], fields[3])))
    return sockets


def readable(address):
    """An address of the kernel's table: groups of four bytes, each written backwards."""
    data = b"".join(bytes.fromhex(address[i:i + 8])[::-1] for i in range(0, len(address), 8))
    if len(data) == 4:
        return ".".join(str(byte) for byte in data)
    if data[:12] == bytes(10) + b"\xff\xff":
        return ".".join(str(byte) for byte in data[12:])
    return "::1" if data == bytes(15) + b"\x01" else data.hex(":", 2)


def is_loopback(address):
    return address.startswith("127.") or address == "::1"


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def own_address():
    """An address of this host beyond the loopback interface, or None."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
            return probe.getsockname()[0]
        except OSError:
            return None


def run_with_hosts(f, hosts):
    """Calls f where it and the processes that it starts see `hosts` as /etc/hosts. False where this user may not do that."""
    def enter_and_call(path):
        libc = ctypes.CDLL(None, use_errno=True)
        new_mounts, private, bind = 0x20000, 0x44000, 0x1000  # CLONE_NEWNS, of this thread; MS_PRIVATE | MS_REC; MS_BIND
        if libc.unshare(new_mounts) != 0 or libc.mount(None, b"/", None, private, None) != 0 or \
                libc.mount(path.encode(), b"/etc/hosts", None, bind, None) != 0:
            return False
        f()
        return True

    with tempfile.NamedTemporaryFile("w", suffix=".hosts") as file, concurrent.futures.ThreadPoolExecutor(1) as executor:
        file.write(hosts)
        file.flush()
        return executor.submit(enter_and_call, file.name).result()


def run_in_own_network(f, ports):
    """Calls f where it and the processes that it starts have a loopback interface of their own and nothing else, and who
    connects gets one of `ports` ("FIRST LAST"). False where this user may not do that."""
    def enter_and_call():
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.unshare(0x40000000) != 0:  # CLONE_NEWNET, of this thread
            return False
        try:
            with socket.socket() as any_socket:  # SIOCSIFFLAGS: the interface is up
                fcntl.ioctl(any_socket, 0x8914, struct.pack("16sh14x", b"lo", 1))
            with open("/proc/sys/net/ipv4/ip_local_port_range", "w") as range_file:
                range_file.write(ports)
        except OSError:
            return False
        f()
        return True

    with concurrent.futures.ThreadPoolExecutor(1) as executor:
        return executor.submit(enter_and_call).result()
