"""The server's composition: an engine from ``assembly``, and what a server has around it.

Owns the order of a server's start (refuse what can be refused, reach the store, load the weights,
take memory), and the checks of ``--kv-events`` that need more than its text.
"""

import logging
import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from dataclasses import asdict, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from stratakv.agreement.ranks import SingleRank
from stratakv.assembly.build import Sockets
from stratakv.assembly.device import Device
from stratakv.assembly.devices import device_of
from stratakv.assembly.models import EngineParts, build_sized, check_model
from stratakv.assembly.rank_context import RankContext, heartbeat_s, sharing_of
from stratakv.assembly.roles import (
    HEARTBEAT_S,
    RoleParts,
    check_role,
    lane_shares,
    role_parts,
)
from stratakv.assembly.sizing import Sizes, size, spec_for
from stratakv.assembly.stores import (
    check_storage,
    check_url,
    operators_store,
    reach_at_start,
    trust_while_it_runs,
)
from stratakv.assembly.weights import weights_bytes
from stratakv.core.choices import BOOTSTRAP_PORT
from stratakv.core.clock import MonotonicClock, WallClock
from stratakv.core.config import EngineConfig, ServerConfig
from stratakv.core.errors import ConfigError, RequestError
from stratakv.core.model_identity import ModelIdentity
from stratakv.core.server_checks import check_together
from stratakv.engine.grammars import RankZeroGrammars
from stratakv.engine.huggingface.adapters import check_directories
from stratakv.engine.huggingface.model import HuggingFaceModel, load_model, with_adapters
from stratakv.engine.huggingface.model_facts import read_facts
from stratakv.engine.huggingface.page_selection import PageSelectingRunner
from stratakv.engine.request import Prompt
from stratakv.serve.admin import OPEN_S, StorageAdmin
from stratakv.serve.api_keys import api_keys, join_key
from stratakv.serve.driver import EngineDriver
from stratakv.serve.engine_protocols import PublisherPort
from stratakv.serve.grammars import guided_grammars
from stratakv.serve.hand_off import (
    DecodeRules,
    HandOffOptions,
    HandOffRules,
    PrefillRules,
    UnifiedRules,
)
from stratakv.serve.load_progress import load_progress
from stratakv.serve.metrics import ServerMetrics
from stratakv.serve.prefill_hosts import PrefillHosts
from stratakv.serve.service import Joins, Limits, Service, WebOptions
from stratakv.serve.start_checks import check_names
from stratakv.serve.tls import tls_files
from stratakv.serve.tokenizer import Tokenizer
from stratakv.serve.tool_parsers import format_of
from stratakv.serve.tracing import open_spans
from stratakv.spec.groups import ANCHOR, Home
from stratakv.storage.opening import OpenStore
from stratakv.storage.urls import hidden

log = logging.getLogger(__name__)


def build_service(
    path: Path, config: EngineConfig, server: ServerConfig, ranks: RankContext | None = None
) -> tuple[Service, EngineParts]:
    """A server over the model directory ``path``; nothing runs yet. ``ranks``: rank 0's."""
    sizes = check_service(path, config, server, device := device_of(config))
    keys, started, ranks = api_keys(server), ranks, _with_peers(server, ranks)
    disagg = role_parts(server, _vocab_size(path, config), ranks, join_key(keys))
    if ranks is not None:
        sizes = ranks.all_reduce_min(sizes)  # before anything is made as long as they are
    tokenizer = Tokenizer(path)
    groups = {group.id: group.name for group in sizes.spec.groups if not group.scratch}
    metrics = ServerMetrics(groups, server.served_model_name or path.resolve().name)
    now = MonotonicClock()
    with ExitStack() as undo:
        spans = undo.enter_context(closing(open_spans(server, now, WallClock())))
        publisher = open_publisher(server, metrics.lost_kv_events)
        if publisher is not None:
            undo.callback(publisher.close)
        model, sizes, store = _load(path, config, sizes, started, device)
        if store is not None:
            undo.callback(store.worker.close, 0)
        model = with_adapters(model, config.adapters())
        digests = model.adapters.digests
        observer = None if publisher is None else publisher.observe(sizes.spec, digests)
        ends = model.eos_ids or tokenizer.eos
        grammars = guided_grammars(tokenizer.serialized, model.vocab_size, ends)
        sockets = Sockets(ranks=ranks, observer=observer, grammars=grammars)
        parts = build_sized(model, config, sizes, _for_role(sockets, disagg), device)
        _open(parts, disagg, store)
        _watch_recall(metrics, parts)
        if disagg is not None:
            disagg.serve_again(partial(_submit_again, parts))
        undo.pop_all()
    driver = _driver(parts, server, publisher, _heartbeat_s(config, ranks, disagg))
    service = Service(
        driver=driver,
        storage=_storage_admin(parts, config, driver, store),
        tokenizer=tokenizer,
        grammars=grammars,
        metrics=metrics,
        clock=now,
        version=version("stratakv"),
        model=metrics.model,
        limits=_limits(parts, server),
        groups=groups,
        stop_tokens=parts.model.eos_ids,
        grammar_stops=ends,
        info=_info(config, server, parts),
        api_keys=keys,
        web=WebOptions(origins=server.allowed_origins, tls=tls_files(server)),
        admin_key=server.admin_key,
        adapters=tuple(parts.model.adapters.digests),
        disagg=disagg,
        joins=_joins(server, disagg),
        hand_offs=_hand_offs(server, keys),
        tool_format=format_of(server.tool_call_parser, tokenizer.template),
        spans=spans,
        misses=parts.engine.misses,
    )
    return service, parts


