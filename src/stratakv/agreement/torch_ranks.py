"""Ranks as processes, over ``torch.distributed``.

Owns the process group and what its failures are called. Votes and messages travel on the CPU (gloo)
whatever the model uses, so that no ballot waits for a stream.
"""

import os
import re
import socket
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Final

import numpy as np
import torch
import torch.distributed as dist

from stratakv.agreement.ballot import LaneValues
from stratakv.agreement.ranks import nothing
from stratakv.core.errors import ConfigError, RankLostError

BROADCAST_BYTES: Final = 16384
"""What one broadcast carries, with eight bytes that say how long the message is. The rest of a
longer one, a long prompt's, takes another."""
_LENGTH: Final = 8
START_S: Final = 600.0
"""How long ranks may wait for each other while they import, load weights and take memory: they are
not started at once, and not all disks are as fast."""


BACKENDS: Final[Mapping[str, str]] = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
"""By --device: ballots and messages go over gloo, on the CPU, and a model's sums where they are."""


class TorchRanks:
    """The ranks of a process group that ``join`` has started. ``timeout_s``: how long one may let
    the others wait in a collective, as ``join`` was given."""

    def __init__(self, timeout_s: float) -> None:
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self._timeout_s = timeout_s
        self._limit_s = max(START_S, timeout_s)  # until all are ready
        self._page = torch.zeros(BROADCAST_BYTES, dtype=torch.uint8)

    def all_reduce_min(
        self, lanes: LaneValues, meanwhile: Callable[[], None] = nothing
    ) -> LaneValues:
        votes = torch.from_numpy(lanes)
        with _watched(self.rank, self._limit_s):
            under_way = dist.all_reduce(votes, op=dist.ReduceOp.MIN, async_op=True)
        assert under_way is not None, "a rank outside the group"
        meanwhile()
        with _watched(self.rank, self._limit_s):
            under_way.wait()
        return lanes

    def broadcast(self, message: bytes) -> bytes:
        page, room = self._page, BROADCAST_BYTES - _LENGTH
        if self.rank == 0:
            head = len(message).to_bytes(_LENGTH, "little") + message[:room]
            page[: len(head)] = _bytes(head)
        with _watched(self.rank, self._limit_s):
            dist.broadcast(page, 0)
        length = int.from_bytes(page[:_LENGTH].numpy().tobytes(), "little")
        if length <= room:
            return page[_LENGTH : _LENGTH + length].numpy().tobytes()
        whole = torch.empty(length, dtype=torch.uint8)
        if self.rank == 0:
            whole[:] = _bytes(message)
        with _watched(self.rank, self._limit_s):
            dist.broadcast(whole, 0)
        return whole.numpy().tobytes()

    def gather(self, text: str) -> Sequence[str]:
        texts: list[str] = [""] * self.size
        with _watched(self.rank, self._limit_s):
            dist.all_gather_object(texts, text)
        return texts

    def ready(self) -> None:
        """Wait until every rank has loaded what it needs, for which it may take ``START_S``; from
        here on the group's own limit holds."""
        self.gather("")
        self._limit_s = self._timeout_s
        limit = timedelta(seconds=self._limit_s)
        group = dist.distributed_c10d  # there is no public way
        group._set_pg_timeout(limit)  # pyright: ignore[reportPrivateUsage]  # noqa: SLF001

    def close(self) -> None:
        dist.destroy_process_group()


def join(
    rank: int,
    size: int,
    address: str,
    timeout_s: float,
    listener: socket.socket | None = None,
    backend: str = BACKENDS["cpu"],
) -> TorchRanks:
    """Block until all ranks are there. ``address``: where rank 0 listens, as in
    ``tcp://host:port``, or ``env://``. ``listener``: rank 0's socket that listens there already,
    which is the group's from then on. ``backend``: of ``BACKENDS``. RankLostError where they do not
    come within ``START_S``, which is also the limit of every collective until ``ready``;
    ConfigError where rank 0 cannot listen there."""
    limit = timedelta(seconds=max(START_S, timeout_s))
    with _watched(rank, START_S), _listening(address):
        store = None if listener is None else _store(listener, size, limit)
        dist.init_process_group(
            backend,
            init_method=address if store is None else None,
            rank=rank,
            world_size=size,
            timeout=limit,
            store=store,
        )
    return TorchRanks(timeout_s)


def _store(listener: socket.socket, size: int, limit: timedelta) -> dist.Store:
    """As torch makes it where it is given an address."""
    host, port = listener.getsockname()
    held = dist.TCPStore(
        host,
        port,
        size,
        is_master=True,
        timeout=limit,
        multi_tenant=True,
        master_listen_fd=listener.detach(),
    )
    return dist.PrefixStore("default_pg", held)


def is_loss(error: BaseException) -> bool:
    """Whether an error, of the model's own collectives too, means that a rank is gone or silent."""
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and "gloo/" in str(error)
    )


def loss_description(error: BaseException) -> str:
    """One line of torch's error of a collective that failed."""
    first = (str(error).splitlines() or [""])[0]
    return re.sub(r"^\[[^]]*\] ", "", first).partition(". This is typically")[0]


@contextmanager
def _watched(rank: int, limit_s: float) -> Generator[None]:
    try:
        yield
    except RuntimeError as error:
        why = loss_description(error)
        late = re.search("tim(ed|e) ?out", why, re.IGNORECASE)
        how = f"has not answered within {limit_s:g} s" if late else "has ended"
        raise RankLostError(f"rank {rank} waits for another rank, which {how}: {why}") from error


@contextmanager
def _listening(address: str) -> Generator[None]:
    try:
        yield
    except dist.DistNetworkError as error:
        if "failed to listen" not in str(error):
            raise
        where = address.removeprefix("tcp://")
        if address == "env://":
            where = f"MASTER_PORT {os.environ.get('MASTER_PORT')}"
        raise ConfigError(
            f"--tp: ranks cannot meet at {where}, where rank 0 cannot listen "
            f"({loss_description(error)}); allowed is a free port"
        ) from error


def _bytes(text: bytes) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(text, np.uint8).copy())
