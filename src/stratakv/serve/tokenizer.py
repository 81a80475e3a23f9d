"""Text to token ids and back.

Owns a model's Hugging Face fast tokenizer and its chat template. Every method may be called from
any thread. Must not know of requests, nor cut text at stop strings (``streams``).
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np
from jinja2 import TemplateError
from tokenizers import Tokenizer as FastTokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from stratakv.core.errors import ConfigError
from stratakv.core.ids import TokenIds
from stratakv.serve.errors import ApiError, invalid
from stratakv.serve.messages import Message, with_text_arguments
from stratakv.serve.schemas import Conversation
from stratakv.serve.text_bound import BYTE_OF_CHAR, bound_of

TEMPLATE_FAULTS: Final = (
    TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError,
)  # fmt: skip
"""What a chat template may raise over what a client has given it."""
REPLACEMENT: Final = "\ufffd"


class Tokenizer:
    """A tokenizer directory of Hugging Face's (``tokenizer.json`` and its companions)."""

    def __init__(self, path: Path) -> None:
        try:
            loaded = AutoTokenizer.from_pretrained(
                path, local_files_only=True, trust_remote_code=False
            )
        except (OSError, ValueError) as error:
            raise ConfigError(f"MODEL {path}: it holds no tokenizer that loads: {error}") from error
        if not isinstance(loaded, PreTrainedTokenizerFast):
            raise ConfigError(f"MODEL {path}: allowed is a fast tokenizer (tokenizer.json)")
        self._templates = loaded
        self._fast: FastTokenizer = loaded.backend_tokenizer
        # Prompts come whole or not at all: a file may ask for cutting or padding.
        self._fast.no_truncation()
        self._fast.no_padding()
        self._bound = bound_of(self._fast)
        added = self._fast.get_added_tokens_decoder()
        self.silent: Final = frozenset(token for token, kind in added.items() if kind.special)
        """Tokens without text."""
        self._token_texts: dict[int, str] = {}

    @property
    def serialized(self) -> str:
        """As tokenizer.json has it, with the tokens that are added elsewhere."""
        return self._fast.to_str()

    @property
    def eos(self) -> tuple[int, ...]:
        """The token that ends a text; of some tokenizers there is none."""
        found = self._templates.eos_token_id
        return (found,) if isinstance(found, int) else ()

    def encode(self, text: str, *, special: bool = True) -> TokenIds:
        """Token ids of ``text``, int32 [n]; ``special``: with what the tokenizer adds (as BOS).

        The batch call gives the GIL back while it works, ``encode`` of one text does not
        (tokenizers 0.23: a text of 1 MB would hold every stream up for 0.6 s).
        """
        (encoding,) = self._fast.encode_batch_fast([text], add_special_tokens=special)
        return np.array(encoding.ids, np.int32)

    def least_tokens(self, text: str) -> int:
        """How many tokens ``text`` has at least, found without tokenizing; 0 where that is not
        known of this tokenizer."""
        return 0 if self._bound is None else self._bound.least_tokens(text)

    def encode_chat(self, conversation: Conversation) -> TokenIds:
        """Token ids of a conversation, int32 [n]."""
        return self.encode(self.chat_text(conversation), special=False)

    def chat_text(self, conversation: Conversation) -> str:
        """A conversation as the model reads it, with its special tokens spelled out."""
        if self._templates.chat_template is None:
            raise invalid("messages", "this model has no chat template; use /v1/completions")
        if conversation.tools and not self.shows_tools:
            message = "this model's chat template shows no tools to the model"
            raise ApiError(message, param="tools", code="unsupported_parameter")
        try:
            try:
                return self._rendered(conversation, conversation.messages)
            except TypeError:  # some templates write the arguments of calls as text: DeepSeek's
                return self._rendered(conversation, with_text_arguments(conversation.messages))
        except TEMPLATE_FAULTS as error:
            message = f"the model's chat template refuses these messages: {error}"
            raise ApiError(message, param="messages", code="invalid_value") from None

    @property
    def template(self) -> str:
        """The chat template of conversations with tools; "" where there is none."""
        found = self._templates.chat_template
        if isinstance(found, dict):
            found = found.get("tool_use", found.get("default"))
        return found if isinstance(found, str) else ""

    @property
    def shows_tools(self) -> bool:
        return "tools" in self.template

    def _rendered(self, conversation: Conversation, messages: Sequence[Message]) -> str:
        text = self._templates.apply_chat_template(
            [dict(message) for message in messages],
            tools=[dict(tool) for tool in conversation.tools] or None,
            tokenize=False,
            add_generation_prompt=conversation.opens,
            continue_final_message=conversation.goes_on,
            **conversation.template,
        )
        assert isinstance(text, str)
        return text

    def decode_long(self, tokens: Sequence[int]) -> str:
        """As ``decode``, without Python's lock meanwhile."""
        (text,) = self._fast.decode_batch([tokens], skip_special_tokens=True)
        return text

    def decode(self, tokens: Sequence[int], *, special: bool = False) -> str:
        """Text of ``tokens``, ``special`` ones too or not; what is no UTF-8 becomes U+FFFD."""
        return self._fast.decode(tokens, skip_special_tokens=not special)

    def token_text(self, token: int) -> str:
        """Text of one token as it reads inside a sentence (a leading space is kept)."""
        known = self._token_texts.get(token)
        if known is None:
            one = self._fast.decode([token], skip_special_tokens=False)
            two = self._fast.decode([token, token], skip_special_tokens=False)
            # The second of two, since decoders strip a space at the very beginning.
            known = self._token_texts[token] = two[len(one) :]
        return known

    def token_bytes(self, token: int) -> list[int]:
        """Bytes of one token, also where it is only a part of a character."""
        text = self.token_text(token)
        if REPLACEMENT not in text:
            return list(text.encode())
        piece = self._fast.id_to_token(token) or ""
        if piece.startswith("<0x") and piece.endswith(">"):
            return [int(piece[3:-1], 16)]
        if all(char in BYTE_OF_CHAR for char in piece):
            return [BYTE_OF_CHAR[char] for char in piece]
        return list(text.encode())


