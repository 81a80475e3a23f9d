"""How many requests fit, with every entry on the device and with selected entries on the host. Owns
the arithmetic of the advice at start; must not allocate, nor decide who is spilled.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadPages:
    """Pages that there are. ``kept_pages``: on the device, of what stays there whatever happens, as
    index keys do; ``selected_pages``: on the device, of what may be on the host instead;
    ``host_pages``: there, of the same. ``buffer_pages``: of a spilled request, on the device, with
    those that it writes."""

    page_tokens: int
    kept_pages: int
    selected_pages: int
    host_pages: int
    buffer_pages: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadCapacity:
    """Requests of ``tokens`` each that fit at a time. ``resident``: with every entry on the device.
    As many lose nothing by offloading, which pays above that; ``offloaded`` is how far, and
    ``bound`` what is short then."""

    tokens: int
    resident: int
    offloaded: int
    bound: str

    @property
    def pays(self) -> bool:
        return self.offloaded > self.resident


def offload_capacity(pages: OffloadPages, tokens: int) -> OffloadCapacity:
    assert tokens >= 1, f"requests of {tokens} tokens"
    each = -(-tokens // pages.page_tokens)
    bounds = {
        "pages that stay on the device": pages.kept_pages // each,
        "buffers on the device": pages.selected_pages // min(each, pages.buffer_pages),
        "host memory": pages.host_pages // each,
    }
    bound = min(bounds, key=bounds.__getitem__)
    resident = min(pages.kept_pages, pages.selected_pages) // each
    return OffloadCapacity(
        tokens=tokens, resident=resident, offloaded=max(resident, bounds[bound]), bound=bound
    )


def advice(pages: OffloadPages, lengths: Sequence[int]) -> list[str]:
    """A line for each length: what fits, from which concurrency on offloading pays, and what to
    enlarge."""
    lines: list[str] = []
    for tokens in lengths:
        fits = offload_capacity(pages, tokens)
        line = f"{tokens:,} tokens each: {fits.resident:,} requests with all on the device"
        if fits.pays:
            line += (
                f", {fits.offloaded:,} with offload, which pays above {fits.resident:,} at a time"
            )
        else:
            line += ", and no more with offload"
        lines.append(f"{line}; what is short is {fits.bound}")
    return lines
