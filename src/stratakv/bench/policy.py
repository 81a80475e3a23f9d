"""``stratakv bench policy``: the token hit rate of every eviction policy on a trace.

Owns what is replayed and the report. The production cache runs without a model and without bytes,
so an hour of traffic takes seconds to minutes. *Ideal* is the same policy where only the anchor's
pages are scarce: whatever the anchor holds could be continued.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, NamedTuple

from stratakv.bench import policy_branches
from stratakv.bench.countdown import Countdown
from stratakv.bench.policy_branches import BranchTraffic
from stratakv.bench.policy_cache import (
    PAGE_TOKENS,
    RULES,
    PoolSizes,
    build_cache,
    device_pages,
    forgo_checkpoints,
    spec_named,
)
from stratakv.bench.policy_replay import Replay, ReplayFigures, TraceTokens, unlimited_tokens
from stratakv.bench.policy_traffic import ChatTraffic, generate
from stratakv.core.choices import check_choice, check_count
from stratakv.core.config import flag_of
from stratakv.core.errors import ConfigError
from stratakv.sim.trace import TraceRequest, read_trace, write_trace
from stratakv.spec.budget import ExpectedLoad
from stratakv.tree.policies import EVICTION_POLICIES

ANCHOR_ALONE: Final = "full"
PLAIN: Final = "lru"
CHATS: Final = 400
MESSAGE_TOKENS: Final = 200
ANEW_PARTS: Final = 8
TIER_NAMES: Final = {False: "device", True: "device+host"}


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyOptions:
    """The flags of the command. One of ``trace``, ``branching`` generated sessions of readers and
    agents, or ``chats`` conversations (None: 400), in which a user sends ``message_tokens`` a turn
    on average (None: 200). Empty ``policies`` or ``specs``: all of them. ``device_tokens`` None: a
    part of what the trace says anew. ``chat_tokens`` None: the trace's mean request."""

    trace: str | None = None
    chats: int | None = None
    branching: int | None = None
    message_tokens: int | None = None
    seed: int = 0
    save_trace: str | None = None
    requests: int | None = None
    policies: tuple[str, ...] = ()
    specs: tuple[str, ...] = ()
    device_tokens: int | None = None
    chat_tokens: int | None = None
    max_running: int = 16
    chunk_tokens: int = 512

    def __post_init__(self) -> None:
        self._check_source()
        for name in (
            "message_tokens", "requests", "device_tokens", "chat_tokens", "max_running",
            "chunk_tokens",
        ):  # fmt: skip
            least = PAGE_TOKENS if name == "device_tokens" else 1
            check_count(flag_of(name), getattr(self, name), least)
        for flag, names, known in (
            ("--policies", self.policies, EVICTION_POLICIES),
            ("--specs", self.specs, RULES),
        ):
            for name in names:
                check_choice(flag, name, known)

    def _check_source(self) -> None:
        """ConfigError where what is generated or read is given twice, and one would be ignored."""
        beside = "TRACE" if self.trace is not None else "--branching"
        chats = (("--chats", self.chats), ("--message-tokens", self.message_tokens))
        if self.trace is not None:
            given = [("--branching", self.branching), *chats]
        else:
            given = [] if self.branching is None else list(chats)
        for flag, value in given:
            if value is not None:
                raise ConfigError(f"{flag} {value}: not with {beside}; allowed is one of them")


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyCase:
    """One replay. ``ratio`` is ``hit_rate`` to ``ideal_hit_rate``; pages are per group."""

    spec: str
    policy: str
    checkpoints: bool
    tiers: str
    device_pages: tuple[int, ...]
    hit_rate: float
    ideal_hit_rate: float
    ratio: float
    figures: ReplayFigures
    requests_s: float

    def report(self) -> dict[str, object]:
        """``figures`` among the others, but for what all replays have alike."""
        own = asdict(self)
        figures = own.pop("figures")
        del figures["prompt_tokens"]
        return own | figures


class _Row(NamedTuple):
    """What one replay is of."""

    spec: str
    policy: str
    host: bool
    checkpoints: bool = True

    @property
    def named(self) -> str:
        return self.policy if self.checkpoints else f"{self.policy}, no checkpoints"


