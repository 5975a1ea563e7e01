"""Communicator: the ranks of a process group of torch.distributed, joined once more by pacer.

Torch's group only tells the ranks where to meet; from there on pacer has connections of its own. CompressedAllReduce is
the exchange of the 1-bit optimizers on its own.
"""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
import weakref
from datetime import timedelta
from typing import Any, Callable, Optional, Union

import torch
import torch.distributed as dist

from . import _library  # noqa: F401  (registers torch.classes.pacer)


def _host_of(group: Any) -> str:
    """Returns an address of this host at which the others of the group are likely to reach it."""
    if dist.get_global_rank(group, 0) == 0 and os.environ.get("MASTER_ADDR"):
        return os.environ["MASTER_ADDR"]
    return socket.getfqdn()


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("", 0))
        return int(listener.getsockname()[1])


def _agree(group: Any, choose: Callable[[], Any]) -> Any:
    """Returns what the group's first rank chooses; where it cannot, every rank raises what it raised."""
    answer: list[Any] = [None, None]
    if dist.get_rank(group) == 0:
        try:
            answer[0] = choose()
        except Exception as error:
            answer[1] = str(error)
    dist.broadcast_object_list(answer, group_src=0, group=group)
    if answer[1] is not None:
        raise RuntimeError(f"pacer.Communicator: rank 0 of the group could not make a place to meet: {answer[1]}")
    return answer[0]


def _gpu_of(device: torch.device) -> int:
    """Returns the number of a GPU that is there, the current one's where `device` has none; -1 for the CPU."""
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f'pacer.Communicator: device is "{device}", but must be a CPU or a CUDA device.')
    if device.type == "cpu":
        return -1
    if not torch.cuda.is_available():
        raise ValueError(f'pacer.Communicator: device is "{device}", but torch finds no GPU; use "cpu".')
    gpu = torch.cuda.current_device() if device.index is None else device.index
    if gpu >= torch.cuda.device_count():
        raise ValueError(f'pacer.Communicator: device is "{device}", but torch finds {torch.cuda.device_count()} GPUs.')
    return gpu


class Communicator:
    """The ranks of `process_group` (None: the default group), with the same numbers, joined by connections of pacer's own:
    NCCL where the group has it and CUDA is there, else Gloo. All ranks of the group make it at the same time.

    device: of the tensors that train; None follows the group's backend. On CUDA it is the current device where it has no
    number. timeout: of setting up and of each operation. ranks_per_node: 0 finds out which ranks share a host. address:
    "host:port" at which the first rank listens, for hosts of several networks; None lets it choose, and ranks of one host
    meet in a private folder.
    """

    def __init__(
        self,
        process_group: Optional[dist.ProcessGroup] = None,
        *,
        device: Optional[Union[str, torch.device]] = None,
        timeout: timedelta = timedelta(minutes=10),
        ranks_per_node: int = 0,
        address: Optional[str] = None,
    ) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise ValueError(
                "pacer.Communicator needs a process group of torch.distributed; call torch.distributed.init_process_group "
                "first, or take pacer.Communicator.alone() where a process trains alone."
            )
        group = dist.group.WORLD if process_group is None else process_group
        self.rank: int = dist.get_rank(group)
        if self.rank < 0:
            raise ValueError("pacer.Communicator: this process does not belong to the process group; let its ranks call.")
        self.world_size: int = dist.get_world_size(group)
        if device is None:
            has_nccl = "nccl" in str(dist.get_backend(group)) and torch.cuda.is_available()
            device = "cuda" if has_nccl else "cpu"
        gpu = _gpu_of(torch.device(device))
        place, port = self._choose_place(group, address)
        self._handle: Any = torch.classes.pacer.Communicator(
            place, port, self.rank, self.world_size, "nccl" if gpu >= 0 else "gloo", gpu, ranks_per_node,
            timeout.total_seconds(),
        )  # fmt: skip

    @classmethod
    def alone(cls, device: Union[str, torch.device] = "cpu") -> Communicator:
        """Returns one of this process alone, whatever started it. `device`: of the tensors that train."""
        gpu = _gpu_of(torch.device(device))
        self = cls.__new__(cls)
        self.rank, self.world_size = 0, 1
        self._handle = torch.classes.pacer.Communicator.alone(torch.device("cuda", gpu) if gpu >= 0 else torch.device("cpu"))
        return self

    def _choose_place(self, group: Any, address: Optional[str]) -> tuple[str, int]:
        if address is not None:
            host, _, port = address.rpartition(":")
            if not host or not port.isdecimal():
                raise ValueError(f'pacer.Communicator: address is "{address}", but must be "host:port".')
            return host, int(port)
        hosts: list[Any] = [None] * self.world_size
        dist.all_gather_object(hosts, socket.gethostname(), group=group)
        if len(set(hosts)) > 1:
            return _agree(group, lambda: (_host_of(group), _free_port()))
        folder = _agree(group, lambda: tempfile.mkdtemp(prefix="pacer-"))
        if self.rank == 0:
            weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        return os.path.join(folder, "meeting"), -1

    @property
    def device(self) -> torch.device:
        """Where tensors that are exchanged must be."""
        return torch.device(self._handle.device())

    @property
    def backend(self) -> str:
        return str(self._handle.backend())

    @property
    def ranks_per_node(self) -> int:
        """0 where nodes have different numbers of ranks."""
        return int(self._handle.ranks_per_node())

    def bytes_sent(self) -> int:
        """Returns the bytes from this rank to others, of all operations."""
        return int(self._handle.bytes_sent())

    def traffic(self) -> list[dict[str, Any]]:
        """Returns calls and bytes by phase ("warm-up", "compressed", "refresh", "frozen"), group and operation."""
        names = ("phase", "group", "operation", "calls", "bytes_sent")
        return [dict(zip(names, line)) for line in self._handle.traffic()]

    def __reduce__(self) -> Any:
        raise TypeError("a pacer.Communicator cannot be copied or pickled, because it holds connections; make one more.")


