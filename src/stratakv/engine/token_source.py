"""Where a step's tokens come from: chosen here, or by rank 0 for all ranks.

Owns the protocol and the engine that is alone. One call a step, whatever the step does: ranks that
count calls differently hang.
"""

from typing import Protocol

from stratakv.engine.batch import SamplingBatch
from stratakv.engine.forward import Forward
from stratakv.engine.sampling import Sampled, choose


class TokenSource(Protocol):
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
