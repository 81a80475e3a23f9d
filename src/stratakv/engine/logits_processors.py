"""What requests want changed in the logits before a token is chosen: penalties, biases, tokens that
may not come yet.

Owns the columns of running requests and the record of those that one step samples. Torch-free;
``processed_logits`` has the arithmetic. Nothing here remembers what was generated: it is read from
the tokens of the row, so a request that was retracted or handed over goes on as it was.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from stratakv.core.ids import NONE, RowIds, TokenIds
from stratakv.engine.request import SamplingParams

Int32s = npt.NDArray[np.int32]
Float32s = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LogitsProcessors:
    """Of E of the sampled rows; the others' logits stay as they are.

    at: index of each among the sampled rows, increasing, int64 [E]. tokens: prompt and output,
    int32 [E, n]; behind ``lengths`` (int32 [E]) stands a token of the row's own. prompts: how many
    of them are the prompt, int32 [E]. repetition, frequency, presence: float32 [E]. bias_tokens:
    int32 [E, b], NONE where a row has no more, with bias_values: float32 [E, b]. barred: tokens
    that may not come yet, int32 [E, s], NONE where a row has no more.
    """

    at: npt.NDArray[np.intp]
    tokens: TokenIds
    lengths: Int32s
    prompts: Int32s
    repetition: Float32s
    frequency: Float32s
    presence: Float32s
    bias_tokens: TokenIds
    bias_values: Float32s
    barred: TokenIds

    def only(self, rows: npt.NDArray[np.intp]) -> "LogitsProcessors | None":
        """Of some of the sampled rows, in increasing order; None if none of them is here."""
        places = np.searchsorted(rows, self.at)
        kept = np.flatnonzero(np.isin(self.at, rows))
        if not len(kept):
            return None
        return LogitsProcessors(
            at=places[kept],
            tokens=self.tokens[kept],
            lengths=self.lengths[kept],
            prompts=self.prompts[kept],
            repetition=self.repetition[kept],
            frequency=self.frequency[kept],
            presence=self.presence[kept],
            bias_tokens=self.bias_tokens[kept],
            bias_values=self.bias_values[kept],
            barred=self.barred[kept],
        )


class ProcessorColumns:
    """What each of ``rows`` block-table rows wants; most want nothing, which costs nothing."""

    def __init__(self, rows: int) -> None:
        self.used = np.zeros(rows, np.bool_)
        """Rows of which the tokens so far have to be known before the next one is chosen."""
        self._prompt = np.zeros(rows, np.int32)
        self._repetition = np.ones(rows, np.float32)
        self._frequency = np.zeros(rows, np.float32)
        self._presence = np.zeros(rows, np.float32)
        self._min_tokens = np.zeros(rows, np.int32)
        self._bias_tokens = np.full((rows, 0), NONE, np.int32)
        self._bias_values = np.zeros((rows, 0), np.float32)

    def open(self, row: int, prompt_tokens: int, sampling: SamplingParams) -> None:
        """``row`` belongs to a request whose prompt has ``prompt_tokens``."""
        self.used[row] = sampling.changes_logits
        if not sampling.changes_logits:
            return
        self._prompt[row] = prompt_tokens
        self._repetition[row] = sampling.repetition_penalty
        self._frequency[row] = sampling.frequency_penalty
        self._presence[row] = sampling.presence_penalty
        self._min_tokens[row] = sampling.min_tokens
        count = len(sampling.logit_bias)
        lacking = count - self._bias_tokens.shape[1]
        if lacking > 0:
            self._bias_tokens = np.pad(
                self._bias_tokens, ((0, 0), (0, lacking)), constant_values=NONE
            )
            self._bias_values = np.pad(self._bias_values, ((0, 0), (0, lacking)))
        self._bias_tokens[row] = NONE
        self._bias_tokens[row, :count] = [token for token, _ in sampling.logit_bias]
        self._bias_values[row, :count] = [value for _, value in sampling.logit_bias]

    def of(
        self, rows: RowIds, tokens: TokenIds, lengths: Int32s, stops: TokenIds
    ) -> LogitsProcessors | None:
        """Of the sampled ``rows`` [S]; None if none of them wants anything. ``tokens``: [all rows,
        most tokens], of which ``lengths`` [all rows] are known; ``stops``: [all rows, s]."""
        at = np.flatnonzero(self.used[rows])
        if not len(at):
            return None
        some = rows[at]
        known, prompts = lengths[some], self._prompt[some]
        seen = tokens[some, : int(known.max())]
        early = known - prompts < self._min_tokens[some]
        return LogitsProcessors(
            at=at,
            tokens=np.where(np.arange(seen.shape[1]) < known[:, None], seen, seen[:, :1]),
            lengths=known,
            prompts=prompts,
            repetition=self._repetition[some],
            frequency=self._frequency[some],
            presence=self._presence[some],
            bias_tokens=self._bias_tokens[some],
            bias_values=self._bias_values[some],
            barred=np.where(early[:, None], stops[some], np.int32(NONE)),
        )