def communicator_or_none(communicator: Optional[Communicator]) -> Optional[Communicator]:
    """Returns the given one, or one of the default group where that has several ranks; None for a process that trains
    alone. One of several ranks that a launcher started must say that it does, by Communicator.alone()."""
    if communicator is not None and not isinstance(communicator, Communicator):
        raise TypeError(
            f"communicator must be a pacer.Communicator, not a {type(communicator).__name__}; "
            "make one with pacer.Communicator(process_group)."
        )
    if communicator is not None:
        return communicator
    if dist.is_available() and dist.is_initialized():
        return Communicator() if dist.get_world_size() > 1 else None
    launcher, ranks = torch.ops.pacer.launched()
    if ranks > 1:
        raise ValueError(
            f"{launcher} started {ranks} ranks, but they have no process group, so each would train a model of its own; "
            "call torch.distributed.init_process_group first, or pass pacer.Communicator.alone() where that is meant."
        )
    return None


class CompressedAllReduce:
    """The mean over ranks of a vector that travels as signs, with what rounding to signs loses carried over into the next
    call (Tang et al., arXiv:2102.02888). A single call is a coarse guess; the sum of many is not. `scale`: "rms" or "l1".
    Without a communicator it is that of torch's default group, or a process that is alone."""

    def __init__(
        self,
        size: int,
        communicator: Optional[Communicator] = None,
        *,
        scale: str = "rms",
        block_scales: bool = False,
        compress_alone: bool = False,
        hierarchical: bool = False,
        device: Union[str, torch.device] = "cpu",
    ) -> None:
        if scale not in ("rms", "l1"):
            raise ValueError(f'CompressedAllReduce: scale is "{scale}", but must be one of "rms", "l1".')
        self._communicator = communicator_or_none(communicator)
        self._handle: Any = torch.classes.pacer.CompressedAllReduce(
            self._communicator and self._communicator._handle, torch.device(device), size, scale == "l1", block_scales,
            compress_alone, hierarchical,
        )  # fmt: skip

    def reduce(self, buffer: torch.Tensor) -> None:
        """Turns `buffer`, fp32 and contiguous, into the compressed mean over ranks, in place."""
        self._handle.reduce(buffer)

    def errors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns copies of what this rank carries: of its own buffer, and of the part of the mean that it serves."""
        return self._handle.worker_error(), self._handle.server_error()

    def set_errors(self, worker: torch.Tensor, server: torch.Tensor) -> None:
        """Goes on from the errors of a former run, or from zeros."""
        self._handle.set_errors(worker, server)

    def bytes_sent(self) -> int:
        """Returns the bytes from this rank to others as signs, in all calls."""
        return int(self._handle.bytes_sent())
