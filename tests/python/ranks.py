"""Ranks for tests: run_job starts processes that call the test's file again with a job, a rank and a folder; main runs the
job there, in a process group."""
import os
import subprocess
import sys
import tempfile
import unittest

import torch
import torch.distributed as dist

DEVICE = os.environ.get("PACER_TEST_DEVICE", "cpu")  # of a job's ranks


def numbers(count, salt, dtype=torch.float32):
    index = torch.arange(count, dtype=torch.int64)
    return (((index * 7919 + salt * 104729) % 2001 - 1000).float() / 1024).to(dtype)


def run_job(script, job, *arguments, world_size=2, device="cpu", ends_with=0):
    """Returns the folder of a job that ended as it should on all ranks; ends_with: their exit code, -9 for SIGKILL."""
    folder = tempfile.TemporaryDirectory()
    processes = [
        subprocess.Popen(
            [sys.executable, script, job, str(rank), str(world_size), folder.name, *arguments],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, "PACER_TEST_DEVICE": device},
        )
        for rank in range(world_size)
    ]  # fmt: skip
    outputs = [process.communicate(timeout=200)[0] for process in processes]
    if any(process.returncode != ends_with for process in processes):
        raise AssertionError("\n".join(f"rank {i}:\n{text}" for i, text in enumerate(outputs)))
    return folder


def main(names):
    """Runs the job that the command line asks for, a function job_NAME(rank, folder, *arguments) among `names`, or the tests."""
    if len(sys.argv) <= 3:
        return unittest.main()
    job, rank, world_size, folder, *arguments = sys.argv[1:]
    if DEVICE == "cuda":
        torch.cuda.set_device(int(rank))
    backend = {"cpu": "gloo", "cuda": "nccl"}[DEVICE]
    dist.init_process_group(backend, init_method=f"file://{folder}/group", rank=int(rank), world_size=int(world_size))
    names["job_" + job](int(rank), folder, *arguments)
    dist.barrier()
    dist.destroy_process_group()
