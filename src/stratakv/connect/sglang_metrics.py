"""What became of pages, among the metrics of SGLang's own ``/metrics``.

Owns their names and labels, and that they are made once in a process: a back end is detached and
attached again. prometheus_client is SGLang's: it is imported where SGLang wants metrics, and then
in the mode that SGLang has chosen for its processes.
"""

from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Final

from stratakv.connect.page_counts import EVENTS, PageEvent

if TYPE_CHECKING:
    from prometheus_client import Counter, Gauge

PAGES: Final = "stratakv:kv_pages"
OFF: Final = "stratakv:store_off"
RANKS: Final = ("tp_rank", "pp_rank", "dp_rank")


class PageMetrics:
    """Of one rank's back end, from SGLang's scheduler alone."""

    def __init__(self, ranks: tuple[int, int, int]) -> None:
        self._ranks = dict(zip(RANKS, map(str, ranks), strict=True))
        self._pages, self._off = _made()

    def add(self, pool: str, events: Mapping[PageEvent, int]) -> None:
        """What became of pages since the last call."""
        for event, pages in events.items():
            self._pages.labels(pool=pool, event=event, **self._ranks).inc(pages)

    def set_off(self, *, off: bool) -> None:
        """Whether the store of some pool is left alone."""
        self._off.labels(**self._ranks).set(int(off))


@cache
def _made() -> tuple["Counter", "Gauge"]:
    from prometheus_client import Counter, Gauge  # noqa: PLC0415 - see above

    events = "; ".join(f"{name}: {text}" for name, text in EVENTS.items())
    return (
        Counter(PAGES, f"Pages of StrataKV's back end. {events}.", ("pool", "event", *RANKS)),
        Gauge(
            OFF,
            "1 while the store is left alone because it has failed or hangs.",
            RANKS,
            multiprocess_mode="mostrecent",
        ),
    )
