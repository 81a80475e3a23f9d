"""The one fork server of a test process: what all children need is imported once.

Python has one fork server for a process, and what it preloads is settled when the first child is
made: who came later with a list of its own would import for seconds in every child. Owns the list.
"""

import multiprocessing
from functools import cache
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from typing import Final

PRELOADED: Final = (
    "transformers.models.auto.modeling_auto", "stratakv.bench.ranks_engine",
    "stratakv.serve.launch", "stratakv.serve.wiring", "tests.parallel_models",
    "tests.ranked_engines", "tests.ranks", "tests.storage_writer",
)  # fmt: skip


@cache
def fork_server() -> ForkServerContext:
    """Its context; the server runs."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOADED])
    forkserver.ensure_running()
    return context
