"""Which threads a test's stores have. Owns the difference to those that an earlier test left: its
own failure is enough, and must not become a hang of every test behind it.
"""

import threading


class StorageThreads:
    """Threads of stores that were started since this was made, and still run."""

    def __init__(self) -> None:
        self._before = frozenset(threading.enumerate())

    @property
    def names(self) -> list[str]:
        now = (thread for thread in threading.enumerate() if thread not in self._before)
        return [thread.name for thread in now if thread.name.startswith("stratakv-storage")]
