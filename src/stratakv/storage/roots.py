"""Which directories may be attached while a server runs.

Owns the check of a URL that came over the network: who has the admin key must not thereby choose
where in the file system the server writes. Must not open or make anything.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from stratakv.core.errors import ConfigError
from stratakv.storage.urls import FLAG, FileUrl, StorageUrl, hidden

ROOT_FLAG = "--storage-root"


def check_roots(roots: Sequence[str]) -> None:
    """ConfigError for a root that is no directory of this machine."""
    for root in roots:
        if not Path(root).is_absolute() or not Path(root).is_dir():
            raise ConfigError(
                f"{ROOT_FLAG} {root}: allowed is the absolute path of a directory that exists"
            )


class Roots:
    """``roots``: below which any directory is allowed, and each itself. ``home``: the directory
    that the server was started with, which is allowed too; None: it had none."""

    def __init__(self, roots: Sequence[Path], home: Path | None = None) -> None:
        self._roots = tuple(roots)
        self._home = home

    def checked(self, url: StorageUrl) -> StorageUrl:
        """``url`` as it is to be opened, with no link left in its path; ConfigError where its
        directory is not allowed."""
        if not isinstance(url, FileUrl):
            return url
        directory = url.directory.resolve()
        at_home = self._home is not None and directory == self._home.resolve()
        if not at_home and not any(directory.is_relative_to(r.resolve()) for r in self._roots):
            raise ConfigError(
                f"{FLAG} {hidden(f'file://{url.directory}')}: a running server attaches no such "
                f"directory; allowed are {self._allowed()}"
            )
        return replace(url, directory=directory)

    def _allowed(self) -> str:
        known = [f"those below {ROOT_FLAG} {root}" for root in self._roots]
        if self._home is not None:
            known.append(f"{self._home}, with which it was started")
        if not self._roots:
            known.append(f"those below a {ROOT_FLAG}, of which it was started with none")
        return ", and ".join(known)
