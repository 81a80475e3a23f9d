"""Ranks as processes, over ``torch.distributed``.

Owns the process group and what its failures are called. Votes and letters travel on the CPU (gloo)
whatever the model uses, so that no ballot waits for a stream.
"""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Final

import numpy as np
import torch
import torch.distributed as dist

from stratakv.agreement.ballot import Lanes
from stratakv.core.errors import RankLostError

LETTER_BYTES: Final = 16384
"""What one broadcast carries, with eight bytes that say how long the letter is. The rest of a
longer one, a long prompt's, takes another."""
_LENGTH: Final = 8


class TorchRanks:
    """``timeout_s``: how long a rank may let the others wait, in a collective."""

    def __init__(self, rank: int, size: int, address: str, timeout_s: float) -> None:
        """Blocks until all ranks are there. ``address``: where rank 0 listens, as in
        ``tcp://host:port``, or ``env://``. RankLostError where they do not come in time."""
        self.rank = rank
        self.size = size
        self._limit = f"{timeout_s:g} s"

        with self._watched():
            dist.init_process_group(
                "gloo",
                init_method=address,
                rank=rank,
                world_size=size,
                timeout=timedelta(seconds=timeout_s),
            )
        self._page = torch.zeros(LETTER_BYTES, dtype=torch.uint8)

    def least(self, lanes: Lanes) -> Lanes:
        with self._watched():
            dist.all_reduce(torch.from_numpy(lanes), op=dist.ReduceOp.MIN)
        return lanes

    def tell(self, letter: bytes) -> bytes:
        page, room = self._page, LETTER_BYTES - _LENGTH
        if self.rank == 0:
            head = len(letter).to_bytes(_LENGTH, "little") + letter[:room]
            page[: len(head)] = _bytes(head)
        with self._watched():
            dist.broadcast(page, 0)
        length = int.from_bytes(page[:_LENGTH].numpy().tobytes(), "little")
        if length <= room:
            return page[_LENGTH : _LENGTH + length].numpy().tobytes()
        whole = torch.empty(length, dtype=torch.uint8)
        if self.rank == 0:
            whole[:] = _bytes(letter)
        with self._watched():
            dist.broadcast(whole, 0)
        return whole.numpy().tobytes()

    def gather(self, text: str) -> Sequence[str]:
        texts: list[str] = [""] * self.size
        with self._watched():
            dist.all_gather_object(texts, text)
        return texts

    def close(self) -> None:
        dist.destroy_process_group()

    @contextmanager
    def _watched(self) -> Generator[None]:
        try:
            yield
        except RuntimeError as error:
            raise RankLostError(
                f"rank {self.rank} of {self.size} waits for another rank, which has ended or has "
                f"not answered within {self._limit}: {error}"
            ) from error


def _bytes(text: bytes) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(text, np.uint8).copy())
