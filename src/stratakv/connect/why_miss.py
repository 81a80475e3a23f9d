"""Why a prompt has to be computed: which page of which group is missing, or which setting has
another name than where its pages lie.

Owns the arithmetic and its words. Reads which pages a store has, and nothing else of it; must not
know an engine's classes.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import lcm
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from stratakv.connect.namespace import EngineNamespace
from stratakv.connect.namespace_records import NamespaceRecord, StoredPart
from stratakv.core.ids import GroupId
from stratakv.storage.backend import ObjectKey, StorageBackend, StoreFormat


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedPrompt:
    """``cache_salt`` and ``extra_key``: as its request had them, which keep prompts apart."""

    tokens: Sequence[int]
    cache_salt: str | None = None
    extra_key: str | None = None

    @property
    def shared(self) -> "AskedPrompt":
        """The same tokens, of a request that anybody could have sent."""
        return AskedPrompt(tokens=self.tokens)


BlockHashes: TypeAlias = Callable[[AskedPrompt, int, str], Sequence[bytes]]
"""An engine's own, of a prompt, by how many tokens a hash is of and what hashes them."""
OpenPart: TypeAlias = Callable[[StoreFormat], StorageBackend]
SHOWN: Final = 60
"""Characters of a setting."""


@dataclass(frozen=True, slots=True, eq=False)
class PartPages:
    """Which pages of a prompt a part has, bool [n]."""

    part: StoredPart
    present: npt.NDArray[np.bool_]

    def missing(self, end: int) -> list[int]:
        """Pages that going on at ``end`` needs, and that are not there."""
        stop = end // self.part.page_tokens
        first = 0 if self.part.trailing is None else max(0, stop - self.part.trailing)
        return [first + int(at) for at in np.flatnonzero(~self.present[first:stop])]


@dataclass(frozen=True, slots=True, eq=False)
class PromptPages:
    """What a namespace has of a prompt. ``ends``: where one could go on, in tokens."""

    record: NamespaceRecord
    parts: Sequence[PartPages]
    ends: Sequence[int]

    @property
    def end(self) -> int:
        """The longest prefix that every part can go on from."""
        usable = [end for end in self.ends if not any(part.missing(end) for part in self.parts)]
        return max(usable, default=0)

    @property
    def nearest(self) -> int | None:
        """Beyond that, where fewest pages are missing, the longest of such: the first end beyond
        may need pages of a window that nobody would keep."""
        beyond = [end for end in self.ends if end > self.end]
        return min(beyond, key=lambda end: (self._missing(end), -end), default=None)

    def _missing(self, end: int) -> int:
        return sum(len(part.missing(end)) for part in self.parts)


def look_up(
    record: NamespaceRecord, prompt: AskedPrompt, hashes: BlockHashes, opening: OpenPart
) -> PromptPages:
    """StorageError where the store cannot be asked."""
    blocks = hashes(prompt, record.hash_tokens, record.hash_name)
    parts: list[PartPages] = []
    for part in record.parts:
        digest = bytes.fromhex(part.digest)
        store = opening(StoreFormat(spec_digest=digest[:16], page_bytes=part.page_bytes))
        try:
            namespace, each = EngineNamespace(digest), part.page_tokens // record.hash_tokens
            names = [
                ObjectKey(namespace.page_key(block), GroupId(part.group), part.shard)
                for block in blocks[each - 1 :: each]
            ]
            parts.append(PartPages(part, store.contains(names)))
        finally:
            store.close()
    step = lcm(*(part.page_tokens for part in record.parts))
    # The last token is computed always: its logits are what is asked for.
    return PromptPages(record, parts, range(step, len(prompt.tokens), step))


def lines_of(found: Sequence[PromptPages], tokens: int, shared: PromptPages) -> list[str]:
    """For people. ``found``: the namespace of the last start first. ``shared``: what that has of
    the same tokens without salt or key."""
    now = found[0]
    lines = [_line(now, "the last start")]
    if shared.end > now.end:
        lines.append(
            f"  without its salt and key {shared.end} tokens could be reused, stored by requests "
            "that have none"
        )
    following = now.nearest
    if following is None:
        return [*lines, f"  that is all of {tokens} tokens that could be reused"]
    for part in now.parts:
        if missing := part.missing(following):
            at, width = missing[0], part.part.page_tokens
            lines.append(
                f"  stopped by page {at} of {part.part.name} (tokens {at * width} to "
                f"{(at + 1) * width - 1}), which the store has not"
            )
    longer = [other for other in found[1:] if other.end > now.end]
    for other in longer:
        lines.append(_line(other, "another start"))
        lines += [f"  differs in {text}" for text in differences(other.record, now.record)]
    if not longer:
        lines.append("  no other start of this machine has more of it")
    return lines


def differences(other: NamespaceRecord, now: NamespaceRecord) -> list[str]:
    """Settings that are hashed into names, and are not the same."""
    names = sorted(other.fields.keys() | now.fields.keys())
    return [
        f"{name}: {_shown(other.fields, now.fields, name)}"
        for name in names
        if other.fields.get(name) != now.fields.get(name)
    ]


def _shown(other: Mapping[str, str], now: Mapping[str, str], name: str) -> str:
    """Both values from where they part."""
    texts = [one.get(name, "") for one in (other, now)]
    pairs = zip(*texts, strict=False)
    same = next((at for at, (one, two) in enumerate(pairs) if one != two), min(map(len, texts)))
    begin = max(0, same - SHOWN // 3) if max(map(len, texts)) > SHOWN else 0
    there, here = (text[begin : begin + SHOWN] for text in texts)
    return f"{there!r} there, {here!r} now"


def _line(pages: PromptPages, start: str) -> str:
    record = pages.record
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.started_s))
    return f"namespace {record.name} ({start}, {when}): {pages.end} tokens could be reused"
