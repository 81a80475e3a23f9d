"""Whose fault an error is. Owns every exception that this package raises on purpose.

    StrataError
    ├── ConfigError      the operator's: names the flag and what is allowed (also a ValueError)
    ├── RequestError     the client's: the request can never be served (also a ValueError)
    ├── StorageError     the environment's: the request falls back to recompute, a counter says why
    ├── TransportError   the environment's: a peer, or the way to it; its transfers fail
    ├── RankLostError    the environment's: a rank is gone, the others must stop
    └── DivergenceError  ours: ranks disagree, the process must stop

A failed ``assert`` is ours too. Pool exhaustion is a normal answer (``None``), never an exception.
"""


class StrataError(Exception):
    """Root of everything this package raises on purpose."""


class ConfigError(StrataError, ValueError):
    """A flag or a model cannot be honoured; raised before memory is taken."""


class RequestError(StrataError, ValueError):
    """A request that can never be served, however long it waits."""


class StorageError(StrataError):
    """A storage backend failed."""


class TransportError(StrataError):
    """A transport failed, or the peer at its other end."""


class RankLostError(StrataError):
    """A tensor-parallel rank has ended or does not answer."""


class DivergenceError(StrataError):
    """Two ranks that must agree do not."""