def _watch_recall(metrics: ServerMetrics, parts: EngineParts) -> None:
    if isinstance(parts.runner, PageSelectingRunner):
        metrics.watch(parts.runner.recall)


def _driver(
    parts: EngineParts,
    server: ServerConfig,
    publisher: PublisherPort | None,
    heartbeat_s: float | None,
) -> EngineDriver:
    return EngineDriver(
        parts.port,
        max_waiting=server.max_waiting,
        clock=MonotonicClock(),
        publisher=publisher,
        heartbeat_s=heartbeat_s,
    )


def _with_peers(server: ServerConfig, ranks: RankContext | None) -> RankContext | None:
    """One rank whose peers have several agrees, by itself, on what all of those have."""
    alone = ranks is None and (server.peer_tp or 1) > 1
    return RankContext.of(SingleRank()) if alone else ranks


def _limits(parts: EngineParts, server: ServerConfig) -> Limits:
    return Limits(
        max_model_len=parts.max_model_len,
        vocab=parts.model.vocab_size,
        default_max_tokens=server.default_max_tokens,
    )


def _open(parts: EngineParts, disagg: RoleParts | None, store: OpenStore | None) -> None:
    """To peers and to the store, whatever of both there is."""
    if disagg is not None:
        model, sizes = parts.model, parts.plan.sizes
        disagg.open(sizes, parts.pools, parts.arenas, model.fingerprint, model.facts.config)
    if store is not None:
        parts.engine.attach_storage(store.worker)


def _submit_again(parts: EngineParts, prompt: Prompt) -> None:
    """What another server sends back; RequestError where this one could not serve it."""
    last = parts.model.vocab_size - 1
    tokens = (*prompt.tokens.tolist(), *(token for token, _ in prompt.sampling.logit_bias))
    if max(tokens, default=0) > last:
        raise RequestError(f"the prompt, or logit_bias, holds a token beyond {last}")
    parts.port.submit(prompt)


def _for_role(sockets: Sockets, disagg: RoleParts | None) -> Sockets:
    """Of a server that does both, they stay what they are."""
    if disagg is None:
        return sockets
    return replace(sockets, role=disagg.given, sleep=disagg.sleep)


def _joins(server: ServerConfig, disagg: RoleParts | None) -> Joins | None:
    if disagg is None or server.role != "prefill":
        return None
    return disagg.join


def _heartbeat_s(
    config: EngineConfig, ranks: RankContext | None, disagg: RoleParts | None
) -> float | None:
    """How often an engine is stepped that has nothing to do."""
    if disagg is not None:
        return HEARTBEAT_S
    return None if ranks is None else heartbeat_s(config)


def _hand_offs(server: ServerConfig, keys: Mapping[str, str]) -> HandOffOptions:
    rules: HandOffRules = UnifiedRules()
    if server.role == "prefill":
        port = BOOTSTRAP_PORT if server.bootstrap_port is None else server.bootstrap_port
        rules = PrefillRules(server.reached_at, port)
    elif server.role == "decode":
        rules = DecodeRules(PrefillHosts.of(server, keys))
    return HandOffOptions(rules=rules, unsalted_rooms=server.unsalted_rooms == "share")


def check_service(
    path: Path, config: EngineConfig, server: ServerConfig, device: Device[Any]
) -> Sizes:
    """ConfigError for what can be refused before weights that may take minutes to load."""
    check_role(server)
    check_together(config, server)
    check_names(path, config, server)
    facts = read_facts(path, config.dtype)
    check_model(facts, config)
    check_directories(config.adapters())
    weights, home = weights_bytes(path, facts.dtype), selected_home(server)
    sizes = size(facts, config, device_free=device.free(), weights=weights, home=home)
    check_storage(config, sizes.host)
    if server.peer_tp is not None:
        receives = server.role == "decode"
        lanes = server.peer_tp // config.tp
        lane_shares(sizes.sharding, facts.config, lanes, 0, receives=receives)
    return sizes


def selected_home(server: ServerConfig) -> Home:
    """Of rows that are selected, with --sparse-offload. Who computes prompts for others leaves none
    on the host while they are written from its device, but has pages cut as theirs are."""
    return Home.DEVICE if server.role == "prefill" else Home.HOST


