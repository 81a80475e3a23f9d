"""All that is decided of an engine before memory is taken, as one frozen record.

Owns the way from settings to an engine's rules. ``build`` makes the engine; who has no settings, as
a fleet, writes the record down. Must not take memory or read weights.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from stratakv.assembly.sizing import Pages, Sizes
from stratakv.cache.prices import AdmissionLimits
from stratakv.core.config import EngineConfig
from stratakv.core.page_keys import Namespace
from stratakv.engine.namespaces import Namespaces
from stratakv.engine.request import LARGEST
from stratakv.engine.scheduler import StepLimits
from stratakv.policy.load_back import LoadBackPolicy
from stratakv.policy.prefetch_pace import (
    BestEffort,
    PrefetchPolicy,
    StopPolicy,
    Timeout,
    WaitComplete,
    prefetch_policy,
)
from stratakv.policy.write import WriteBack, WritePolicy, WriteThrough, WriteThroughSelective
from stratakv.spec.groups import ANCHOR, CacheSpec

LONGEST_WAIT_S: Final = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePlan:
    """The same on every rank. ``model``: its fingerprint, and ``adapters``: digests by name, which
    with the digest of the whole cache name pages. ``eviction``: a key of ``EVICTION_POLICIES``.
    ``prefetch`` None: the usual thresholds. ``vocab_size``: of the model, where there is one.
    ``page_ages``: measure how old pages grow."""

    sizes: Sizes
    model: bytes
    max_running: int
    admission: AdmissionLimits
    step: StepLimits
    adapters: Mapping[str, bytes] = field(default_factory=dict[str, bytes])
    snapshot_pages: int = 4
    eviction: str = "lru"
    write: WritePolicy = field(default_factory=WriteThrough)
    prefetch: PrefetchPolicy | None = None
    vocab_size: int = LARGEST
    page_ages: bool = False

    @classmethod
    def of(
        cls,
        config: EngineConfig,
        sizes: Sizes,
        model: bytes,
        adapters: Mapping[str, bytes] | None = None,
        steps_at_once: int = 1,
    ) -> "EnginePlan":
        """By an operator's settings, for a device that runs ``steps_at_once``."""
        return cls(
            sizes=sizes,
            model=model,
            adapters=adapters or {},
            max_running=config.max_running,
            admission=AdmissionLimits(
                chunk_tokens=config.chunk_tokens,
                steps_at_once=steps_at_once,
                reserve_tokens=config.reserve_tokens,
                load_back=LoadBackPolicy(
                    threshold_tokens=config.load_back_threshold,
                    budget_tokens=config.load_back_budget,
                ),
                reuse=config.cache != "off",
            ),
            step=StepLimits(step_tokens=config.step_tokens, chunk_tokens=config.chunk_tokens),
            snapshot_pages=config.snapshot_pages(sizes.spec.page_tokens),
            eviction=config.eviction,
            write=_write_policy(config),
            prefetch=prefetch_policy_of(config, sizes.spec, sizes.host),
            page_ages=config.kv_cache_metrics,
        )

    @property
    def spec(self) -> CacheSpec:
        """What this rank keeps of every page."""
        return self.sizes.spec

    @property
    def device(self) -> Pages:
        return self.sizes.device

    @property
    def host(self) -> Pages:
        return self.sizes.host

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt and output together."""
        return self.sizes.max_model_len

    @property
    def namespaces(self) -> Namespaces:
        """Pages are named by the cache of all ranks together."""
        whole = self.sizes.sharding.whole.digest
        return Namespaces(Namespace(model=self.model, spec_digest=whole), self.adapters)


def _write_policy(config: EngineConfig) -> WritePolicy:
    match config.write_policy:
        case "write-through-selective":
            return WriteThroughSelective(config.write_hits)
        case "write-back":
            return WriteBack(config.write_back_reserve)
        case _:
            return WriteThrough()


def prefetch_policy_of(
    config: EngineConfig, spec: CacheSpec, host_pages: Sequence[int]
) -> PrefetchPolicy:
    """What the ``--prefetch-*`` flags set; ``host_pages`` by group."""
    usual = prefetch_policy(
        spec.page_tokens, host_pages[ANCHOR], _stop_policy(config), config.prefetch_share
    )
    if config.prefetch_threshold is None:
        return usual
    return replace(usual, threshold_tokens=config.prefetch_threshold)


def _stop_policy(config: EngineConfig) -> StopPolicy:
    match config.prefetch_policy:
        case "best-effort":
            return BestEffort()
        case "wait-complete":
            return WaitComplete()
        case _:
            return Timeout(
                base_s=config.prefetch_timeout,
                per_1k_tokens_s=config.prefetch_timeout_per_1k,
                most_s=max(LONGEST_WAIT_S, config.prefetch_timeout),
            )