class StreamDecoder:
    """One request's tokens to text, piece by piece.

    The pieces join to the whole decode (for byte-fallback tokenizers where the bytes are UTF-8:
    they judge a run of byte tokens as a whole, which no stream can). Characters that are not
    complete are held back. Linear in the output: only a window of recent tokens is decoded again.
    """

    WINDOW: Final = 24
    KEPT: Final = range(8, 16)  # tokens to keep when the window is cut, best first
    PARTIAL: Final = 3  # bytes of a character that is not complete
    STALLED: Final = 8  # tokens after which held bytes are surely no part of a character

    def __init__(self, tokenizer: Tokenizer, *, special: bool = False) -> None:
        self._tokenizer = tokenizer
        self._special = special
        self._window: list[int] = []
        self._text = ""  # of the window
        self._sent = 0  # characters of it that are out
        self._stalled = 0  # tokens since the text last ended in a whole character

    def feed(self, token: int) -> str:
        """What ``token`` completes; may be empty."""
        if token in self._tokenizer.silent and not self._special:
            return ""  # in the window, a long run of them would leave no text to cut at
        self._window.append(token)
        self._text = self._tokenizer.decode(self._window, special=self._special)
        # All of them, since byte fallback shows a whole run of bytes so while its last character is
        # not complete, those before it included, which may be out already.
        held = len(self._text) - len(self._text.rstrip(REPLACEMENT))
        self._stalled = self._stalled + 1 if held else 0
        broken = self._stalled > self.STALLED
        piece = self._take(len(self._text) - (min(held, self.PARTIAL) if broken else held))
        if len(self._window) > self.WINDOW and (broken or not held):
            self._cut()
        return piece

    def flush(self) -> str:
        """What was held back: there will be no more tokens."""
        return self._take(len(self._text))

    def _take(self, end: int) -> str:
        piece = self._text[self._sent : end]
        self._sent = max(self._sent, end)
        return piece

    def _cut(self) -> None:
        """Forget old tokens. The shorter window must end in the same text, back to at least one
        character that is out: a cut inside a character, or before a space that decoders strip,
        shows itself in front of that."""
        unsent = len(self._text) - self._sent
        for kept in self.KEPT:
            text = self._tokenizer.decode(self._window[-kept:], special=self._special)
            if len(text) > unsent and self._text.endswith(text[-(unsent + 1) :]):
                self._window = self._window[-kept:]
                self._text, self._sent = text, len(text) - unsent
                return
