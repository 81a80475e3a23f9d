"""A request and every phase it can be in. Owns the phases: no other file assigns one.

Torch-free: the planner and the tests drive production requests without a model.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import Final

from stratakv.cache.records import CachedTokens, CacheUse, TierTokens
from stratakv.cache.retraction import RetractedState
from stratakv.core.ids import NONE, RequestId, TicketId, TokenIds
from stratakv.core.page_keys import PageHasher
from stratakv.engine.grammars import Grammar


class Phase(Enum):
    WAITING = auto()  # not admitted: holds no page
    PREFILLING = auto()  # admitted: some of its tokens are still to be computed
    TRANSFERRING = auto()  # its pages go to another engine, or come from one; computes nothing
    DECODING = auto()  # one token a step
    RETRACTED = auto()  # off the device for want of pages, with its tokens known
    FINISHED = auto()
    ABORTED = auto()


class Signal(Enum):
    ADMITTED = auto()
    RESERVED = auto()  # admitted to pages that another engine fills
    PREFILL_DONE = auto()
    SENDING = auto()  # its prompt is computed, for another engine
    RECEIVED = auto()
    SENT = auto()
    RETRACT = auto()
    STOPPED = auto()
    ABORT = auto()


P, S = Phase, Signal
PHASES: Final[dict[tuple[Phase, Signal], Phase]] = {
    (P.WAITING, S.ADMITTED): P.PREFILLING,
    (P.WAITING, S.RESERVED): P.TRANSFERRING,
    (P.PREFILLING, S.PREFILL_DONE): P.DECODING,
    (P.PREFILLING, S.SENDING): P.TRANSFERRING,
    (P.TRANSFERRING, S.RECEIVED): P.DECODING,
    (P.TRANSFERRING, S.SENT): P.FINISHED,
    (P.PREFILLING, S.STOPPED): P.FINISHED,
    (P.DECODING, S.STOPPED): P.FINISHED,
    (P.PREFILLING, S.RETRACT): P.RETRACTED,
    (P.DECODING, S.RETRACT): P.RETRACTED,
    (P.TRANSFERRING, S.RETRACT): P.RETRACTED,  # sent back in vain, and to be computed here
    (P.RETRACTED, S.ADMITTED): P.PREFILLING,  # what it knows but has no KV of, at least one token
    (P.RETRACTED, S.RESERVED): P.TRANSFERRING,  # of what it knows nothing was saved
    (P.WAITING, S.ABORT): P.ABORTED,
    (P.RETRACTED, S.ABORT): P.ABORTED,
    (P.PREFILLING, S.ABORT): P.ABORTED,
    (P.TRANSFERRING, S.ABORT): P.ABORTED,
    (P.DECODING, S.ABORT): P.ABORTED,
}


LARGEST: Final = 2**31 - 1
"""What a column of a batch holds, and token ids are below."""
LARGEST_TEMPERATURE: Final = 1e6
LARGEST_BIAS: Final = 100.0
"""Of what is added to logits, and of what they are multiplied by."""


class FinishReason(Enum):
    """OpenAI's words, and those of engines among each other."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"  # this request failed, and no other
    HANDED_OFF = "handed_off"  # another engine has its pages and generates the rest


