"""Ranks that learn from their launcher's variables who they are and where they meet."""
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

from ranks import LONG, Failure, Ranks, expect, free_port, is_loopback, own_address
from run_ranks import case


@case
def mpirun(worker):
    """Open MPI's variables on one host: through a file of a private folder, which is empty afterwards."""
    for variable, subfolder in (("XDG_RUNTIME_DIR", "pacer"), ("TMPDIR", f"pacer-{os.geteuid()}")):
        with Ranks(worker, "environment", 3, only=()) as ranks:
            for number in range(3):
                ranks.start(number, environment={
                    "XDG_RUNTIME_DIR": "", variable: ranks.folder, "PMIX_NAMESPACE": "prterun-7@1",
                    "OMPI_COMM_WORLD_SIZE": "3", "OMPI_COMM_WORLD_RANK": str(number),
                    "OMPI_COMM_WORLD_LOCAL_SIZE": "3", "OMPI_COMM_WORLD_LOCAL_RANK": str(number)})
            for number, rank in enumerate(ranks):
                rank.end()
                expect(rank.said(f"rank {number} of 3, here {number} of 3"), rank.story())
            folder = Path(ranks.folder, subfolder)
            expect(folder.stat().st_mode & 0o777 == 0o700, f"{folder} has mode {folder.stat().st_mode:o}")
            expect(not os.listdir(folder), f"left behind: {os.listdir(folder)}")
            # Somebody else's folder of that name, or one that others may enter, is not used.
            folder.chmod(0o770)
            rank = ranks.start(0, environment={
                "XDG_RUNTIME_DIR": "", variable: ranks.folder, "PMIX_NAMESPACE": "7",
                "OMPI_COMM_WORLD_SIZE": "3", "OMPI_COMM_WORLD_RANK": "0",
                "OMPI_COMM_WORLD_LOCAL_SIZE": "3", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}).end(3)
            expect(rank.said("error: other users may enter the folder"), rank.story())


@case
def by_hand(worker):
    """RANK, WORLD_SIZE and an address, and nothing else; and a single process."""
    port = str(free_port())
    with Ranks(worker, "environment", 2, only=(), stay=1) as ranks:
        for number in range(2):
            ranks.start(number, environment={"RANK": str(number), "WORLD_SIZE": "2", "MASTER_ADDR": "localhost",
                                             "MASTER_PORT": port})
        for number, rank in enumerate(ranks):
            rank.wait_for(f"rank {number} of 2, here {number} of 2")
        found = [entry for rank in ranks for entry in rank.sockets()]
        expect(found and all(is_loopback(address) for address, _, _ in found), f"beyond this host: {found}")
    with Ranks(worker, "environment", 1) as ranks:
        ranks.end()
        expect(ranks[0].said("rank 0 of 1, here 0 of 1"), ranks[0].story())


@case
def nodes(worker):
    """Ranks of one size, in a row, are nodes; what the program says goes before what the launcher does."""
    address = own_address() or "localhost"  # which does for one host
    for places, given, expected in (
            (((0, 2), (1, 2), (0, 2), (1, 2)), {}, 2), (((0, 2), (1, 2), (0, 1)), {}, 0),
            (((0, 2), (0, 2), (1, 2), (1, 2)), {}, 0), (((0, 1), (0, 1)), {}, 1),
            (((0, 4), (1, 4), (2, 4), (3, 4)), {"ranks_per_node": 2}, 2)):
        port, world_size = str(free_port()), len(places)
        if address == "localhost" and places[0][1] != world_size:
            continue
        with Ranks(worker, "environment", world_size, only=(), **given) as ranks:
            for number, (local_rank, local_size) in enumerate(places):
                ranks.start(number, environment={
                    "RANK": str(number), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(local_rank),
                    "LOCAL_WORLD_SIZE": str(local_size), "MASTER_ADDR": address, "MASTER_PORT": port})
            for rank in ranks:
                rank.end()
                expect(rank.said(f"by nodes of {expected}$"), f"{places}: {rank.story()}")
    with Ranks(worker, "meet", 3, only=()) as ranks:
        for number, size in enumerate((1, 3, 1)):
            ranks.start(number, ranks_per_node=size)
        ranks.end(3)
        for rank in ranks:
            expect(rank.said("ranks_per_node is 1 on rank 0, but 3 on rank 1"), rank.story())


