"""What it is worth that an engine which decodes takes pages by group: how many requests a pool
admits, beside an engine that takes pages for the whole prompt in every group.

Owns the comparison. Pure: both are the decisions of ``admission``.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from stratakv.policy.admission import Demand, PageBudget, demand
from stratakv.spec.groups import CacheSpec
from stratakv.spec.retention import KeepAll


@dataclass(frozen=True, slots=True, kw_only=True)
class Admitted:
    """How many requests of ``prompt`` tokens a pool admits at once, by group, and where every
    group of tokens takes pages for all of them."""

    prompt: int
    per_group: int
    whole_prompt: int


def admitted(
    spec: CacheSpec, pages: Sequence[int], prompts: Sequence[int], reserve_tokens: int
) -> list[Admitted]:
    """For each length of ``prompts``, with ``reserve_tokens`` of output booked beside it. pages:
    those of each group on the device. Nothing is cached, so nobody stands on another one's."""
    whole = whole_prompts(spec)
    return [
        Admitted(
            prompt=tokens,
            per_group=_admits(spec, pages, _decoding(spec, tokens + reserve_tokens)),
            whole_prompt=_admits(whole, pages, _decoding(whole, tokens + reserve_tokens)),
        )
        for tokens in prompts
    ]


def whole_prompts(spec: CacheSpec) -> CacheSpec:
    """The same cache where no group of tokens lets a page go."""
    groups = [
        group if group.stateful else replace(group, retention=KeepAll()) for group in spec.groups
    ]
    return replace(spec, groups=tuple(groups))


def _decoding(spec: CacheSpec, tokens: int) -> Demand:
    return demand(spec, tokens, tokens, 1, 0)


def _admits(spec: CacheSpec, pages: Sequence[int], wanted: Demand) -> int:
    budget, count = PageBudget(spec, pages), 0
    while budget.fits(wanted, pages):
        budget.book(wanted)
        count += 1
    return count