class Failure(Enum):
    """Why a request ended with ERROR."""

    INTERNAL = "internal"  # an exception while it was taken, admitted, planned or sampled
    NOT_FINITE = "not_finite"  # the model computed NaN or infinity
    NO_TOKEN = "no_token"  # what the request itself asks of tokens leaves none
    COPY = "copy"  # its pages could not be copied to the host, and the device has no room for all
    TRANSFER = "transfer"  # its pages did not reach the engine that was to decode


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the next token is chosen. ``temperature`` 0 is greedy, ``top_k`` 0 and ``top_p`` 1 off.

    ``seed`` fixes the request's own stream of random numbers, whatever else is in the batch.
    ``logprobs``: how many alternatives to report beside the chosen token, or None for no report.
    ``prompt_logprobs``: the same of the prompt's own tokens, for a request that reads no cache.
    ``min_p``: tokens less likely than this share of the likeliest one are left out; 0 is off.
    The rest changes logits, as vLLM's parameters of these names do. ``min_tokens``: no stop token
    before so many. ``logit_bias``: token ids, none twice, and what is added to the logits of each.
    ``grammar``: the form that the answer has to have.
    """

    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    stop_tokens: tuple[int, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    min_tokens: int = 0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    grammar: Grammar | None = None

    @property
    def changes_logits(self) -> bool:
        """Whether something is added to the model's own logits."""
        penalties = (self.frequency_penalty, self.presence_penalty, self.repetition_penalty - 1)
        return any(penalties) or bool(self.min_tokens or self.logit_bias)

    def refusal(self) -> str | None:
        """None, or which field holds what the engine's columns cannot, and what they can."""
        whole = (
            ("max_tokens", self.max_tokens, 1),
            ("top_k", self.top_k, 0),
            ("logprobs", 0 if self.logprobs is None else self.logprobs, 0),
            ("prompt_logprobs", 0 if self.prompt_logprobs is None else self.prompt_logprobs, 0),
            ("min_tokens", self.min_tokens, 0),
            *(("stop_tokens", token, 0) for token in self.stop_tokens),
            *(("logit_bias", token, 0) for token, _ in self.logit_bias),
        )
        for name, value, low in whole:
            if not low <= value <= LARGEST:
                return f"{name} is {value}; {low} to {LARGEST} is allowed"
        numbers = (
            ("temperature", self.temperature, 0, LARGEST_TEMPERATURE),
            ("top_p", self.top_p, 0, 1),
            ("min_p", self.min_p, 0, 1),
            ("frequency_penalty", self.frequency_penalty, -LARGEST_BIAS, LARGEST_BIAS),
            ("presence_penalty", self.presence_penalty, -LARGEST_BIAS, LARGEST_BIAS),
            ("repetition_penalty", self.repetition_penalty, 1 / LARGEST_BIAS, LARGEST_BIAS),
            *(("logit_bias", value, -LARGEST_BIAS, LARGEST_BIAS) for _, value in self.logit_bias),
        )
        for name, value, low, high in numbers:
            if not low <= value <= high:
                return f"{name} is {value}; {low:g} to {high:g} is allowed"
        if self.min_tokens > self.max_tokens:
            return (
                f"min_tokens is {self.min_tokens}; 0 to {self.max_tokens} (max_tokens) is allowed"
            )
        if len({token for token, _ in self.logit_bias}) < len(self.logit_bias):
            return "logit_bias holds a token twice; once is allowed"
        return None


@dataclass(frozen=True, slots=True)
class TransferSession:
    """One prompt's hand-off from the engine that computes it to the one that decodes. ``name``: the
    same on both sides, whose request ids are their own. ``prefill``: where the first one is reached
    (host:port); "" on its own side."""

    name: str
    prefill: str = ""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prompt:
    """What a client asks for, as the engine takes it. ``tokens``: int32 [n], n >= 1. ``adapter``:
    name of a loaded one, "" for the model alone. ``priority``: of its pages when some must go, the
    higher the longer they stay. ``use``: what it may do with the cache. ``session``: None for one
    that is computed and decoded by one engine, or whose id is the same on both sides."""

    id: RequestId
    tokens: TokenIds
    sampling: SamplingParams
    salt: str = ""
    adapter: str = ""
    priority: int = 0
    use: CacheUse = CacheUse.ALL
    session: TransferSession | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """Log-probability of the chosen token and of the most likely ones (token id, logprob)."""

    chosen: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """What a step brought one request. ``cached`` is set with the first token, ``finish`` with the
    last one; an aborted request gets ``token`` None and ``finish`` ABORT, and one that failed the
    same with ERROR and why. ``reason``: of a failed transfer, in words for the client.
    ``prompt_logprobs``: with the first token, of each prompt token but the first; None: not asked
    for."""

    request: RequestId
    token: int | None
    logprob: TokenLogprob | None = None
    cached: CachedTokens | None = None
    finish: FinishReason | None = None
    failure: Failure | None = None
    reason: str = ""
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None


