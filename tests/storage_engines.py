"""A process that makes engines over a file store, for tests that kill them.

Run as a module: FAMILY. Each line of its input is "DIRECTORY SEED": an engine in a process of its
own then serves prompts until it is killed. Owns no assertion but those of ``Lab``.

Prints the new process's number, "+N" for each time that prompt N was served, and when the process
is dead "=STATUS". Every engine comes by a fork, so that the imports are paid once.
"""

import logging
import os
import sys
from pathlib import Path
from typing import Final

import numpy as np
import torch

from stratakv.engine.attachment import StorageCall, Verb
from tests.hit_cases import engine_model, prompt
from tests.storage_cases import evict_all, file_url, storage_lab

PAGE: Final = 16
SYSTEM: Final = prompt(PAGE, 900, 70)
PROMPTS: Final = [
    *(prompt(PAGE, 901 + i, 40 + 17 * i) for i in range(6)),
    *([*SYSTEM, *prompt(PAGE, 911 + i, 20 + 13 * i)] for i in range(6)),
]
CLEARED: Final = 0.1
"""How often everything is forgotten, so that there is always something to write."""


def main(family: str) -> None:
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    engine_model(family)
    for line in sys.stdin:
        directory, seed = line.split()
        if (child := os.fork()) == 0:
            serve(family, Path(directory), int(seed))
        write(f"={os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}")


def serve(family: str, directory: Path, seed: int) -> None:
    """Does not come back: a fault ends the process with its status."""
    try:
        rng = np.random.default_rng(seed)
        write(str(os.getpid()))
        with storage_lab(family, PAGE, file_url(directory)) as this:
            while True:
                at = int(rng.integers(len(PROMPTS)))
                this.ask(PROMPTS[at])
                write(f"+{at}")
                evict_all(this)
                if rng.random() < CLEARED:
                    this.parts.engine.call_storage(StorageCall(Verb.CLEAR))
    finally:
        os._exit(1)


def write(line: str) -> None:
    os.write(1, f"{line}\n".encode())


if __name__ == "__main__":
    main(sys.argv[1])
