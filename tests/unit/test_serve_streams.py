import asyncio

import pytest

from stratakv.engine.request import FinishReason, Output, Prompt, SamplingParams, TokenLogprob
from stratakv.serve.decoding import TextOptions
from stratakv.serve.generate import derived_seed
from stratakv.serve.replies import finite, merged
from stratakv.serve.streams import Choice, Generation
from stratakv.serve.subscription import Subscription, TimedOutput
from stratakv.serve.tokenizer import Tokenizer
from tests.serving import EOS, train_tokenizer

LENGTH, STOP = FinishReason.LENGTH, FinishReason.STOP


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return Tokenizer(train_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def outputs(tokenizer, text, finish=LENGTH):
    tokens = tokenizer.encode(text).tolist()
    return [
        Output(
            request="r",
            token=token,
            logprob=TokenLogprob(chosen=-float(i), top=()),
            finish=finish if i == len(tokens) - 1 else None,
        )
        for i, token in enumerate(tokens)
    ]


def deltas(tokenizer, found, *, stop=(), at_once=False, **options):
    eos = tokenizer.encode(EOS).tolist()
    choice = Choice(0, tokenizer, TextOptions(stop=stop, **options), eos)
    taken = []
    for output in found:
        choice.feed(output)
        if choice.finish is not None or not at_once:
            taken.append(choice.take())
        if choice.finish is not None:
            break
    return choice, [delta for delta in taken if delta is not None]


TEXT = "one two ###END### three 👍🏽 four"


@pytest.mark.parametrize("stop", [(), ("###END###",), ("👍🏽",), ("r th", "#x")])
def test_a_stream_shows_what_a_whole_answer_shows(tokenizer, stop):
    found = outputs(tokenizer, TEXT)
    _, pieces = deltas(tokenizer, found, stop=stop)
    _, (whole,) = deltas(tokenizer, found, stop=stop, at_once=True)
    assert merged(pieces) == merged([whole])
    ends = [TEXT.index(s) for s in stop if s in TEXT]
    assert whole.text == TEXT[: min(ends, default=len(TEXT))]
    assert whole.finish is (STOP if ends else LENGTH)
    assert [delta.finish for delta in pieces[:-1]] == [None] * (len(pieces) - 1)


def test_tokens_are_shown_with_their_text_and_not_beyond_a_stop_string(tokenizer):
    choice, pieces = deltas(tokenizer, outputs(tokenizer, TEXT), stop=("###END###",))
    shown = 0
    for delta in pieces:
        shown += len(delta.text)
        assert all(token.offset < shown for token in delta.tokens)
    tokens = merged(pieces).tokens
    assert "".join(tokenizer.token_text(token.token) for token in tokens).startswith("one two ")
    assert len(tokens) < choice.generated < len(tokenizer.encode(TEXT))


def test_every_token_is_shown_without_a_stop_string(tokenizer):
    choice, pieces = deltas(tokenizer, outputs(tokenizer, TEXT))
    assert len(merged(pieces).tokens) == choice.generated == len(tokenizer.encode(TEXT))


def test_an_answer_cut_inside_a_character_ends_in_its_replacement(tokenizer):
    *found, last, _ = outputs(tokenizer, "a€")
    last = Output(request="r", token=last.token, finish=LENGTH)
    _, pieces = deltas(tokenizer, [*found, last])
    assert merged(pieces).text == "a\ufffd"


def test_the_end_token_is_counted_and_not_shown(tokenizer):
    choice, pieces = deltas(tokenizer, outputs(tokenizer, f"ab{EOS}", STOP))
    assert merged(pieces).text == "ab"
    assert merged(pieces).finish is STOP
    assert choice.generated == len(merged(pieces).tokens) + 1


def test_a_held_stop_prefix_comes_out_at_the_end(tokenizer):
    _, pieces = deltas(tokenizer, outputs(tokenizer, "one ###EN"), stop=("###END###",))
    assert merged(pieces).text == "one ###EN"
    assert merged(pieces).finish is LENGTH


def test_what_ended_an_answer_is_shown_on_demand(tokenizer):
    _, pieces = deltas(tokenizer, outputs(tokenizer, TEXT), stop=("###END###",), keep_stop=True)
    assert merged(pieces).text == "one two ###END###"
    found = outputs(tokenizer, f"ab{EOS}", STOP)
    assert merged(deltas(tokenizer, found, keep_stop=True)[1]).text == "ab"
    shown = merged(deltas(tokenizer, found, keep_stop=True, special=True)[1])
    assert shown.text == f"ab{EOS}"
    assert merged(deltas(tokenizer, found, special=True)[1]).text == "ab"


def test_special_tokens_inside_an_answer_are_shown_on_demand(tokenizer):
    found = outputs(tokenizer, f"ab{EOS}cd")
    assert merged(deltas(tokenizer, found)[1]).text == "abcd"
    assert merged(deltas(tokenizer, found, special=True)[1]).text == f"ab{EOS}cd"


def test_no_stop_string_ends_an_answer_before_its_least_tokens(tokenizer):
    found = outputs(tokenizer, "xaxbxc")
    ends = [len(tokenizer.encode("xaxbxc"[:end])) for end in (1, 3)]
    for least, text in ((0, ""), (ends[0], "xa"), (ends[1], "xaxb")):
        _, pieces = deltas(tokenizer, found, stop=("x",), min_tokens=least)
        assert merged(pieces).text == text
    # A string that begins before and ends after it counts.
    _, pieces = deltas(tokenizer, found, stop=("xb",), min_tokens=ends[1])
    assert merged(pieces).text == "xa"


@pytest.mark.parametrize("at_once", [False, True])
def test_an_answer_has_the_ids_of_all_its_tokens_on_demand(tokenizer, at_once):
    text = f"one 👍🏽 two{EOS}"
    found = outputs(tokenizer, text, STOP)
    choice, pieces = deltas(tokenizer, found, token_ids=True, at_once=at_once)
    assert list(merged(pieces).ids) == tokenizer.encode(text).tolist()
    assert len(merged(pieces).ids) == choice.generated
    assert merged(deltas(tokenizer, found)[1]).ids == ()


def test_a_choice_that_meets_its_stop_string_is_aborted_while_others_run(tokenizer):
    released = []

    async def main():
        tokens = tokenizer.encode("x")
        prompts = [Prompt(id=id_, tokens=tokens, sampling=SamplingParams()) for id_ in "ab"]
        loop = asyncio.get_running_loop()
        subscription = Subscription(tuple(prompts), loop, lambda _, ids: released.append(ids))
        choices = [Choice(i, tokenizer, TextOptions(stop=("x",)), ()) for i in range(2)]
        generation = Generation(subscription, choices, lambda _: None)
        for request, text in (("a", "x"), ("b", "y"), ("a", "z")):
            (token,) = tokenizer.encode(text).tolist()
            subscription.push(TimedOutput(0.0, Output(request=request, token=token)))
        return await anext(generation.deltas())

    assert [(delta.index, delta.text, delta.finish) for delta in asyncio.run(main())] == [
        (0, "", STOP),
        (1, "y", None),
    ]
    assert released == [("a",)]


def test_seeds_of_choices_differ_and_the_first_is_the_clients():
    seeds = [derived_seed(-3, i) for i in range(100)]
    assert seeds[0] == (1 << 64) - 3
    assert len(set(seeds)) == 100
    assert all(0 <= seed < 1 << 64 for seed in seeds)


@pytest.mark.parametrize("value", [float("-inf"), float("nan"), -1e30])
def test_json_has_no_infinity(value):
    assert finite(value) == -9999.0
