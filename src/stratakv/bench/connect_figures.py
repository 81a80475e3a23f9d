"""What the lives of ``bench connect`` come to: figures of both tiers, and their ratios.

Owns the arithmetic and the table. Must not run anything.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Final, Literal, TypeAlias

from stratakv.bench.connect_lives import BenchTier, Calls, Lived

PROMPTS: Final = tuple(range(8))
PROMPT_TOKENS: Final = 1026
TIERS: Final[Sequence[BenchTier]] = ("strata", "own")
Deed: TypeAlias = Literal["store", "restart"]
DEEDS: Final[Sequence[Deed]] = ("store", "restart")


@dataclass(frozen=True, slots=True, kw_only=True)
class TierFigures:
    """Medians over rounds. ``hit_cpu_s``: of processors, for a restart hit. ``store_cpu_s``: from
    the first prompt to the last page. ``cached``: tokens of each prompt after a restart."""

    ttft_s: float
    hit_cpu_s: float
    store_tokens_s: float
    store_cpu_s: float
    bytes_per_token: float
    cached: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotaFigures:
    """A directory that may have half of what the prompts take; then, after a restart, the prompts
    again, the last first. ``disk_bytes``: at the end."""

    disk_bytes: int
    cached: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFigures:
    """The back ends alone, without an engine around them: a prompt's pages are stored, and read
    from the disk. Medians of ratios of seconds, and of seconds of processors: how many times as
    fast ours stores, and how much of the time of theirs it reads in."""

    store_ratio: float
    store_cpu_ratio: float
    read_ratio: float
    read_cpu_ratio: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectCase:
    """A ratio is ours to theirs: of the seconds to the first token of a restart hit (the median of
    all prompts of all rounds, ours and theirs of one prompt together), of the seconds of processors
    that it takes, of the tokens that are computed and stored in a second, of the seconds of
    processors that this takes, of the bytes that are written. ``hits_lost``: tokens that theirs has
    served after a restart, and ours has not. ``rounds`` were measured. None: not measured before it
    was interrupted; ``alone``: also where an engine's tier has threads of its own, and does not
    work without one."""

    engine: str
    model: str
    rounds: int
    ttft_ratio: float
    hit_cpu_ratio: float
    store_ratio: float
    store_cpu_ratio: float
    bytes_ratio: float
    hits_lost: int
    ours: TierFigures
    theirs: TierFigures
    quota_bytes: int
    ours_full: QuotaFigures | None
    theirs_full: QuotaFigures | None
    alone: CallFigures | None


@dataclass(slots=True, eq=False)
class Measured:
    """Of one model, as far as it has come: lives by tier, in rounds; the last round of one tier may
    lack the other's."""

    engine: str
    model: str
    lives: dict[Deed, dict[BenchTier, list[Lived]]] = field(
        default_factory=lambda: {
            "store": {"strata": [], "own": []},
            "restart": {"strata": [], "own": []},
        }
    )
    full: dict[BenchTier, QuotaFigures] = field(default_factory=dict[BenchTier, QuotaFigures])
    alone: CallFigures | None = None
    finished: bool = False

    def add_life(self, deed: Deed, tier: BenchTier, lived: Lived) -> None:
        self.lives[deed][tier].append(lived)

    def end(self, alone: CallFigures | None) -> None:
        """All lives have ended."""
        self.alone, self.finished = alone, True

    @property
    def rounds(self) -> int:
        """That are whole."""
        return min(len(lives) for tiers in self.lives.values() for lives in tiers.values())

    @property
    def quota_bytes(self) -> int:
        """Half of what all prompts take."""
        return self.lives["store"]["own"][0].written_bytes // 2

    def case(self) -> ConnectCase | None:
        """Of the rounds that are whole; None without one."""
        if not (rounds := self.rounds):
            return None
        stored, restarted = (
            {tier: lives[:rounds] for tier, lives in self.lives[deed].items()}
            for deed in ("store", "restart")
        )
        ours, theirs = restarted["strata"], restarted["own"]
        return ConnectCase(
            engine=self.engine,
            model=self.model,
            rounds=rounds,
            ttft_ratio=median(_ratios(_first_tokens(ours), _first_tokens(theirs))),
            hit_cpu_ratio=median(_ratios(map(_hit_cpu_s, ours), map(_hit_cpu_s, theirs))),
            store_ratio=median(_ratios(_written(stored["own"]), _written(stored["strata"]))),
            store_cpu_ratio=median(
                _ratios(map(_cpu_s, stored["strata"]), map(_cpu_s, stored["own"]))
            ),
            bytes_ratio=stored["strata"][0].written_bytes / stored["own"][0].written_bytes,
            hits_lost=sum(
                max(0, other - one)
                for mine, other_life in zip(ours, theirs, strict=True)
                for one, other in zip(mine.cached, other_life.cached, strict=True)
            ),
            ours=_figures(stored["strata"], ours),
            theirs=_figures(stored["own"], theirs),
            quota_bytes=self.quota_bytes,
            ours_full=self.full.get("strata"),
            theirs_full=self.full.get("own"),
            alone=self.alone,
        )


