"""State of the running requests, a column per field, so that a decode step is array work.

Owns tokens, lengths and sampling parameters by block-table row. Torch-free; must not decide what
runs (``scheduler``).
"""

import numpy as np
import numpy.typing as npt

from stratakv.core.ids import NONE, RowIds, TokenIds
from stratakv.engine.batch import Int32s, SamplingBatch
from stratakv.engine.grammars import GrammarRows, Grammars
from stratakv.engine.logits_processors import ProcessorColumns
from stratakv.engine.request import Request


class Rows:
    """Columns of ``rows`` requests of at most ``max_model_len`` tokens each. ``grammars``: of the
    requests whose answers have to have a form."""

    def __init__(self, rows: int, max_model_len: int, grammars: Grammars) -> None:
        self.tokens = np.zeros((rows, max_model_len), np.int32)
        self.length = np.zeros(rows, np.int32)  # tokens known: prompt and output
        self.computed = np.zeros(rows, np.int32)  # tokens whose KV is in the pages
        # Ahead of what is known by the steps that were launched and not yet collected: tokens that
        # will have their KV, tokens that will be chosen, and how many steps these are.
        self.launched = np.zeros(rows, np.int32)
        self.pending = np.zeros(rows, np.int32)
        self.in_flight = np.zeros(rows, np.int32)
        self.limit = np.zeros(rows, np.int32)
        self._stop = np.full((rows, 1), NONE, np.int32)
        self._temperature = np.zeros(rows, np.float32)
        self._top_p = np.ones(rows, np.float32)
        self._top_k = np.zeros(rows, np.int32)
        self._min_p = np.zeros(rows, np.float32)
        self._seed = np.zeros(rows, np.uint64)
        self._logprobs = np.full(rows, NONE, np.int32)
        self._adapter = np.full(rows, NONE, np.int32)
        self._processors = ProcessorColumns(rows)
        self._grammars = GrammarRows(rows, grammars)

    def open(self, request: Request, computed: int) -> None:
        """Begin with a request whose first ``computed`` tokens are cached."""
        row, sampling = request.row, request.prompt.sampling
        self.tokens[row, : len(request.known)] = request.known
        self.length[row] = len(request.known)
        self.computed[row] = self.launched[row] = computed
        self.limit[row] = request.total_tokens
        stops = sampling.stop_tokens
        if len(stops) > self._stop.shape[1]:
            wider = np.full((len(self._stop), len(stops)), NONE, np.int32)
            wider[:, : self._stop.shape[1]] = self._stop
            self._stop = wider
        self._stop[row] = NONE
        self._stop[row, : len(stops)] = stops
        self._temperature[row] = sampling.temperature
        self._top_p[row] = sampling.top_p
        self._top_k[row] = sampling.top_k
        self._min_p[row] = sampling.min_p
        self._seed[row] = np.uint64(sampling.seed & 0xFFFFFFFFFFFFFFFF)
        self._logprobs[row] = NONE if sampling.logprobs is None else sampling.logprobs
        self._adapter[row] = request.adapter
        self._processors.open(row, request.prompt_tokens, sampling)
        self._grammars.open(row, sampling.grammar, request.known[request.prompt_tokens :])

    def known_tokens(self, row: int) -> TokenIds:
        return self.tokens[row, : self.length[row]]

    def computed_tokens(self, row: int) -> TokenIds:
        return self.tokens[row, : self.computed[row]]

    def adapters(self, rows: RowIds) -> Int32s | None:
        """Number of each row's adapter, or NONE; None if no row has one."""
        found = self._adapter[rows]
        return found if (found != NONE).any() else None

    def sampling(self, rows: RowIds) -> SamplingBatch:
        return SamplingBatch(
            temperature=self._temperature[rows],
            top_p=self._top_p[rows],
            top_k=self._top_k[rows],
            seeds=self._seed[rows],
            positions=(self.length[rows] + self.pending[rows]).astype(np.int64),
            logprobs=self._logprobs[rows],
            min_p=self._min_p[rows],
            processors=self._processors.of(rows, self.tokens, self.length, self._stop),
            masks=self._grammars.of(rows),
        )

    def reads_back(self, rows: RowIds) -> npt.NDArray[np.bool_]:
        """Whose next token depends on the tokens so far: no step may run ahead of these."""
        return self._processors.used[rows] | self._grammars.bound[rows]

    def launch(self, rows: RowIds, ends: Int32s, sampled: npt.NDArray[np.bool_]) -> None:
        """A step of tokens up to ``ends`` is launched, which chooses a token where ``sampled``."""
        self.launched[rows] = ends
        self.pending[rows] += sampled
        self.in_flight[rows] += 1

    def collect(self, rows: RowIds, sampled: npt.NDArray[np.bool_]) -> None:
        """The oldest step of ``rows`` that was launched has been collected."""
        self.pending[rows] -= sampled
        self.in_flight[rows] -= 1

    def append(self, rows: RowIds, tokens: TokenIds) -> None:
        """Add one token to each row."""
        at = self.length[rows]
        self.tokens[rows, at] = tokens
        self.length[rows] = at + 1
        self._grammars.append(rows, tokens)

    def ended(self, rows: RowIds, tokens: TokenIds) -> tuple[npt.NDArray[np.bool_], ...]:
        """Of the ``tokens`` just appended: which are stop tokens, which were the last allowed."""
        stopped = (self._stop[rows] == tokens[:, None]).any(axis=1)
        return stopped, self.length[rows] >= self.limit[rows]