class _Bench:
    def __init__(self, requests: Sequence[TraceRequest], options: PolicyOptions) -> None:
        self.requests = requests
        self.tokens = TraceTokens(requests)
        self.unlimited = unlimited_tokens(self.tokens, requests, PAGE_TOKENS)
        self.prompt_tokens = sum(one.input_length for one in requests)
        self.device_tokens = options.device_tokens or self._usual_size()
        self._options = options
        mean_tokens = sum(one.total_tokens for one in requests) // len(requests)
        self.load = ExpectedLoad(
            max_running=options.max_running,
            max_model_len=max(one.total_tokens for one in requests) + 1,
            chunk_tokens=options.chunk_tokens,
            chat_tokens=options.chat_tokens or max(1, mean_tokens),
        )
        self._ideals: dict[tuple[str, bool], float] = {}

    def _usual_size(self) -> int:
        """A part of each new prompt, so that most of it has to leave, in two digits; room for two
        of the longest requests, so that none is refused."""
        output_tokens = sum(one.output_length for one in self.requests)
        anew = self.prompt_tokens - self.unlimited + output_tokens
        longest = max(one.total_tokens for one in self.requests)
        size = max(anew // ANEW_PARTS, 2 * (longest + PAGE_TOKENS))
        digit = 10 ** max(0, len(str(size)) - 2)
        return -(-size // digit) * digit

    def case(self, row: _Row, progress: Countdown) -> PolicyCase:
        """The anchor's own replay of the same policy and tiers must have come first."""
        spec, policy, host, checkpoints = row
        progress.at(f"{row.named}, {spec}, {TIER_NAMES[host]}")
        figures, pages = self._replay(row, progress)
        ideal = self._ideals.setdefault((policy, host), figures.hit_rate)
        return PolicyCase(
            spec=spec,
            policy=policy,
            checkpoints=checkpoints,
            tiers=TIER_NAMES[host],
            device_pages=pages,
            hit_rate=figures.hit_rate,
            ideal_hit_rate=ideal,
            ratio=figures.hit_rate / ideal if ideal else 1.0,
            figures=figures,
            requests_s=len(self.requests) / figures.replay_s,
        )

    def _replay(self, row: _Row, progress: Countdown) -> tuple[ReplayFigures, tuple[int, ...]]:
        spec = spec_named(row.spec)
        sizes = PoolSizes(device_tokens=self.device_tokens, load=self.load, host=row.host)
        cache = build_cache(spec, sizes, row.policy)
        if not row.checkpoints:
            forgo_checkpoints(cache)
        replay = Replay(cache, self._options.chunk_tokens, progress.one_more)
        figures = replay.run(self.requests, self.tokens)
        return figures, device_pages(spec, sizes)


def run(options: PolicyOptions) -> dict[str, object]:
    """Replay, and print a table; how far it is, and how long it will take, goes to standard error.
    ConfigError where the trace cannot be read or a flag cannot be honoured, before anything is
    replayed.

    Its figures are what was replayed (``workload``, ``requests``, ``prompt_tokens``, the sizes, and
    ``unlimited_hit_rate``, that of a cache which never forgets) and ``cases``, a list of reports of
    a ``PolicyCase``. Rates are parts of all prompt tokens.
    """
    source, requests = _workload(options)
    bench = _Bench(requests, options)
    head: dict[str, object] = {
        "workload": source,
        "requests": len(requests),
        "prompt_tokens": bench.prompt_tokens,
        "page_tokens": PAGE_TOKENS,
        "device_tokens": bench.device_tokens,
        "chat_tokens": bench.load.chat_tokens,
        "max_running": options.max_running,
        "chunk_tokens": options.chunk_tokens,
        "unlimited_hit_rate": bench.unlimited / bench.prompt_tokens,
    }
    print("\n".join(f"{name.replace('_', ' '):20s} {value}" for name, value in head.items()))
    print(f"\n{HEADER}")
    return head | {"cases": [case.report() for case in cases_of(bench, options)]}


def _workload(options: PolicyOptions) -> tuple[str, list[TraceRequest]]:
    if options.trace is not None:
        path = Path(options.trace)
        name, requests = path.name, read_trace(path, "TRACE")
    elif options.branching is not None:
        branches = BranchTraffic(sessions=options.branching, seed=options.seed)
        name, requests = branches.name, policy_branches.generate(branches)
    else:
        traffic = ChatTraffic(
            chats=CHATS if options.chats is None else options.chats,
            seed=options.seed,
            message_tokens=options.message_tokens or MESSAGE_TOKENS,
        )
        name, requests = traffic.name, generate(traffic)
    requests = requests[: options.requests]
    if options.save_trace is not None:
        try:
            write_trace(Path(options.save_trace), requests)
        except OSError as error:
            raise ConfigError(f"--save-trace {options.save_trace}: {error.strerror}") from error
    return name, requests


def _rows(options: PolicyOptions) -> Iterator[_Row]:
    """In the order of the table: the anchor alone comes before what is compared with it."""
    specs = [name for name in RULES if name in options.specs or not options.specs]
    specs = [ANCHOR_ALONE, *(name for name in specs if name != ANCHOR_ALONE)]
    policies = [name for name in EVICTION_POLICIES if name in (options.policies or (name,))]
    for host in TIER_NAMES:
        for policy in policies:
            for spec in specs:
                yield _Row(spec, policy, host)
                if policy == PLAIN and spec != ANCHOR_ALONE and not host:
                    yield _Row(spec, policy, host, checkpoints=False)


def cases_of(bench: _Bench, options: PolicyOptions) -> list[PolicyCase]:
    rows = list(_rows(options))
    cases: list[PolicyCase] = []
    progress = Countdown(len(rows) * len(bench.requests), "requests")
    for row in rows:
        cases.append(bench.case(row, progress))
        progress.clear()
        _print_row(row, cases[-1])
    return cases


HEADER: Final = (
    "tiers        policy              spec         hit rate  ideal  ratio"
    "   evicted device / host  refused  requests/s"
)


def _print_row(row: _Row, case: PolicyCase) -> None:
    print(
        f"{case.tiers:12s} {row.named:19s} {case.spec:12s} {case.hit_rate:8.3f}"
        f"  {case.ideal_hit_rate:5.3f}  {case.ratio:5.3f}"
        f"   {case.figures.evicted_device_pages:>12,} /{case.figures.evicted_host_pages:>9,}"
        f"  {case.figures.refused_requests:7d}  {case.requests_s:10.0f}",
        flush=True,
    )
