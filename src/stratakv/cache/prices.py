"""What one more request would take, and whether there is room for it.

Owns the question as it is put to the budget. Asked before anything is pinned; must not pin, take or
evict.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from stratakv.cache.records import CacheUse
from stratakv.cache.sequence_states import SequenceStates
from stratakv.cache.spilling import Spilling
from stratakv.core.ids import RequestId
from stratakv.core.page_keys import PageHasher
from stratakv.policy.admission import Demand, demand
from stratakv.policy.load_back import LoadBackPolicy
from stratakv.tiers.tiered_cache import TieredCache


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionRequest:
    """What a request asks for: the tokens it knows, the most it may reach, its pages' keys.
    ``request``: under which storage was asked for its prefix, if it was.
    ``priority`` is that of its pages under eviction by priority; ``again``: it was admitted before
    and has counted as a use of its pages. ``use``: what it may do with the cache. ``receives``:
    what it lacks comes from another engine, as far as ``tokens``, so that it stands on nothing that
    is only needed before, and computes one token at a time. ``ahead``: requests that were
    retracted, wait for somebody else, and come first."""

    prefix: PageHasher
    tokens: int
    total_tokens: int
    request: RequestId | None = None
    priority: int = 0
    again: bool = False
    use: CacheUse = CacheUse.ALL
    receives: bool = False
    ahead: tuple["AdmissionRequest", ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionLimits:
    """``chunk_tokens``: the most tokens of one request in a step. ``reserve_tokens``: output that
    is booked at admission, beyond the prompt. ``steps_at_once``: how many steps may be launched and
    not yet committed; what a window needs no more is held until then."""

    chunk_tokens: int
    reserve_tokens: int
    load_back: LoadBackPolicy
    reuse: bool
    steps_at_once: int = 1

    @property
    def ahead_tokens(self) -> int:
        """The most tokens of one request that are computed and not committed."""
        return self.chunk_tokens * self.steps_at_once

    def ahead_of(self, left: int) -> int:
        """The same of a request that decodes when ``left`` tokens more have their KV."""
        return self.steps_at_once if left <= 1 else self.ahead_tokens

    def staged(self, left: int) -> int:
        """The same of one that is spilled, whose prompt may be nearly all on the host."""
        return min(self.ahead_of(left), max(self.steps_at_once, left))


class Prices:
    """``lacking``: the groups that had no room for what was asked last."""

    def __init__(
        self,
        tiers: TieredCache,
        sequences: SequenceStates,
        limits: AdmissionLimits,
        spilling: Spilling,
    ) -> None:
        self._spec = tiers.spec
        self._leases, self._spilled = tiers.tree.leases, tiers.tree.spilled
        self._pools = tiers.pools
        self._sequences = sequences
        self.limits = limits
        self.spilling = spilling
        self.lacking: list[int] = []

    def refusal(self, total_tokens: int, use: CacheUse) -> str | None:
        """None, or why a request of ``total_tokens`` could not run even alone."""
        chunk = self.limits.ahead_tokens
        wanted = demand(self._spec, total_tokens, total_tokens, chunk, 0)
        found = self._sequences.budget.refusal(self.spilling.rules.resident(wanted))
        if found is None or not self.spilling or use is not CacheUse.ALL:
            return found
        return self._sequences.budget.refusal(self.spilling.rules.spilled(wanted, chunk, {}))

    def ask(
        self, asked: AdmissionRequest, end: int, starts: Sequence[int], left: int, *, spill: bool
    ) -> tuple[Demand, list[int]] | None:
        """What to book, and pages by group that are on the host; None where the budget refuses.
        Asked before the lease: a request that waits must not warm its prefix at every step.
        ``left``: tokens that are to be computed here before it decodes."""
        rules = self.spilling.rules
        wanted = self._demand(asked, end, left)
        keys = asked.prefix.keys
        available, on_host = list[int](), list[int]()
        pinned_on_host = dict.fromkeys(rules.buffers, 0)
        for group in self._spec.groups:
            room = self._pools.available(group.id)
            if spill and group.at_home_on_host:
                far = self._spilled.price(keys, end, group.id)
                pinned_on_host[group.id] = far.to_pin_on_host
                # What was idle on both tiers is pinned on the host alone.
                available.append(room - far.to_pin)
                on_host.append(far.away)
            else:
                price = self._leases.price(keys, end, starts, group.id)
                available.append(room - price.to_pin - price.to_load)
                on_host.append(price.to_load)
        for group, pages in pinned_on_host.items():
            available.append(self.spilling.available(group) - pages)
        if spill:
            away = {group: on_host[group] for group in rules.buffers}
            wanted = rules.spilled(wanted, self.limits.staged(left), away)
        else:
            wanted = rules.resident(wanted)
        lacking = self._lacking(wanted, available, asked.ahead)
        if lacking:
            self.lacking[:] = lacking
            return None
        return wanted, on_host

    def _lacking(
        self, wanted: Demand, available: Sequence[int], ahead: Sequence[AdmissionRequest]
    ) -> list[int]:
        """The groups that have no room for it beside those ``ahead``. These may come in with all of
        their pages on the device or spilled: it is enough that there is room for one or the
        other, or somebody would be spilled, or wait, for pages that nobody is going to take."""
        rules, budget = self.spilling.rules, self._sequences.budget
        come = [(one.use, self._demand(one, 0, 0)) for one in ahead]
        resident = [rules.resident(of) for _, of in come]
        lacking = budget.lacks(wanted, available, resident)
        if not lacking or not come or not self.spilling:
            return lacking
        tokens = self.limits.staged(0)
        spilled = [
            rules.spilled(of, tokens, {}) if use is CacheUse.ALL else whole
            for (use, of), whole in zip(come, resident, strict=True)
        ]
        return budget.lacks(wanted, available, spilled)

    def _demand(self, asked: AdmissionRequest, end: int, left: int) -> Demand:
        total, limits = asked.total_tokens, self.limits
        booked = min(total, asked.tokens + limits.reserve_tokens)
        received = asked.tokens if asked.receives else 0
        return demand(self._spec, total, booked, limits.ahead_of(left), end, received)
