"""The split of the device where a length was asked for: the longest request has to fit.

Owns how far the split between groups follows that length, and which other length or budget would
do. Pure arithmetic on integers, as ``budget``, whose split it is.
"""

from dataclasses import replace

from stratakv.spec.budget import ExpectedLoad, device_bytes, least_pages, pages_beside
from stratakv.spec.groups import CacheSpec


def load_for_length(spec: CacheSpec, budget_bytes: int, load: ExpectedLoad) -> ExpectedLoad | None:
    """``load``, but split for longer conversations where a request of ``max_model_len`` does not
    fit otherwise: as little longer as does, and no longer than that request. None: it does not fit
    then either."""

    def fits(chat_tokens: int) -> bool:
        return _bytes(spec, replace(load, chat_tokens=chat_tokens)) <= budget_bytes

    too_short, fitting = load.chat_tokens, max(load.chat_tokens, load.max_model_len)
    if fits(too_short):
        return load
    if not fits(fitting):
        return None
    while fitting - too_short > 1:
        middle = (too_short + fitting) // 2
        if fits(middle):
            fitting = middle
        else:
            too_short = middle
    return replace(load, chat_tokens=fitting)


def longest_fitting(spec: CacheSpec, budget_bytes: int, load: ExpectedLoad) -> int:
    """Tokens of the longest request for which there is a split, up to ``max_model_len``; or 0."""
    fitting, too_long = 0, load.max_model_len + 1
    while too_long - fitting > 1:
        middle = (fitting + too_long) // 2
        if load_for_length(spec, budget_bytes, replace(load, max_model_len=middle)) is not None:
            fitting = middle
        else:
            too_long = middle
    return fitting


def bytes_for_length(spec: CacheSpec, load: ExpectedLoad) -> int:
    """A budget for which there is a split with a request of ``max_model_len``."""
    return _bytes(spec, replace(load, chat_tokens=max(load.chat_tokens, load.max_model_len)))


def _bytes(spec: CacheSpec, load: ExpectedLoad) -> int:
    """What all groups take where the anchor holds the longest request."""
    pages = max(-(-load.max_model_len // spec.page_tokens), least_pages(spec, load))
    return device_bytes(spec, pages_beside(spec, pages, load))