@case
def srun(worker):
    """A job of Slurm, where its controller answers."""
    if not shutil.which("srun") or subprocess.run(["timeout", "10", "sinfo"], capture_output=True).returncode != 0:
        print("PACER_SKIPPED: srun is not there or no controller answers")
        return
    command = ["srun", "--ntasks=2", "--nodes=1", "--overcommit", "--immediate=30", worker, "environment", "0", "1"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    expect(run.returncode == 0, f"srun ended with {run.returncode}: {run.stdout} {run.stderr[-2000:]}")
    for number in range(2):
        expect(f"rank {number} of 2, here {number} of 2" in run.stdout, f"rank {number} was not heard: {run.stdout}")


def find_torchrun():
    here = os.environ.get("PACER_TORCHRUN", "")  # beside the LibTorch that the worker is linked with
    program = here if Path(here).is_file() else shutil.which("torchrun")
    if program and subprocess.run([program, "--help"], capture_output=True).returncode == 0:
        return program
    print("PACER_SKIPPED: torchrun is not there or does not run")
    return None


@case
def torchrun(worker):
    """torchrun's agent keeps the store, also through a restart of the workers."""
    program = find_torchrun()
    if not program:
        return
    command = [program, "--no-python", "--nproc-per-node=2", "--max-restarts=1", "--master-addr=127.0.0.1",
               f"--master-port={free_port()}", worker, "environment", "0", "1", "fail_once"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    expect(run.returncode == 0, f"torchrun ended with {run.returncode}: {run.stdout} {run.stderr[-2000:]}")
    for number in range(2):
        lines = run.stdout.count(f"rank {number} of 2, here {number} of 2")
        expect(lines == 2, f"rank {number} was heard {lines} times instead of 2: {run.stdout}")


def ends_of(agents, what, patience=60):
    """What each has written when all have ended. None is left behind: it ends with its workers where it is told to."""
    deadline = time.monotonic() + patience
    try:
        return [agent.communicate(timeout=max(0, deadline - time.monotonic())) for agent in agents]
    except subprocess.TimeoutExpired as error:
        raise Failure(f"{what}: an agent has not ended within {patience} s, and had written: {error.output}") from error
    finally:
        for agent in agents:
            agent.terminate()
        for agent in agents:
            try:
                agent.communicate(timeout=10)
            except subprocess.TimeoutExpired:
                agent.kill()
                agent.communicate()


@case
def torchrun_agents(worker):
    """Two agents, one of which loses a worker: their counts of restarts differ, and the ranks meet all the same."""
    program = find_torchrun()
    if not program:
        return
    deaths = ((3, "step"), (1, "met"), (0, "step"), (2, "start"))
    for dies, place in deaths if LONG else deaths[:2]:
        with tempfile.TemporaryDirectory() as folder:
            command = [program, "--no-python", "--nnodes=2", "--nproc-per-node=2", "--max-restarts=1",
                       "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--rdzv-id=agents",
                       "--local-addr=127.0.0.1", "--monitor-interval=0.1", worker, "environment", "0", "1",
                       f"dies={dies}", f"at={place}", f"once={folder}/once", "timeout_ms=60000"]
            agents = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
                      for _ in range(2)]
            said = ends_of(agents, f"rank {dies} died at {place}")
            story = f"rank {dies} died at {place}: {said[0][0]} {said[1][0]} {said[0][1][-2000:]} {said[1][1][-2000:]}"
            expect(Path(folder, "once").exists(), f"nobody died: {story}")
            expect(all(agent.returncode == 0 for agent in agents), story)
            for number in range(4):
                expect(f"rank {number} is done" in said[0][0] + said[1][0], f"rank {number} is not done: {story}")
