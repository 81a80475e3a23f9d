"""A file that holds a secret: read only where nobody else may have it.

Owns what such a file has to be. Must not know what the secret is for, nor show it.
"""

import os
import stat
from typing import Final

ALLOWED: Final = "of this user or root, that others cannot read and its group cannot write"
_TOO_OPEN: Final = stat.S_IRWXO | stat.S_IWGRP


def read_secret(path: str, most_bytes: int) -> bytes:
    """What the file holds, ``most_bytes`` + 2 of it at most. ValueError says why it is refused."""
    try:
        # A link may lead there, as where secrets are mounted; a pipe must not keep us waiting.
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "that is no path"
        raise ValueError(why) from None
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("it is no regular file")
        if status.st_mode & _TOO_OPEN or status.st_uid not in {0, os.geteuid()}:
            raise ValueError(f"others may have it, mode {stat.S_IMODE(status.st_mode):04o}")
        return os.read(fd, most_bytes + 2)
    finally:
        os.close(fd)
