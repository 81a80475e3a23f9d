"""From a command line to servers that run: one process, or one per rank.

Owns what a process of a server does as the rank it is, and its exit code. A launcher such as
torchrun may have started every rank; then none is started here (``followers``). Must not know what
ranks do.
"""

import logging
import signal
import socket
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

import torch
from transformers.utils.logging import (
    disable_default_handler,
    disable_progress_bar,
    enable_propagation,
)

from stratakv.agreement.torch_ranks import BACKENDS, TorchRanks, join
from stratakv.assembly.devices import device_of
from stratakv.assembly.models import EngineParts
from stratakv.assembly.rank_context import RankContext
from stratakv.assembly.roles import RoleParts
from stratakv.assembly.sizing import ranks_here
from stratakv.core.choices import BOOTSTRAP_PORT
from stratakv.core.config import EngineConfig, ServerConfig
from stratakv.core.errors import ConfigError, StorageError, StrataError
from stratakv.core.logs import announce
from stratakv.engine.huggingface.parallel import device_refusal
from stratakv.engine.ranks.ranked import RankedEngine
from stratakv.serve.connection_limits import connection_limits
from stratakv.serve.followers import Followers, RankPlace, ended_by_interrupt, hold_leash, launched
from stratakv.serve.server import serve_forever
from stratakv.serve.sockets import bound_socket
from stratakv.serve.wiring import build_follower, build_service, check_service
from stratakv.spec.budget_table import BudgetTable

log = logging.getLogger(__name__)

CLOSE_S: Final = 10.0


def serve_alone(path: Path, config: EngineConfig, server: ServerConfig) -> int:
    """Serve until a signal ends it; the exit code."""
    _one_log()
    launched(config.tp)  # refuses a launcher of several, which would each be a server of its own
    # A port that is taken shows now, not after a large model was loaded.
    bound_socket(server.host, server.port).close()
    limits = connection_limits(server)
    with ExitStack() as undo:
        joins, server = _join_socket(server, undo)
        service, parts = build_service(path, config, server)
        undo.callback(parts.transfer.close)
        _show(parts.table)
        return serve_forever(
            service,
            host=server.host,
            port=server.port,
            drain_s=server.drain_s,
            limits=limits,
            stopped=_ended(service.disagg),
            joins=joins,
        )


def _join_socket(
    server: ServerConfig, undo: ExitStack
) -> tuple[socket.socket | None, ServerConfig]:
    """Where servers that decode join one that computes prompts, and the server's settings with its
    port. ConfigError where it cannot be had."""
    if server.role != "prefill":
        return None, server
    port = BOOTSTRAP_PORT if server.bootstrap_port is None else server.bootstrap_port
    found = bound_socket(server.host, port, "--bootstrap-port")
    undo.callback(found.close)
    return found, replace(server, bootstrap_port=found.getsockname()[1])


def _one_log() -> None:
    """Lines of transformers, which has a handler of its own, have the form of all others."""
    disable_default_handler()
    enable_propagation()


def _nothing() -> None:
    pass


