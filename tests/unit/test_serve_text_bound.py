"""A text's least number of tokens is never above what its tokenizer makes of it."""

import random

import pytest
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from stratakv.serve.text_bound import bound_of
from tests.serving import TEXTS

PARTS = [
    *TEXTS,
    "   ",
    "\n\n\n",
    "====",
    "a",
    "e\u0301",
    "\u00e9",
    "\u2581",
    "\x00",
    "é" * 9,
    "<|x|>",
]


def byte_level(normalizer=None, splitter=None):
    fast = Tokenizer(models.BPE())
    level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.pre_tokenizer = pre_tokenizers.Sequence([splitter, level]) if splitter else level
    if normalizer is not None:
        fast.normalizer = normalizer
    fast.decoder = decoders.ByteLevel()
    fast.train_from_iterator(
        [*TEXTS, " " * 64, "=" * 32],
        trainers.BpeTrainer(
            vocab_size=600,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            special_tokens=["<|x|>"],
            show_progress=False,
        ),
    )
    return fast


def byte_fallback(*, complete=True):
    pieces = [f"<0x{byte:02X}>" for byte in range(256 if complete else 255)]
    words = ["\u2581", "a", "\u2581\u2581", "\u2581a", "e", "\u0301"]
    vocab = {piece: i for i, piece in enumerate([*pieces, *words])}
    merges = [("\u2581", "\u2581"), ("\u2581", "a")]
    fast = Tokenizer(models.BPE(vocab, merges, byte_fallback=True))
    fast.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    return fast


@pytest.mark.parametrize(
    "make",
    [
        byte_level,
        lambda: byte_level(normalizers.NFC()),
        lambda: byte_level(splitter=pre_tokenizers.Digits(individual_digits=True)),
        byte_fallback,
    ],
)
def test_no_text_has_fewer_tokens_than_its_bound(make):
    fast = make()
    bound = bound_of(fast)
    assert bound is not None
    draw = random.Random(3)
    for _ in range(300):
        text = "".join(part * draw.randrange(1, 9) for part in draw.choices(PARTS, k=6))
        assert bound.least_tokens(text) <= len(fast.encode(text, add_special_tokens=False).ids)
    assert bound.least_tokens("x" * 100_000) > 100_000 / 100


def test_a_bound_is_reached_by_the_longest_token():
    fast = byte_level()
    longest = max(fast.get_vocab(), key=lambda token: token.count("\u0120"))
    spaces = longest.count("\u0120")
    assert bound_of(fast).least_tokens(" " * spaces * 50) == 50


def test_a_text_that_the_tokenizer_composes_is_not_judged():
    bound = bound_of(byte_level(normalizers.NFC()))
    assert bound.least_tokens("e\u0301" * 10_000) == 0
    assert bound.least_tokens("\u00e9" * 10_000) > 0


def test_a_token_that_takes_any_number_of_spaces_makes_them_cost_nothing():
    fast = byte_level()
    fast.add_special_tokens([AddedToken("<|end|>", rstrip=True)])
    bound = bound_of(fast)
    text = "<|end|>" + " \n\u00a0\u3000\u2028" * 1000
    assert bound.least_tokens(text) <= len(fast.encode(text).ids) < 10
    assert bound.least_tokens("x" * 1000) > 0


@pytest.mark.parametrize(
    "make",
    [
        lambda: Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]")),
        lambda: Tokenizer(models.BPE({"a": 0}, [])),
        lambda: byte_fallback(complete=False),
        lambda: byte_level(normalizers.NFKC()),
        lambda: byte_level(normalizers.Sequence([normalizers.NFC(), normalizers.Strip()])),
        lambda: byte_level(splitter=pre_tokenizers.WhitespaceSplit()),
        lambda: byte_level(splitter=pre_tokenizers.Split(" ", "removed")),
    ],
)
def test_there_is_no_bound_where_a_token_may_stand_for_anything(make):
    assert bound_of(make()) is None
