"""JSON schemas, regular expressions and grammars to masks of tokens, by llguidance.

Owns compiled grammars and where each row stands in its own. Must not know how a body spells a
grammar (``structured_outputs``).
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from threading import Lock
from typing import Final

import numpy as np
import numpy.typing as npt
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer

from stratakv.core.ids import RowIds, TokenIds
from stratakv.engine.grammars import Grammar

KEPT: Final = 64
KEPT_CHARS: Final = 1 << 20
"""Of compiled grammars, of whose texts together. One of a common size is some hundred kilobytes;
one of 3,000 properties is 11 MiB, and has 130,000 characters."""
LIMITS: Final = LLParserLimits(
    max_items_in_row=8192, step_lexer_fuel=50_000, max_lexer_states=30_000
)
"""All requests wait for a mask: with the library's own limits ``a{1000000}`` takes one a second.
``max_items_in_row``: a choice among ``structured_outputs.MAX_CHOICES`` has to fit."""


class GuidedGrammars:
    """``Grammars``. ``tokenizer``: made when the first request wants it, which takes a second with
    a large vocabulary."""

    def __init__(self, tokenizer: Callable[[], LLTokenizer]) -> None:
        self._make = tokenizer
        self._lock = Lock()
        self._tokenizer: LLTokenizer | None = None
        self._compiled: OrderedDict[Grammar, LLMatcher] = OrderedDict()
        self._chars = 0
        self._executor = LLExecutor()
        self._rows: dict[int, LLMatcher] = {}

    def refusal(self, grammar: Grammar) -> str | None:
        try:
            found = self._start_of(grammar)
        except ValueError as error:
            return str(error)
        return found.get_error().split("<state>")[0].strip() if found.is_error() else None

    def begin(self, row: int, grammar: Grammar, output: TokenIds) -> None:
        matcher = self._start_of(grammar).deep_copy()
        matcher.consume_tokens(output.tolist())
        self._rows[row] = matcher

    def append(self, rows: RowIds, tokens: TokenIds) -> None:
        pairs = zip(rows.tolist(), tokens.tolist(), strict=True)
        # A token below 0 is none: the request ends. What no grammar takes ends its matcher.
        moves = [(self._rows[row], token) for row, token in pairs if token >= 0]
        if moves:
            self._executor.consume_token_par(moves)

    def masks(self, rows: RowIds) -> npt.NDArray[np.int32]:
        assert self._tokenizer is not None, "masks are asked for before a grammar has begun"
        words = np.zeros((len(rows), -(-self._tokenizer.vocab_size // 32)), np.int32)
        places = [(self._rows[row], at) for at, row in enumerate(rows.tolist())]
        self._executor.unsafe_compute_mask_ptr(
            places, words.ctypes.data, words.strides[0], len(words)
        )
        # One that has met a limit would let the answer end, as if it had its form: without any
        # token the request fails.
        words[[at for matcher, at in places if matcher.is_error()]] = 0
        return words

    def _start_of(self, grammar: Grammar) -> LLMatcher:
        """Nobody moves it on: each row has a copy."""
        with self._lock:
            found = self._compiled.get(grammar)
            if found is not None:
                self._compiled.move_to_end(grammar)
                return found
            if self._tokenizer is None:
                self._tokenizer = self._make()
            tokenizer = self._tokenizer
        found = LLMatcher(tokenizer, grammar.text, log_level=0, limits=LIMITS)
        if not found.is_error():
            found.compute_bitmask()  # no engine waits here; and one that fails is refused
        with self._lock:
            if grammar not in self._compiled:
                self._compiled[grammar] = found
                self._chars += len(grammar.text)
            while len(self._compiled) > KEPT or self._chars > KEPT_CHARS:
                oldest, _ = self._compiled.popitem(last=False)
                self._chars -= len(oldest.text)
        return found


def grammar_tokenizer(serialized: str, vocab: int, stop_tokens: Sequence[int]) -> LLTokenizer:
    """``serialized``: a tokenizer.json; ``vocab``: tokens that the model has logits of. ValueError
    for one that llguidance cannot use, or where no token ends a text."""
    ends = [token for token in stop_tokens if token < vocab]
    return LLTokenizer(serialized, n_vocab=vocab, eos_token=ends)


def guided_grammars(serialized: str, vocab: int, stop_tokens: Sequence[int]) -> GuidedGrammars:
    """Over one model's tokenizer; as in ``grammar_tokenizer``."""
    return GuidedGrammars(partial(grammar_tokenizer, serialized, vocab, stop_tokens))
