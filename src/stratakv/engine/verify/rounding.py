"""How much rounding alone moves a model's logits, and what counts as equal beside it.

Owns the yardstick, two batch shapes without a cache, and a comparison that follows two outputs as
far as they have the same context. Must not know tiers or ways.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from stratakv.cache.records import CacheUse
from stratakv.core.clock import Clock
from stratakv.core.errors import ConfigError
from stratakv.core.ids import TokenIds
from stratakv.engine.verify.claims import Settings, StartSubject, compare
from stratakv.engine.verify.session import Scribe, VerifyOutput, VerifySession

LEAST_BOUND: Final = 1e-5
"""Of two logits that are equal, in parts of the largest: what most types keep to in float32."""
MARGIN: Final = 4
"""How often what two batch shapes differ by fits the bound: a hit is one more shape, which may be
less lucky than the few that were measured."""


def bound_beside(rounding: float) -> float:
    """What a hit may differ by where two batch shapes differ by ``rounding``."""
    return max(LEAST_BOUND, MARGIN * rounding)


def compare_rounded(
    expected: VerifyOutput, got: VerifyOutput, bound: float
) -> tuple[int | None, float]:
    """``compare``, but for a near-tie: where logits are equal within ``bound`` and another token is
    the larger one, the outputs go on from other contexts, and no more of them is compared."""
    if got.failure is not None:
        return compare(expected, got, bound)
    pairs = enumerate(zip(expected.tokens, got.tokens, strict=True), 1)
    end = next((at for at, (one, other) in pairs if one != other), len(got.tokens))
    begun = replace(expected, tokens=got.tokens[:end], logits=expected.logits[:end])
    return compare(begun, replace(got, tokens=got.tokens[:end], logits=got.logits[:end]), bound)


def measure_rounding(
    start: StartSubject, prompts: Sequence[TokenIds], settings: Settings, clock: Clock
) -> float:
    """By how much logits differ without a cache, in parts of the largest: each prompt alone, all at
    once, and alone in chunks of another size. ConfigError where the model fails without a cache."""
    alone = _uncached(start, prompts, settings, clock, None)
    found = [_uncached(start, prompts, settings, clock, None, together=True)]
    longest = max(map(len, prompts))
    if sizes := [size for size in settings.cuts if 2 < size < longest]:
        found.append(_uncached(start, prompts, settings, clock, sizes[0]))
    errors = [
        compare_rounded(one, other, float("inf"))[1]
        for others in found
        for one, other in zip(alone, others, strict=True)
    ]
    return max(errors)


def _uncached(
    start: StartSubject,
    prompts: Sequence[TokenIds],
    settings: Settings,
    clock: Clock,
    chunk_tokens: int | None,
    *,
    together: bool = False,
) -> list[VerifyOutput]:
    scribe = Scribe()
    session = VerifySession(start(scribe, chunk_tokens), scribe, clock)
    count, salt = settings.output_tokens, settings.salt
    try:
        names = []
        for tokens in prompts:
            names.append(session.submit(tokens, count, salt, CacheUse.NOTHING))
            if not together:
                session.drain()
        session.drain()
        replies = [session.reply(name) for name in names]
    finally:
        session.subject.close()
    for reply in replies:
        if reply.failure is not None:
            raise ConfigError(
                f"MODEL: it fails without a cache: {reply.failure.value}; allowed is one that "
                "does not, perhaps with --dtype float32"
            )
    return replies
