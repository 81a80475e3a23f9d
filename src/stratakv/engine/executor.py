"""What computes steps: launched in order, and collected in that order.

Owns the protocols, the executor that computes a step while it is launched, and where its tokens
come from where an engine is alone. A device may run ahead: then the next step is launched before
the tokens of the last one are known here.
"""

from typing import Protocol

from stratakv.engine.batch import SamplingBatch, StepBatch
from stratakv.engine.forward import Forward
from stratakv.engine.sampling import Sampled, choose
from stratakv.transfer.copy_plan import NOTHING_LAUNCHED, Fence


class TokenSource(Protocol):
    """Tokens are chosen here, or by rank 0 for all ranks. One call a step, whatever the step does:
    ranks that count calls differently hang."""

    def choose(self, forward: Forward, params: SamplingBatch) -> Sampled:
        """The next token of every sampled row, and who cannot go on; S may be 0."""
        ...

    def idle(self) -> None:
        """Nothing ran in this step."""
        ...


class OwnTokens:
    """A single rank asks nobody."""

    def choose(self, forward: Forward, params: SamplingBatch) -> Sampled:
        return choose(forward, params)

    def idle(self) -> None:
        pass


class Runner(Protocol):
    def forward(self, batch: StepBatch) -> Forward: ...


class Executor(Protocol):
    """``launch`` and ``collect`` pair up. In every engine step there is one ``collect`` or one
    ``idle``, where ranks agree on tokens and on what else the step brings."""

    @property
    def depth(self) -> int:
        """How many steps may be launched and not yet collected, the one just launched among them;
        1: they run one after the other."""
        ...

    def launch(self, batch: StepBatch, sampling: SamplingBatch) -> None:
        """Begin to compute ``batch``, after all that was launched before, and to choose a token for
        each of its sampled rows. Its rows' tables, gate and tokens are what they are now; a token
        that is NONE is the one that the launched steps choose for its row last."""
        ...

    def collect(self) -> Sampled:
        """The tokens of the oldest step that is launched, once they are there. A step that chooses
        none may still be at its pages: ``launched`` says until when."""
        ...

    def idle(self) -> None:
        """No step is collected in this engine step."""
        ...

    def launched(self) -> Fence:
        """Passes when all that was launched so far is computed: what copies come after."""
        ...


class SerialExecutor:
    """Computes a step when it is launched, and chooses its tokens when it is collected."""

    depth = 1

    def __init__(self, runner: Runner, token_source: TokenSource) -> None:
        self.runner = runner
        self._token_source = token_source
        self._launched: tuple[Forward, SamplingBatch] | None = None

    def launch(self, batch: StepBatch, sampling: SamplingBatch) -> None:
        assert self._launched is None, "a step is launched before the last one was collected"
        self._launched = self.runner.forward(batch), sampling

    def collect(self) -> Sampled:
        assert self._launched is not None, "no step is launched"
        (forward, sampling), self._launched = self._launched, None
        return self._token_source.choose(forward, sampling)

    def idle(self) -> None:
        self._token_source.idle()

    def launched(self) -> Fence:
        return NOTHING_LAUNCHED