def build_follower(
    path: Path, config: EngineConfig, server: ServerConfig, ranks: RankContext
) -> tuple[EngineParts, RoleParts | None]:
    """What a rank has that no client talks to; nothing runs yet."""
    device = device_of(config)
    sizes = check_service(path, config, server, device)
    disagg = role_parts(server, _vocab_size(path, config), ranks)
    sizes = ranks.all_reduce_min(sizes)
    with ExitStack() as undo:
        model, sizes, store = _load(path, config, sizes, ranks, device)
        if store is not None:
            undo.callback(store.worker.close, 0)
        sockets = Sockets(ranks=ranks, grammars=RankZeroGrammars())
        parts = build_sized(model, config, sizes, _for_role(sockets, disagg), device)
        _open(parts, disagg, store)
        undo.pop_all()
    return parts, disagg


def _vocab_size(path: Path, config: EngineConfig) -> int:
    return read_facts(path, config.dtype).vocab_size


def _load(
    path: Path,
    config: EngineConfig,
    sizes: Sizes,
    ranks: RankContext | None,
    device: Device[Any],
) -> tuple[HuggingFaceModel, Sizes, OpenStore | None]:
    """The model, what it has turned out to need, and the store of ``--storage``: reached before
    weights that may take minutes to load, and asked for nothing until it is known whose pages to
    look for."""
    sharing = sharing_of(sizes, config, 0 if ranks is None else ranks.ranks.rank)
    with ExitStack() as undo:
        peers = None if ranks is None else ranks.ranks
        identity = undo.enter_context(ModelIdentity(path, peers))
        reached = reach_at_start(config, sizes.spec, sizes.host, sharing)
        if reached is not None:
            undo.callback(reached.close)
        log.info("loading the model in %s", path)
        weights = weights_bytes(path, read_facts(path, config.dtype).dtype)
        with load_progress(weights // config.tp):
            model = load_model(path, config.dtype, device.at, ranks=config.tp, identity=identity)
        if spec_for(model.facts, config).digest != sizes.sharding.whole.digest:
            if reached is not None or ranks is not None:
                raise ConfigError(
                    f"--dtype {config.dtype}: config.json names none, and the weights are "
                    f"{model.dtype}; allowed with --storage and --tp is --dtype {model.dtype}"
                )
            home = Home.HOST if sizes.spec.has_home_on_host else Home.DEVICE
            sizes = size(model.facts, config, device_free=device.free(), home=home)
        undo.pop_all()
    if reached is None:
        return model, sizes, None
    with operators_store(reached.url):
        return model, sizes, reached.open(replace(sharing, model=model.fingerprint))


def _storage_admin(
    parts: EngineParts, config: EngineConfig, driver: EngineDriver, store: OpenStore | None
) -> StorageAdmin:
    open_s = math.inf if config.tp == 1 else OPEN_S
    check = _check(parts, config)
    return StorageAdmin(driver, parts.port, MonotonicClock(), check, store, open_s)


def _check(parts: EngineParts, config: EngineConfig) -> Callable[[str], None] | str:
    """ConfigError for a URL that cannot be attached while the server runs, or why none can."""
    host_pages = parts.plan.host
    if config.cache != "host" or not host_pages[ANCHOR]:
        return "there is no host tier between storage and the device; --cache host has"
    trust = trust_while_it_runs(config)
    return partial(check_url, ranks=config.tp, host_pages=host_pages, trust=trust)


def _info(config: EngineConfig, server: ServerConfig, parts: EngineParts) -> Mapping[str, object]:
    """What ``/server_info`` shows."""
    keys = {"api_key": server.api_key is not None, "admin_key": server.admin_key is not None}
    shown = asdict(server) | keys
    return {
        "engine": asdict(config)
        | {
            "storage": None if config.storage is None else hidden(config.storage),
            "page_tokens": parts.spec.page_tokens,
            "max_model_len": parts.max_model_len,
            "lora": {name: digest.hex() for name, digest in parts.model.adapters.digests.items()},
        },
        "server": shown,
        "threads": torch.get_num_threads(),
        "spec": {
            "page_tokens": parts.spec.page_tokens,
            "digest": parts.spec.digest.hex(),
            "groups": [
                {
                    "name": group.name,
                    "retention": repr(group.retention),
                    "page_bytes": group.page_bytes,
                    "buffers": [buffer.name for buffer in group.buffers],
                }
                for group in parts.spec.groups
            ],
        },
        "pages": {
            f"{pool.tier}.{pool.group}": pool.total for pool in parts.cache.tiers.pools.stats()
        },
    }


if TYPE_CHECKING:
    from stratakv.serve.kv_events import KvEventPublisher


def open_publisher(
    server: ServerConfig, on_dropped: Callable[[], None]
) -> "KvEventPublisher | None":
    """None where no events are wanted. ConfigError where an endpoint cannot be had, or its
    library is missing."""
    if server.kv_events is None:
        return None
    try:
        from stratakv.serve.kv_events import (  # noqa: PLC0415 - only who publishes needs ZeroMQ
            KvEventPublisher,
            KvEventsOptions,
        )
    except ImportError as error:
        raise ConfigError(
            f"--kv-events {server.kv_events}: {error.name or 'its library'} cannot be imported; "
            "allowed after: pip install 'stratakv[events]'"
        ) from error
    options = KvEventsOptions(
        endpoint=server.kv_events,
        replay=server.kv_events_replay,
        topic=server.kv_events_topic or "",
    )
    return KvEventPublisher(options, WallClock(), on_dropped)