def call_figures(found: Mapping[BenchTier, Calls]) -> CallFigures:
    ours, theirs = found["strata"], found["own"]

    def ratio(
        one: Sequence[tuple[float, float]], other: Sequence[tuple[float, float]], at: int
    ) -> float:
        return median(a[at] / b[at] for a, b in zip(one, other, strict=True))

    return CallFigures(
        store_ratio=ratio(theirs.store, ours.store, 0),
        store_cpu_ratio=ratio(theirs.store, ours.store, 1),
        read_ratio=ratio(ours.read, theirs.read, 0),
        read_cpu_ratio=ratio(ours.read, theirs.read, 1),
    )


def life_line(deed: Deed, tier: BenchTier, lived: Lived) -> str:
    """As soon as it has ended: the table is there after all of them."""
    whose = "ours" if tier == "strata" else "theirs"
    tokens = len(lived.cached) * PROMPT_TOKENS
    match deed:
        case "store":
            return f"  {whose} stores {tokens / lived.written_s:,.0f} tokens a second"
        case "restart":
            first_s = median(lived.first_token_s)
            return f"  {whose} has the first token of a restart hit after {first_s * 1e3:,.1f} ms"


def _first_tokens(lives: Sequence[Lived]) -> Iterator[float]:
    return (taken_s for life in lives for taken_s in life.first_token_s)


def _hit_cpu_s(life: Lived) -> float:
    return life.answer_cpu_s / len(life.cached)


def _cpu_s(life: Lived) -> float:
    return life.cpu_s


def _written(lives: Sequence[Lived]) -> Iterator[float]:
    return (life.written_s for life in lives)


def _ratios(ours: Iterator[float], theirs: Iterator[float]) -> list[float]:
    return [one / other for one, other in zip(ours, theirs, strict=True)]


def _figures(stored: Sequence[Lived], restarted: Sequence[Lived]) -> TierFigures:
    tokens = len(PROMPTS) * PROMPT_TOKENS
    return TierFigures(
        ttft_s=median(_first_tokens(restarted)),
        hit_cpu_s=median(map(_hit_cpu_s, restarted)),
        store_tokens_s=tokens / median(_written(stored)),
        store_cpu_s=median(map(_cpu_s, stored)),
        bytes_per_token=stored[0].written_bytes / tokens,
        cached=tuple(restarted[0].cached),
    )


def table(case: ConnectCase) -> Iterator[str]:
    """Lines, for people."""
    ours, theirs = case.ours, case.theirs
    rows = [
        ("ms to the first token of a restart hit", ours.ttft_s * 1e3, theirs.ttft_s * 1e3,
         case.ttft_ratio),
        ("ms of processors for that", ours.hit_cpu_s * 1e3, theirs.hit_cpu_s * 1e3,
         case.hit_cpu_ratio),
        ("tokens a second while storing", ours.store_tokens_s, theirs.store_tokens_s,
         case.store_ratio),
        ("seconds of processors for that", ours.store_cpu_s, theirs.store_cpu_s,
         case.store_cpu_ratio),
        ("bytes written per prompt token", ours.bytes_per_token, theirs.bytes_per_token,
         case.bytes_ratio),
        ("cached tokens after a restart", sum(ours.cached), sum(theirs.cached), None),
    ]  # fmt: skip
    if case.ours_full is not None and case.theirs_full is not None:
        rows += [
            (f"MiB on disk where {case.quota_bytes >> 20} are allowed",
             case.ours_full.disk_bytes / 2**20, case.theirs_full.disk_bytes / 2**20, None),
            ("cached tokens after a restart then", sum(case.ours_full.cached),
             sum(case.theirs_full.cached), None),
        ]  # fmt: skip
    yield f"{case.engine}, {case.model} {'ours':>39s} {'theirs':>11s} {'ratio':>7s}"
    for text, one, other, ratio in rows:
        shown = "" if ratio is None else f"{ratio:7.2f}"
        yield f"  {text:40s} {one:11,.1f} {other:11,.1f} {shown}"
    yield f"  tokens that theirs serves and ours does not: {case.hits_lost}"
    if (alone := case.alone) is not None:
        yield (
            f"  back ends alone: ours stores {alone.store_ratio:.2f} times as fast (by processors "
            f"{alone.store_cpu_ratio:.2f}), reads in {alone.read_ratio:.2f} of the time (by "
            f"processors {alone.read_cpu_ratio:.2f})"
        )
