from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, normalizers

from stratakv.core.errors import ConfigError
from stratakv.serve.errors import ApiError
from stratakv.serve.schemas import Conversation
from stratakv.serve.tokenizer import REPLACEMENT, StreamDecoder, Tokenizer
from tests.serving import EOS, TEXTS, train_tokenizer

few = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return Tokenizer(train_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture(scope="module")
def byte_fallback(tmp_path_factory):
    """Like Llama's: bytes that are in no token are tokens of their own; spaces lead words."""
    path: Path = tmp_path_factory.mktemp("fallback")
    words = ["▁", "▁the", "▁a", "b", "c", "▁€", "x"]
    vocab = {w: i for i, w in enumerate(["<unk>", *(f"<0x{b:02X}>" for b in range(256)), *words])}
    fast = FastTokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    fast.normalizer = normalizers.Sequence([normalizers.Replace(" ", "▁")])
    fast.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    fast.save(str(path / "tokenizer.json"))
    config = '{"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>"}'
    (path / "tokenizer_config.json").write_text(config)
    return Tokenizer(path)


def streamed(tokenizer, tokens):
    decoder = StreamDecoder(tokenizer)
    pieces = [decoder.feed(token) for token in tokens]
    return [*pieces, decoder.flush()]


@few
@given(st.text(max_size=60) | st.lists(st.sampled_from(TEXTS), max_size=3).map("".join))
def test_pieces_of_a_text_join_to_it_and_hold_no_partial_character(tokenizer, text):
    pieces = streamed(tokenizer, tokenizer.encode(text).tolist())
    assert "".join(pieces) == text
    assert REPLACEMENT in text or not any(REPLACEMENT in piece for piece in pieces)


@few
@given(st.lists(st.integers(0, 399) | st.integers(1, 256), max_size=120))
def test_pieces_of_any_tokens_join_to_the_whole_decode(tokenizer, tokens):
    assert "".join(streamed(tokenizer, tokens)) == tokenizer.decode(tokens)


@few
@given(st.lists(st.sampled_from(["the ", "a b", "€", "x 東京", " 👍🏽", "  c"]), max_size=40))
def test_pieces_join_for_a_tokenizer_with_byte_fallback(byte_fallback, parts):
    tokens = byte_fallback.encode("".join(parts)).tolist()
    pieces = streamed(byte_fallback, tokens)
    assert "".join(pieces) == byte_fallback.decode(tokens)
    assert not any(REPLACEMENT in piece for piece in pieces)


@pytest.mark.parametrize("kind", ["text", "broken bytes", "special tokens"])
def test_the_cost_of_a_token_does_not_grow_with_the_output(tokenizer, monkeypatch, kind):
    tokens = {
        "text": tokenizer.encode(TEXTS[1] * 20).tolist(),
        "broken bytes": tokenizer.encode("€").tolist()[:1] * 500,
        "special tokens": tokenizer.encode(EOS).tolist() * 500,
    }[kind]
    decode, longest = tokenizer.decode, 0

    def watched(window, *, special):
        nonlocal longest
        longest = max(longest, len(window))
        return decode(window, special=special)

    monkeypatch.setattr(tokenizer, "decode", watched)
    text = "".join(streamed(tokenizer, tokens))
    assert text == decode(tokens)
    assert longest <= 2 * StreamDecoder.WINDOW


def test_token_ids_are_int32_and_whole(tokenizer):
    tokens = tokenizer.encode(TEXTS[0])
    assert tokens.dtype == np.int32
    assert tokenizer.decode(tokens.tolist()) == TEXTS[0]


def test_special_tokens_are_no_text(tokenizer):
    tokens = tokenizer.encode(f"a{EOS}b").tolist()
    assert tokenizer.decode(tokens) == "ab"


def test_token_bytes_join_to_the_bytes_of_the_text(tokenizer):
    tokens = tokenizer.encode(TEXTS[1]).tolist()
    assert bytes(b for token in tokens for b in tokenizer.token_bytes(token)) == TEXTS[1].encode()


def test_token_bytes_of_byte_tokens_and_leading_spaces(byte_fallback):
    tokens = byte_fallback.encode("a the€").tolist()
    found = bytes(b for token in tokens for b in byte_fallback.token_bytes(token))
    assert found == "a the€".encode()


def talk(opens=True, goes_on=False, template=None, **turns):
    messages = tuple({"role": role, "content": content} for role, content in turns.items())
    return Conversation(messages=messages, opens=opens, goes_on=goes_on, template=template or {})


def test_a_chat_may_end_with_its_last_message_or_inside_it(tokenizer):
    for goes_on in (False, True):
        found = talk(opens=False, goes_on=goes_on, user="hi", assistant="so")
        assert tokenizer.chat_text(found) == "<user>hi<assistant>so"


def test_a_template_gets_what_the_client_gives_it(tokenizer):
    found = tokenizer.chat_text(talk(template={"mood": "short"}, user="hi"))
    assert found == "<short><user>hi<assistant>"


def test_a_chat_ends_where_the_assistant_begins(tokenizer):
    tokens = tokenizer.encode_chat(talk(user="hi")).tolist()
    assert tokenizer.decode(tokens) == "<user>hi<assistant>"


def test_a_template_that_refuses_is_the_clients_fault(tokenizer):
    with pytest.raises(ApiError, match="an empty turn") as caught:
        tokenizer.encode_chat(talk(assistant=""))
    assert (caught.value.status, caught.value.param) == (400, "messages")


def test_no_chat_template_is_reported(byte_fallback):
    with pytest.raises(ApiError, match="no chat template"):
        byte_fallback.encode_chat(talk(user="hi"))


def test_a_directory_without_a_tokenizer_is_the_operators_fault(tmp_path):
    with pytest.raises(ConfigError, match="holds no tokenizer"):
        Tokenizer(tmp_path)
