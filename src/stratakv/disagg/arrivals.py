"""What prefill says beside a prompt's pages, and whether that can be.

Owns the bounds: it comes from another machine, is counted in ``usage``, and picks tokens by their
ids. Must not know what becomes of a session whose arrival cannot be. Pure.
"""

from dataclasses import dataclass

from stratakv.disagg.messages import Arrival


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrivalBounds:
    """Of a prompt of ``tokens``; ``logprobs``: how many of the likeliest first tokens were asked
    for, None: no probability. ``vocab_size``: token ids are below it."""

    tokens: int
    logprobs: int | None
    vocab_size: int

    def refusal(self, arrival: Arrival) -> str:
        """Why ``arrival`` cannot be of it; "": it can."""
        first, cached = arrival.first, arrival.cached
        if min(cached.device, cached.host, cached.storage) < 0 or cached.total > self.tokens:
            return f"prefill had {cached} of a prompt of {self.tokens} tokens"
        top = () if first.logprob is None else first.logprob.top
        for token in (first.token, *(each for each, _ in top)):
            if not 0 <= token < self.vocab_size:
                return f"it names token {token}, and the model has {self.vocab_size}"
        if len(top) > (self.logprobs or 0):
            return f"it names {len(top)} likeliest tokens, and {self.logprobs} were asked for"
        return ""
