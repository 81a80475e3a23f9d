"""A process that writes to a file store until it is killed, and says what it stored.

Run as a module: DIRECTORY SEED QUOTA_BYTES LIMIT_BYTES (of a file; 0: none). Owns no assertion.
Prints +N for key N once ``write`` has returned, -N before it is removed, eN: N were evicted so far.
"""

import resource
import sys
from pathlib import Path

import numpy as np

from stratakv.core.clock import WallClock
from stratakv.storage.backend import WriteStatus
from stratakv.storage.file.room import Keeping
from stratakv.storage.file.store import FileStore
from stratakv.testing.storage_conformance import FORM, Arena, keys_of

KEYS = 300
"""Of each of two groups; 8 MiB hold them all. Removing makes slots be used again."""


def main(directory: str, seed: str, quota: str, limit: str) -> None:
    if int(limit):
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(limit), int(limit)))
    rng = np.random.default_rng(int(seed))
    keys = [*keys_of("killed", KEYS), *keys_of("killed", KEYS, group=1)]
    store = FileStore(Path(directory), FORM, Keeping(quota_bytes=int(quota)), WallClock())
    say("ready")
    while True:
        some = rng.permutation(len(keys))[: rng.integers(1, 9)].tolist()
        if rng.random() < 0.2:
            gone = some[:2]
            say(*(f"-{at}" for at in gone))
            store.remove([keys[at] for at in gone])
        statuses = store.write(
            [keys[at] for at in some], Arena([keys[at] for at in some]).fill().pages
        )
        there = {WriteStatus.STORED, WriteStatus.PRESENT}
        done = [at for at, status in zip(some, statuses, strict=True) if status in there]
        evicted = store.stats().counters.evicted
        say(*(f"+{at}" for at in done), f"e{evicted}")


def say(*words: str) -> None:
    sys.stdout.write(" ".join(words) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
