#!/usr/bin/env python3
"""Programs that run in several processes: how they end, and that nothing of them stays behind.

processes.py PROCESS_ACTOR

Every case checks that the exit code and the one line about it are right, that no process is left, and that the
private folder is gone.
"""
import os
import re
import signal
import subprocess
import sys
import tempfile
import time

RANKS = 3
ACTOR = sys.argv[1]
LINE = re.compile(r"^\[rank (\d)\] pid (\d+) threads (\d*) folder (.*)/meeting$", re.M)


class Run:
    """The actor with its own TMPDIR; `lines` has (rank, pid, threads, folder) of every rank."""

    def __init__(self, *words, **variables):
        self.root = tempfile.TemporaryDirectory()
        environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
        environment.update(TMPDIR=self.root.name, **variables)
        self.process = subprocess.Popen([ACTOR, str(RANKS), *words], env=environment, text=True,
                                        stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def ranks_at_work(self):
        """Reads until every rank has said who it is."""
        self.errors = ""
        while len(LINE.findall(self.errors)) < RANKS:
            line = self.process.stderr.readline()
            expect(line, f"ended before all ranks had started:\n{self.errors}")
            self.errors += line
        return LINE.findall(self.errors)

    def end(self):
        """Waits for the end and returns the exit code; `seconds` it took."""
        started = time.monotonic()
        self.output, errors = self.process.communicate(timeout=60)
        self.errors = getattr(self, "errors", "") + errors
        self.seconds = time.monotonic() - started
        self.lines = LINE.findall(self.errors)
        return self.process.returncode

    def check_nothing_is_left(self):
        for _ in range(100):  # after kill -9 this takes a moment
            alive = [pid for _, pid, _, _ in self.lines if is_alive(int(pid))]
            folders = os.listdir(self.root.name)
            if not alive and not folders:
                return
            time.sleep(0.05)
        sys.exit(f"left behind: processes {alive}, folders {folders}")


def is_alive(pid):
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
            return file.read().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


def expect(condition, text):
    if not condition:
        sys.exit(text)


def expect_message(run, text):
    lines = [line for line in run.errors.split("\n") if line.startswith("process_actor: ")]
    expect(lines == ([text] if text else []), f"said {lines} instead of {text!r}")


def ends_well():
    run = Run("end")
    expect(run.end() == 0, f"exit code {run.process.returncode}: {run.errors}")
    expect(run.output == "stdout of rank 0\n", f"stdout was {run.output!r}")
    expect(sorted(rank for rank, _, _, _ in run.lines) == ["0", "1", "2"], f"stderr was {run.errors!r}")
    threads = max(1, len(os.sched_getaffinity(0)) // RANKS)
    expect({n for _, _, n, _ in run.lines} == {str(threads)}, f"threads: {run.lines} instead of {threads}")
    folders = {folder for _, _, _, folder in run.lines}
    expect(len(folders) == 1 and folders.pop().startswith(run.root.name + "/pacer-"), f"folders: {run.lines}")
    for rank in range(RANKS):
        expect(f"[rank {rank}] unfinished line\n" in run.errors, f"rank {rank}'s last words are lost: {run.errors!r}")
    expect_message(run, "")
    run.check_nothing_is_left()


def keeps_the_users_threads():
    run = Run("end", OMP_NUM_THREADS="7")
    expect(run.end() == 0 and {n for _, _, n, _ in run.lines} == {"7"}, f"threads: {run.lines}")


def ranks_meet():
    run = Run("join")
    expect(run.end() == 0, f"exit code {run.process.returncode}: {run.errors}")
    for rank in range(RANKS):
        expect(f"[rank {rank}] sum 6, 3 ranks\n" in run.errors, run.errors)
    run.check_nothing_is_left()


def one_fails(words, code, message, at_least, at_most):
    run = Run(*words)
    expect(run.end() == code, f"{words}: exit code {run.process.returncode} instead of {code}: {run.errors}")
    expect_message(run, f"process_actor: {message}")
    expect(at_least <= run.seconds <= at_most, f"{words}: took {run.seconds:.1f} s")
    run.check_nothing_is_left()


def signal_is_passed_on(number):
    run = Run("wait")
    run.ranks_at_work()
    run.process.send_signal(number)
    expect(run.end() == 128 + number, f"signal {number}: exit code {run.process.returncode}")
    expect(run.seconds < 4.5, f"signal {number}: took {run.seconds:.1f} s")
    expect_message(run, "")
    run.check_nothing_is_left()


def parent_is_killed():
    run = Run("wait")
    run.ranks_at_work()
    run.process.kill()
    run.end()
    run.check_nothing_is_left()


def refuses_a_launcher():
    run = Run("end", RANK="0", WORLD_SIZE="2", LOCAL_RANK="0", LOCAL_WORLD_SIZE="2", MASTER_ADDR="127.0.0.1",
              MASTER_PORT="29500")
    expect(run.end() == 1, f"exit code {run.process.returncode}: {run.errors}")
    expect("leave --processes out under a launcher" in run.errors, run.errors)


ends_well()
keeps_the_users_threads()
ranks_meet()
one_fails(["fail", "1", "4"], 4, "rank 1 of 3 ended with exit code 4", 5, 40)  # 5 s for the others, then SIGTERM
one_fails(["deaf", "0", "5"], 5, "rank 0 of 3 ended with exit code 5", 8, 40)  # SIGKILL 3 s after SIGTERM
one_fails(["peers", "2", "6"], 6, "rank 2 of 3 ended with exit code 6", 0, 40)  # others saw it first
one_fails(["peers", "0", "kill"], 137, "rank 0 of 3 was killed by signal 9 (Killed)", 0, 40)
signal_is_passed_on(signal.SIGINT)
signal_is_passed_on(signal.SIGTERM)
parent_is_killed()
refuses_a_launcher()
print("11 cases: exit codes, messages, signals, no process and no folder left")
