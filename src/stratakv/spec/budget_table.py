"""The byte budget as a person reads it. Owns the table that a server prints at start and a plan
prints without one; its figures are those of the pools, byte for byte. Must not decide anything."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import assert_never

from stratakv.core.units import format_bytes
from stratakv.spec.groups import BufferSpec, CacheGroup, CacheSpec
from stratakv.spec.retention import (
    KeepAll,
    KeepBoundary,
    KeepChunk,
    KeepLive,
    KeepWindow,
    Retention,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferRow:
    """One sidecar. Layers and row shape as in its ``BufferSpec``; bytes of one row of one layer, of
    one page of all layers, and of all pages of a tier, without padding."""

    name: str
    layers: int
    rows_per_page: int
    row_shape: tuple[int, ...]
    dtype: str
    row_bytes: int
    page_bytes: int
    token_bytes: float | None
    device_bytes: int
    host_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRow:
    """One group. ``padding_bytes`` is what alignment adds to each host page; ``token_bytes`` what a
    token takes as long as its page is kept, None where a page is a state."""

    name: str
    rule: str
    buffers: tuple[BufferRow, ...]
    page_bytes: int
    padding_bytes: int
    token_bytes: float | None
    device_pages: int
    host_pages: int

    @property
    def device_bytes(self) -> int:
        return self.device_pages * self.page_bytes

    @property
    def host_bytes(self) -> int:
        return self.host_pages * (self.page_bytes + self.padding_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetTable:
    """Where every byte of the device and host tiers goes."""

    page_tokens: int
    groups: tuple[GroupRow, ...]

    @classmethod
    def of(cls, spec: CacheSpec, device: Sequence[int], host: Sequence[int]) -> "BudgetTable":
        """device, host: pages of every group on each tier."""
        counts = zip(spec.groups, device, host, strict=True)
        return cls(
            page_tokens=spec.page_tokens,
            groups=tuple(_group_row(g, d, h, spec.page_tokens) for g, d, h in counts),
        )

    @property
    def device_bytes(self) -> int:
        return sum(group.device_bytes for group in self.groups)

    @property
    def host_bytes(self) -> int:
        return sum(group.host_bytes for group in self.groups)

    @property
    def token_bytes(self) -> float:
        """What one more token of a long prompt adds for good: bytes of the anchor group."""
        return self.groups[0].page_bytes / self.page_tokens

    def figures(self) -> Mapping[str, object]:
        """All of it as plain data, the sums included."""
        groups = [
            asdict(group) | {"device_bytes": group.device_bytes, "host_bytes": group.host_bytes}
            for group in self.groups
        ]
        return {
            "page_tokens": self.page_tokens,
            "token_bytes": self.token_bytes,
            "groups": groups,
            "device_bytes": self.device_bytes,
            "host_bytes": self.host_bytes,
        }

    def render(self) -> str:
        """One line per group, its buffers below it, and the totals of both tiers. ``token``,
        ``page`` and ``padding`` are in bytes; padding is in no buffer, and in its group's host
        bytes."""
        header = ("group", "keeps", "token", "page", "padding", "device", "", "host", "")
        lines: list[tuple[str, ...]] = [header]
        for group in self.groups:
            lines.append(_group_cells(group))
            lines += [_buffer_cells(buffer) for buffer in group.buffers]
        device, host = format_bytes(self.device_bytes), format_bytes(self.host_bytes)
        lines.append(("total", "", "", "", "", "", device, "", host))
        widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
        left = {0, 1}
        body = [
            "  ".join(
                cell.ljust(width) if column in left else cell.rjust(width)
                for column, (cell, width) in enumerate(zip(line, widths, strict=True))
            ).rstrip()
            for line in lines
        ]
        kept = _figure(self.token_bytes)
        title = f"pages of {self.page_tokens} tokens, {kept} bytes per token kept"
        return "\n".join([title, *body])


def _group_row(group: CacheGroup, device: int, host: int, page_tokens: int) -> GroupRow:
    tokens = None if group.stateful else page_tokens
    return GroupRow(
        name=group.name,
        rule=_rule_text(group.retention),
        buffers=tuple(_buffer_row(buffer, device, host, tokens) for buffer in group.buffers),
        page_bytes=group.page_bytes,
        padding_bytes=group.host_stride_bytes - group.page_bytes,
        token_bytes=None if tokens is None else group.page_bytes / tokens,
        device_pages=device,
        host_pages=host,
    )


def _buffer_row(buffer: BufferSpec, device: int, host: int, tokens: int | None) -> BufferRow:
    """``tokens`` of a page; None where it is a state."""
    return BufferRow(
        name=buffer.name,
        layers=len(buffer.layers),
        rows_per_page=buffer.rows_per_page,
        row_shape=buffer.row_shape,
        dtype=buffer.dtype,
        row_bytes=buffer.row_bytes,
        page_bytes=buffer.page_bytes,
        token_bytes=None if tokens is None else buffer.page_bytes / tokens,
        device_bytes=device * buffer.page_bytes,
        host_bytes=host * buffer.page_bytes,
    )


def _rule_text(rule: Retention) -> str:
    match rule:
        case KeepAll():
            return "every token"
        case KeepWindow(tokens):
            return f"last {tokens} tokens"
        case KeepChunk(tokens):
            return f"chunk of {tokens} tokens"
        case KeepBoundary():
            return "snapshots"
        case KeepLive():
            return "running requests"
        case _:
            assert_never(rule)


def _group_cells(group: GroupRow) -> tuple[str, ...]:
    return (
        group.name,
        group.rule if group.buffers else f"{group.rule} (no bytes)",
        _figure(group.token_bytes),
        f"{group.page_bytes}",
        f"{group.padding_bytes}",
        f"{group.device_pages} pages",
        format_bytes(group.device_bytes),
        f"{group.host_pages} pages",
        format_bytes(group.host_bytes),
    )


def _buffer_cells(buffer: BufferRow) -> tuple[str, ...]:
    shape = " x ".join(str(size) for size in buffer.row_shape)
    layers = "1 layer" if buffer.layers == 1 else f"{buffer.layers} layers"
    what = f"{layers}, {buffer.rows_per_page} x [{shape}] {buffer.dtype}"
    sizes = (_figure(buffer.token_bytes), f"{buffer.page_bytes}", "")
    tiers = ("", format_bytes(buffer.device_bytes), "", format_bytes(buffer.host_bytes))
    return (f"  {buffer.name}", what, *sizes, *tiers)


def _figure(number: float | None) -> str:
    """Exact, where two decimals can be."""
    if number is None:
        return "-"
    return f"{number:.0f}" if number == int(number) else f"{number:.2f}"
