"""A process that writes to a file store until it is killed, and says what it stored.

Owns no assertion. Sends "+N" for key N once ``write`` has returned, "-N" before it is removed, and
"eN": N were evicted so far.
"""

import resource
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from stratakv.core.clock import WallClock
from stratakv.storage.backend import WriteStatus
from stratakv.storage.file.limits import StoreLimits
from stratakv.storage.file.store import FileStore
from stratakv.testing.storage_conformance import FORM, Arena, keys_of

KEYS = 300
"""Of each of two groups; 8 MiB hold them all. Removing makes slots be used again."""


def write_forever(
    sender: Connection, directory: Path, seed: int, quota_bytes: int, file_limit_bytes: int
) -> None:
    """``file_limit_bytes`` 0: no limit."""
    if file_limit_bytes:
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_limit_bytes, file_limit_bytes))
    rng = np.random.default_rng(seed)
    keys = [*keys_of("killed", KEYS), *keys_of("killed", KEYS, group=1)]
    store = FileStore(directory, FORM, StoreLimits(quota_bytes=quota_bytes), WallClock())
    sender.send("ready")
    while True:
        some = rng.permutation(len(keys))[: rng.integers(1, 9)].tolist()
        if rng.random() < 0.2:
            gone = some[:2]
            sender.send(" ".join(f"-{at}" for at in gone))
            store.remove([keys[at] for at in gone])
        statuses = store.write(
            [keys[at] for at in some], Arena([keys[at] for at in some]).fill().pages
        )
        there = {WriteStatus.STORED, WriteStatus.PRESENT}
        done = [at for at, status in zip(some, statuses, strict=True) if status in there]
        evicted = store.stats().counters.evicted
        sender.send(" ".join([*(f"+{at}" for at in done), f"e{evicted}"]))
