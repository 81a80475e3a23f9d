"""What prefill needs to compute a request once more that was retracted where it decodes: nobody
else knows the tokens that it has generated.

Owns the record and its fields in a message. Comes from another machine: read with care. Pure.
"""

import base64
from dataclasses import dataclass
from typing import Any

import numpy as np

from stratakv.cache.records import CacheUse
from stratakv.core.ids import RequestId, TokenIds
from stratakv.disagg.peer_limits import NAME_CHARS, short
from stratakv.engine.request import Prompt, Request, SamplingParams, TransferSession


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Recompute:
    """``tokens``: all that it knows, int32 [n]. The token after them is chosen by ``sampling``."""

    tokens: TokenIds
    sampling: SamplingParams
    salt: str
    adapter: str
    priority: int
    use: CacheUse

    @staticmethod
    def of(request: Request) -> "Recompute | None":
        """None where its next token hangs on which of its tokens it has generated: for who computes
        it again all are a prompt. Nor where no peer takes a name as long as its own."""
        asked, generated = request.prompt, len(request.known) - request.prompt_tokens
        sampling = asked.sampling
        counted = sampling.frequency_penalty or sampling.presence_penalty
        if counted or sampling.grammar is not None or generated < sampling.min_tokens:
            return None
        if max(len(asked.salt), len(asked.adapter)) > NAME_CHARS:
            return None
        return Recompute(
            tokens=request.known,
            sampling=SamplingParams(
                max_tokens=1,
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                min_p=sampling.min_p,
                seed=sampling.seed,
                logprobs=sampling.logprobs,
                repetition_penalty=sampling.repetition_penalty,
                logit_bias=tuple((token, float(bias)) for token, bias in sampling.logit_bias),
            ),
            salt=asked.salt,
            adapter=asked.adapter,
            priority=asked.priority,
            use=asked.use,
        )

    def prompt(self, session: str) -> Prompt:
        """As prefill's engine takes it."""
        return Prompt(
            id=RequestId(f"again-{session}"),
            tokens=self.tokens,
            sampling=self.sampling,
            salt=self.salt,
            adapter=self.adapter,
            priority=self.priority,
            use=self.use,
            session=TransferSession(session),
        )

    def fields(self) -> dict[str, Any]:
        sampling = self.sampling
        return {
            "tokens": base64.b64encode(self.tokens.tobytes()).decode(),
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "seed": sampling.seed,
            "logprobs": sampling.logprobs,
            "repetition_penalty": sampling.repetition_penalty,
            "logit_bias": sampling.logit_bias,
            "salt": self.salt,
            "adapter": self.adapter,
            "priority": self.priority,
            "use": self.use.value,
        }

    @staticmethod
    def read(fields: Any) -> "Recompute":  # noqa: ANN401 - from a peer
        """ValueError, KeyError or TypeError where it is none."""
        tokens = np.frombuffer(base64.b64decode(fields["tokens"], validate=True), np.int32)
        if len(tokens) and tokens.min() < 0:
            raise ValueError("a token below 0")
        logprobs = fields["logprobs"]
        sampling = SamplingParams(
            max_tokens=1,
            temperature=float(fields["temperature"]),
            top_p=float(fields["top_p"]),
            top_k=int(fields["top_k"]),
            min_p=float(fields["min_p"]),
            seed=int(fields["seed"]),
            logprobs=None if logprobs is None else int(logprobs),
            repetition_penalty=float(fields["repetition_penalty"]),
            logit_bias=tuple((int(token), float(bias)) for token, bias in fields["logit_bias"]),
        )
        return Recompute(
            tokens=tokens,
            sampling=sampling,
            salt=short(fields["salt"]),
            adapter=short(fields["adapter"]),
            priority=int(fields["priority"]),
            use=CacheUse(int(fields["use"])),
        )
