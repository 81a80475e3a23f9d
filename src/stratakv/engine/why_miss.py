"""Why prompts were not cached further, by requests and by prompts that nobody has sent.

Owns the way from a prompt to its keys. Called on the engine's thread, between two steps.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from stratakv.cache.misses import MissLog, MissReport
from stratakv.core.ids import TokenIds
from stratakv.core.page_keys import PageHasher
from stratakv.engine.namespaces import Namespaces


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PromptQuery:
    """``adapter`` and ``salt``: as of a ``Prompt``."""

    tokens: TokenIds
    adapter: str
    salt: str


class WhyMiss(Protocol):
    """Who can be asked."""

    def of_request(self, name: str, /) -> Sequence[MissReport]:
        """By a name as clients know it; none where nothing is remembered of it."""
        ...

    def of_prompts(self, earlier: PromptQuery, later: PromptQuery, /) -> MissReport:
        """RequestError for an adapter that is not loaded."""
        ...


class EngineMisses:
    def __init__(self, misses: MissLog, namespaces: Namespaces, page_tokens: int) -> None:
        self._misses = misses
        self._namespaces = namespaces
        self._page = page_tokens

    def of_request(self, name: str, /) -> Sequence[MissReport]:
        return self._misses.of_request(name)

    def of_prompts(self, earlier: PromptQuery, later: PromptQuery, /) -> MissReport:
        return self._misses.of_prompts(self._hashed(earlier), self._hashed(later))

    def _hashed(self, asked: PromptQuery) -> PageHasher:
        prefix = PageHasher(self._namespaces.of(asked.adapter, asked.salt), self._page)
        prefix.extend(asked.tokens)
        return prefix


class NothingRemembered:
    """Of an engine without a cache."""

    def of_request(self, _name: str, /) -> Sequence[MissReport]:
        return ()

    def of_prompts(self, earlier: PromptQuery, later: PromptQuery, /) -> MissReport:
        raise AssertionError("there is no cache")
