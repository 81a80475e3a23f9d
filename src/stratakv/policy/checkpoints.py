"""At which ends of a prompt a checkpoint is worth keeping. Owns the arithmetic; pure."""


def last_end(tokens: int, page_tokens: int) -> int:
    """The deepest end, in pages, that the same ``tokens`` sent again can hit.

    One token is always computed, so it is ``floorP(n - 1)``: with ``floorP(n)`` a prompt of exactly
    k pages would never hit its own checkpoint.
    """
    return max(0, tokens - 1) // page_tokens


def checkpoint_ends(
    prompt_tokens: int, usable_end: int, anchor_end: int, page_tokens: int
) -> tuple[int, ...]:
    """Ends, in pages and ascending, to keep while a prompt is computed from ``usable_end`` on: the
    branching point, where the anchor matched further than another group could follow, and the
    prompt's own last end."""
    last = last_end(prompt_tokens, page_tokens)
    ends = {last, min(anchor_end, last)}
    return tuple(sorted(end for end in ends if end > usable_end))