@dataclass(slots=True, eq=False)
class Request:
    """The engine's own record. ``row`` is its place in the block table and in ``rows.Rows`` while
    it runs, -1 otherwise; ``serial`` counts submissions. ``prefix`` hashes its pages;
    ``total_tokens`` is where it must end.
    ``adapter``: its number in a ``StepBatch``. ``known``: prompt and output so far, while it does
    not run; ``retracted``: what the cache keeps for it while it is retracted. ``scores``: how many
    of its prompt tokens have been scored, from the second one on."""

    prompt: Prompt
    prefix: PageHasher
    total_tokens: int
    serial: int
    adapter: int = NONE
    phase: Phase = field(default=Phase.WAITING, init=False)
    row: int = field(default=-1, init=False)
    cached: CachedTokens | None = field(default=None, init=False)
    tickets: tuple[TicketId, ...] = field(default=(), init=False)
    known: TokenIds = field(init=False)
    retracted: RetractedState | None = field(default=None, init=False)
    scores: int = field(default=0, init=False)
    _scored: list[TokenLogprob] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.known = self.prompt.tokens
        self._scored = [] if self.wants_scores else None

    @property
    def id(self) -> RequestId:
        return self.prompt.id

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt.tokens)

    @property
    def has_generated(self) -> bool:
        """Whether it has lost its row with tokens of its own, so that no client can bring them."""
        return len(self.known) > self.prompt_tokens

    @property
    def wants_scores(self) -> bool:
        return self.prompt.sampling.prompt_logprobs is not None

    def admit(self, row: int, tickets: tuple[TicketId, ...], cached: CachedTokens) -> None:
        """It has a place at ``row``, where its ``tickets`` load. What is ``cached`` of its prompt
        counts when it is admitted first."""
        self.row, self.tickets, self.retracted = row, tickets, None
        if self.phase is Phase.WAITING:
            self.cached = cached

    def retract(self, known: TokenIds, retracted: RetractedState) -> None:
        """It has lost its row, with ``known`` of its tokens."""
        self.known, self.retracted = known, retracted
        self.row, self.tickets = -1, ()
        self.signal(Signal.RETRACT)

    def trust(self) -> None:
        """Hash anew what of its prefix is suspect by now."""
        self.prefix = self.prefix.trusted(self.known)

    def prefilled_elsewhere(self, cached: TierTokens | None) -> None:
        """Another engine has computed its prompt, of which it had ``cached``."""
        if self.cached is not None:
            self.cached = replace(self.cached, prefill=cached)

    def take_tickets(self) -> tuple[TicketId, ...]:
        """What its first step waits for; given once."""
        tickets, self.tickets = self.tickets, ()
        return tickets

    def take_cached(self) -> CachedTokens | None:
        """What was cached of its prompt, reported with the first token, once."""
        cached, self.cached = self.cached, None
        return cached

    def scored(self, scores: Sequence[TokenLogprob | None]) -> None:
        """The next of its prompt tokens are; of another rank than the one that chooses nobody knows
        how."""
        assert self._scored is not None, "it has reported them"
        self.scores += len(scores)
        self._scored += [one for one in scores if one is not None]

    def take_scored(self) -> tuple[TokenLogprob, ...] | None:
        """Reported with the first token, once."""
        found, self._scored = self._scored, None
        return None if found is None else tuple(found)

    def signal(self, signal: Signal) -> None:
        try:
            self.phase = PHASES[self.phase, signal]
        except KeyError:
            raise AssertionError(f"{signal.name} is illegal in {self.phase.name}") from None
