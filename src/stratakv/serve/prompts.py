"""Texts and conversations of requests to token ids, beside the event loop where they are long.

Owns when a prompt is refused or cut for its length before the engine sees it. Must not know what
the answer is to be.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, assert_never

from starlette.requests import Request

from stratakv.core.ids import TokenIds
from stratakv.serve.errors import ClientGoneError, invalid, too_long
from stratakv.serve.lanes import EACH_BYTES, INLINE_BYTES, Lanes, client_of, in_pieces
from stratakv.serve.schemas import (
    WHAT_FITS,
    ChatCall,
    CompletionCall,
    Conversation,
    PromptOptions,
)
from stratakv.serve.service import Limits
from stratakv.serve.tokenizer import Tokenizer

COMPLETION_TOKENS: Final = 16
"""OpenAI's default of ``max_tokens`` for completions."""


@dataclass(frozen=True, slots=True, eq=False)
class PromptEncoder:
    """All of one server. Token ids are int32 [n]."""

    tokenizer: Tokenizer
    limits: Limits
    lanes: Lanes

    def default_tokens(self, call: CompletionCall | ChatCall) -> int:
        """The most tokens of an answer to a call that does not say."""
        match call:
            case CompletionCall():
                return COMPLETION_TOKENS
            case ChatCall():
                return self.limits.default_max_tokens
            case _:
                assert_never(call)

    async def of_call(
        self, request: Request, call: CompletionCall | ChatCall
    ) -> Sequence[TokenIds]:
        options = self._cut(call.options, call.decoding.max_tokens or self.default_tokens(call))
        match call:
            case CompletionCall():
                return await self.encode(request, call.prompts, options)
            case ChatCall():
                return [await self.encode_chat(request, call.conversation, options)]
            case _:
                assert_never(call)

    def _cut(self, options: PromptOptions, answer_tokens: int) -> PromptOptions:
        """With the number of tokens that are kept of a prompt whose answer may have so many."""
        longest = self.limits.max_model_len
        if options.most is None:
            return options
        if options.most > longest:
            message = f"'truncate_prompt_tokens' is {options.most}, this model's maximum context"
            raise invalid("truncate_prompt_tokens", f"{message} length is {longest} tokens")
        if options.most == WHAT_FITS:
            return replace(options, most=max(1, longest - answer_tokens))
        return options

    async def encode(
        self, request: Request, prompts: Sequence[str | TokenIds], options: PromptOptions
    ) -> list[TokenIds]:
        """Between the pieces others have their turn, however many texts there are."""

        def work(piece: Sequence[str | TokenIds]) -> list[TokenIds]:
            return [
                self._encoded("prompt", one, options)
                if isinstance(one, str)
                else _last(one, options)
                for one in piece
            ]

        found: list[TokenIds] = []
        size = sum(map(_work_of, prompts))
        for piece in in_pieces(prompts, _work_of):
            if size >= INLINE_BYTES and await request.is_disconnected():
                raise ClientGoneError("the client closed the connection")
            found += await self.lanes.run(client_of(request), size, partial(work, piece))
        return found

    async def encode_chat(
        self, request: Request, conversation: Conversation, options: PromptOptions
    ) -> TokenIds:
        def work() -> TokenIds:
            return self._encoded("messages", self.tokenizer.chat_text(conversation), options)

        # A message costs a template more than its text does.
        size = conversation.chars + EACH_BYTES * len(conversation.messages)
        return await self.lanes.run(client_of(request), size, work)

    def _encoded(self, field: str, text: str, options: PromptOptions) -> TokenIds:
        """A text that can by no means fit is refused without being tokenized, unless it is cut."""
        longest = self.limits.max_model_len
        if options.most is None and len(text) > longest:
            least = self.tokenizer.least_tokens(text)
            if least > longest:
                message = f"this model's maximum context length is {longest} tokens, "
                raise too_long(field, f"{message}your prompt has at least {least}")
        return _last(self.tokenizer.encode(text, special=options.special), options)


def _last(tokens: TokenIds, options: PromptOptions) -> TokenIds:
    return tokens if options.most is None else tokens[-options.most :]


def _work_of(prompt: str | TokenIds) -> int:
    """Bytes to tokenize."""
    return EACH_BYTES + len(prompt) if isinstance(prompt, str) else 0
