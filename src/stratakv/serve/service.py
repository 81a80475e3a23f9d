"""What a server is made of. Owns the record; ``wiring`` builds one, ``serve`` reads it."""

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TypeAlias

from stratakv.assembly.roles import RoleParts
from stratakv.core.clock import Clock
from stratakv.core.errors import ConfigError
from stratakv.core.ids import GroupId
from stratakv.disagg.joining import JoinAnswer
from stratakv.disagg.transport import PeerId
from stratakv.engine.grammars import Grammars
from stratakv.engine.why_miss import NothingRemembered, WhyMiss
from stratakv.serve.admin import StorageAdmin
from stratakv.serve.bodies import BodyMemory
from stratakv.serve.driver import EngineDriver
from stratakv.serve.errors import ApiError
from stratakv.serve.hand_off import HandOffOptions
from stratakv.serve.lanes import Lanes
from stratakv.serve.metrics import ServerMetrics
from stratakv.serve.tls import TlsFiles
from stratakv.serve.tokenizer import Tokenizer
from stratakv.serve.tool_parsers import ToolFormat
from stratakv.serve.tracing import NoSpans, SpanExporter

Joins: TypeAlias = Callable[[PeerId, Sequence[bytes]], Future[JoinAnswer]]


class DetachedTasks:
    """What goes on after its client was answered; an event loop keeps no task alive itself."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def run(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """``max_model_len``: tokens of prompt and answer together. ``vocab``: token ids the model
    knows. ``body_bytes``: of one request. ``default_max_tokens``: of a chat answer without
    ``max_tokens``: pages are booked up to a request's last token, so a generous default would let
    few run at once."""

    max_model_len: int
    vocab: int
    body_bytes: int = 8 << 20
    default_max_tokens: int = 1024

    def __post_init__(self) -> None:
        if self.max_model_len < 2:
            raise ConfigError(f"--max-model-len {self.max_model_len}: allowed is 2 and more")


@dataclass(frozen=True, slots=True, kw_only=True)
class WebOptions:
    """``origins``: whose web pages may ask; ``tls`` None: plain HTTP."""

    origins: tuple[str, ...] = ()
    tls: TlsFiles | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Service:
    """``version``: of this package. ``model``: the name clients use; ``adapters``: names that they
    may use in its place. ``grammars``: forms that answers may have to have, and
    ``grammar_stops``: what ends such an answer. ``groups``: names of
    those that a prompt can hit. ``stop_tokens``: end an answer unless ``ignore_eos``. ``info``:
    what ``/server_info`` shows (JSON values). ``api_keys``: any of which ``Authorization: Bearer``
    must hold, by the client's name, none: anyone may ask; ``admin_key``: the same for what changes
    the server, None: nobody may. ``lanes``: where long texts and bodies are worked on; ``bodies``:
    how many there may be at once. ``disagg``: of a server that only computes prompts, or only
    decodes; ``joins``: of the first, how others join it, on the engine's thread; ``hand_offs``:
    what it does with requests that name a session. ``web``: how browsers and others reach it;
    ``tool_format``: in which form the model writes calls of tools, None: in none that is known.
    ``spans``: where those of requests go. ``misses``: why prompts were computed."""

    driver: EngineDriver
    storage: StorageAdmin
    tokenizer: Tokenizer
    grammars: Grammars
    metrics: ServerMetrics
    clock: Clock
    version: str
    model: str
    limits: Limits
    groups: Mapping[GroupId, str]
    stop_tokens: tuple[int, ...]
    grammar_stops: tuple[int, ...]
    info: Mapping[str, object]
    api_keys: Mapping[str, str] = field(default_factory=dict[str, str])
    admin_key: str | None = None
    adapters: tuple[str, ...] = ()
    lanes: Lanes = field(default_factory=Lanes)
    bodies: BodyMemory = field(default_factory=BodyMemory)
    web: WebOptions = field(default_factory=WebOptions)
    disagg: RoleParts | None = None
    joins: Joins | None = None
    hand_offs: HandOffOptions = field(default_factory=HandOffOptions)
    detached: DetachedTasks = field(default_factory=DetachedTasks)
    tool_format: ToolFormat | None = None
    spans: SpanExporter = field(default_factory=NoSpans)
    misses: WhyMiss = field(default_factory=NothingRemembered)

    def named(self, name: str | None) -> tuple[str, str]:
        """What a client calls a model: its name, and the adapter that it stands for, "" for the
        model itself. An adapter has a name of its own beside the model's, as in vLLM."""
        if name is None or name == self.model:
            return self.model, ""
        if name in self.adapters:
            return name, name
        known = ", ".join(f"'{one}'" for one in (self.model, *self.adapters))
        message = f"the model '{name}' does not exist; this server has {known}"
        raise ApiError(message, status=404, param="model", code="model_not_found")
