"""Ranks for tests: run_job starts processes that run a job of the test's file, a function job_NAME(rank, folder, *arguments),
in a process group. They come from a server process that has imported torch once, which takes each of them seconds."""
import multiprocessing
import os
import runpy
import sys
import tempfile
import time

import torch
import torch.distributed as dist

DEVICE = "cpu"  # of a job's ranks
SECONDS = 200  # that a job may take


def numbers(count, salt, dtype=torch.float32):
    index = torch.arange(count, dtype=torch.int64)
    return (((index * 7919 + salt * 104729) % 2001 - 1000).float() / 1024).to(dtype)


def play(script, job, rank, world_size, folder, arguments, device):
    global DEVICE
    DEVICE = device  # before the file is run, which reads it
    output = os.open(f"{folder}/output-{rank}", os.O_CREAT | os.O_WRONLY, 0o600)
    for descriptor in (sys.stdout.fileno(), sys.stderr.fileno()):
        os.dup2(output, descriptor)
    if device == "cuda":
        torch.cuda.set_device(rank)
    backend = {"cpu": "gloo", "cuda": "nccl"}[device]
    dist.init_process_group(backend, init_method=f"file://{folder}/group", rank=rank, world_size=world_size)
    runpy.run_path(script)["job_" + job](rank, folder, *arguments)
    dist.barrier()
    dist.destroy_process_group()


def run_job(script, job, *arguments, world_size=2, device="cpu", ends_with=0):
    """Returns the folder of a job that ended as it should on all ranks; ends_with: their exit code, -9 for SIGKILL."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "pacer"])
    folder = tempfile.TemporaryDirectory()
    processes = [
        context.Process(target=play, args=(script, job, rank, world_size, folder.name, arguments, device))
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    deadline = time.monotonic() + SECONDS
    for process in processes:
        process.join(max(0, deadline - time.monotonic()))
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
        process.join()
    if any(code != ends_with for code in codes):
        outputs = [open(f"{folder.name}/output-{rank}").read() for rank in range(world_size)]
        raise AssertionError("\n".join(f"rank {rank}, exit code {codes[rank]}:\n{text}" for rank, text in enumerate(outputs)))
    return folder