def share_threads(config: EngineConfig) -> None:
    """The ranks of one machine have its cores together."""
    torch.set_num_threads(max(1, torch.get_num_threads() // ranks_here(config)))


def serve_ranks(path: Path, config: EngineConfig, server: ServerConfig, line: Sequence[str]) -> int:
    """The same as one of ``--tp`` ranks. ``line``: the arguments with which the others are started
    on this machine, where no launcher has."""
    _one_log()
    place = launched(config.tp)
    if place is not None:
        hold_leash(place)
        return _serve(path, config, server, place)
    if reason := _refusal(path, config, server, leads=True):
        raise ConfigError(reason)
    with Followers(line, config.tp) as followers:
        code = _serve(path, config, server, followers.place)
        followers.ended(code)
        return code


def _refusal(path: Path, config: EngineConfig, server: ServerConfig, *, leads: bool) -> str:
    """Why this rank cannot start, as far as it shows before weights; empty where it can. ``leads``:
    clients talk to it."""
    try:
        device = device_of(config)
        if reason := device_refusal(config.tp, device.at):
            return f"--tp {config.tp}: {reason}"
        if leads:
            bound_socket(server.host, server.port).close()
            with ExitStack() as undo:
                _join_socket(server, undo)
            connection_limits(server)
        check_service(path, config, server, device)
    except ConfigError as error:
        return str(error)
    return ""


def _show(table: BudgetTable) -> None:
    announce(table.render(), "memory of the tiers", {"memory": table.figures()})


def _serve(path: Path, config: EngineConfig, server: ServerConfig, place: RankPlace) -> int:
    with ExitStack() as start:
        start.enter_context(ended_by_interrupt(place))

        def up() -> None:
            """All ranks have what they need, and answer signals in their own ways."""
            start.close()
            place.up.set()

        try:
            leads = place.rank == 0
            ranks = _met(place, config, _refusal(path, config, server, leads=leads))
            act = _lead if leads else _follow
            return act(path, config, server, ranks, up)
        except (ConfigError, StorageError):
            log.error("rank %d of %d cannot start", place.rank, place.size)
            raise
        except StrataError as error:
            log.error("%s", error)
            return 1


def _met(place: RankPlace, config: EngineConfig, refusal: str) -> TorchRanks:
    """The group of all ranks. ConfigError, on every rank, where one is refused: the others, on
    other machines perhaps, would wait long for it."""
    if refusal:
        log.error("rank %d of %d is refused: %s", place.rank, place.size, refusal)
    log.info("rank %d of %d waits for the others at %s", place.rank, place.size, place.address)
    ranks = join(
        place.rank,
        place.size,
        place.address,
        config.tp_timeout,
        place.listener,
        BACKENDS[config.device],
    )
    for rank, theirs in enumerate(ranks.gather(refusal)):
        if theirs:
            raise ConfigError(f"rank {rank}: {theirs}")
    return ranks


def _lead(
    path: Path,
    config: EngineConfig,
    server: ServerConfig,
    ranks: TorchRanks,
    up: Callable[[], None],
) -> int:
    with ExitStack() as undo:
        joins, server = _join_socket(server, undo)
        service, parts = build_service(path, config, server, RankContext.of(ranks))
        undo.callback(parts.transfer.close)
        # Loading takes long enough for somebody else to take the port; followers do not wait yet.
        bound_socket(server.host, server.port).close()
        log.info("rank 0 waits until all ranks have loaded")
        ranks.ready()
        up()
        _show(parts.table)
        stopped = _ended(service.disagg)
        return serve_forever(
            service,
            host=server.host,
            port=server.port,
            drain_s=server.drain_s,
            limits=connection_limits(server),
            stopped=partial(_ranked(parts).close, stopped=stopped),
            joins=joins,
        )


def _ended(disagg: RoleParts | None) -> Callable[[], None]:
    """What is to be done when the engine steps no more."""
    return _nothing if disagg is None else disagg.close


def _ranked(parts: EngineParts) -> RankedEngine:
    assert isinstance(parts.port, RankedEngine), "one of several ranks without the others"
    return parts.port


def _follow(
    path: Path,
    config: EngineConfig,
    server: ServerConfig,
    ranks: TorchRanks,
    up: Callable[[], None],
) -> int:
    """A follower that is up ends when rank 0 ends it, or is lost: a signal to the whole process
    group, as from a terminal, is rank 0's to answer."""
    disable_progress_bar()  # of its weights; rank 0 shows one
    parts, disagg = build_follower(path, config, server, RankContext.of(ranks))
    try:
        ranks.ready()
        up()
        for ignored in (signal.SIGINT, signal.SIGTERM):
            signal.signal(ignored, signal.SIG_IGN)
        _ranked(parts).follow(stopped=_ended(disagg))
    finally:
        parts.transfer.close()
    return 0
