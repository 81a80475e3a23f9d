"""Prompts that another engine computes, where rows of pages may be read on the host: what does not
fit the device is written to host pages, and its request decodes from there.

Pages of both tiers that nobody owns are NaN, and every step is followed by a check that every page
has one owner. An engine without offload, whose device holds everything, says what is right. In
`make test` one model goes over every link, the others over one.
"""

from contextlib import ExitStack, contextmanager
from itertools import product

import pytest

from stratakv.core.ids import RequestId
from stratakv.engine.request import Phase
from stratakv.spec.groups import Home
from stratakv.spec.offload import selected_group
from stratakv.testing.hand_off import HandOffSide, LocalHandOff
from tests.engines import evict_device, greedy, small_engine, tokens_of
from tests.fixtures.deepseek_v32 import random_tokens
from tests.offloading import ANSWER, CASES, CountedRows, rows_of, spilled
from tests.pairs import Pair
from tests.transport_pairs import Link, mooncake, settle, tcp, untidy

BUFFER = {"small": 24, "glm": 24, "v4": 8}
PREFILL, DECODE = HandOffSide
LENGTHS = {"small": (60, 97), "glm": (60, 97), "v4": (96, 151)}
LINKS = {
    "local": LocalHandOff,
    "loopback": Link,
    "untidy": lambda: Link(untidy(1), untidy(2)),
    "nixl": lambda: Link(tcp, tcp),
    "mooncake": lambda: Link(mooncake, mooncake),
}


@contextmanager
def offloading_pair(name, selected=None, host=None, link="local"):
    """``selected`` and ``host``: pages of the group whose home is the host, where it decodes; None:
    device pages for one request, host pages for all."""
    case, buffer, link = CASES[name], BUFFER[name], LINKS[link]()
    with ExitStack() as undo:
        prefill = undo.enter_context(
            small_engine(
                case.model, case.config(buffer), *case.pages(100, 100),
                role=link.roles[PREFILL], home=Home.DEVICE,
            )
        )  # fmt: skip
        decode = undo.enter_context(case.engine(buffer, selected, host, role=link.roles[DECODE]))
        if isinstance(link, Link):
            undo.callback(link.close)
        yield Pair(link, prefill, decode)


def prompts(name, count):
    first, last = LENGTHS[name]
    return rows_of(random_tokens(seed, first + 13 * seed % (last - first)) for seed in range(count))


def served(pair, some, first=0):
    """All at once; what each is answered."""
    return pair.run(*(greedy(f"{first + at}", prompt, ANSWER) for at, prompt in enumerate(some)))


def over(pair):
    """Nothing is left of anything."""
    if isinstance(pair.link, Link):
        settle(pair)
    else:
        pair.assert_nothing_left()


def until(pair, phase, name="0"):
    while pair.phase(DECODE, name) is not phase:
        pair.step()


@pytest.mark.parametrize(
    ("name", "link"),
    [
        ("glm", "loopback"),
        *product(["small"], LINKS),
        ("v4", "untidy"),
        *(pytest.param("v4", link, marks=pytest.mark.long) for link in LINKS if link != "untidy"),
    ],
)
def test_answers_are_those_of_one_engine_that_has_everything_on_its_device(name, link):
    some = prompts(name, 4)
    with offloading_pair(name, link=link) as pair:
        assert served(pair, some) == CASES[name].right(*some)
        assert CountedRows.rows, "nobody decodes from the host"
        assert not CountedRows.pages_read, "no chunk of a prompt is computed here"
        over(pair)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name == "small" else pytest.mark.long) for name in BUFFER],
)
def test_twenty_conversations_go_on_after_their_hand_offs(name):
    """What a first turn has left on the decode side is not sent again."""
    case, page = CASES[name], CASES[name].plain["page_tokens"]
    asked = rows_of(prompt[: LENGTHS[name][0] - 20] for prompt in prompts(name, 20))
    with offloading_pair(name, case.least(BUFFER[name]) + 4, link="loopback") as pair:
        for turn in range(2):
            right = case.right(*asked, answer=6)
            names = [f"{100 * turn + at}" for at in range(20)]
            assert right == pair.run(
                *(greedy(name, prompt, 6) for name, prompt in zip(names, asked, strict=True))
            )
            before = asked
            asked = rows_of(
                [*prompt, *answer, *random_tokens(50, page)]
                for prompt, answer in zip(asked, right, strict=True)
            )
        cached = [pair.outputs(name)[0].cached for name in names]
        assert sum(one.device + one.host for one in cached) >= 10 * len(before[0]) // page
        assert CountedRows.rows
        over(pair)


@pytest.mark.parametrize("name", BUFFER)
def test_who_fits_the_device_is_received_there(name):
    some = prompts(name, 4)
    with offloading_pair(name, 100) as pair:
        assert served(pair, some) == CASES[name].right(*some)
        assert not CountedRows.rows + spilled(pair.decode)
        over(pair)


@pytest.mark.parametrize("tokens", [63, 64, 65])
def test_a_prompt_may_end_with_its_page(tokens):
    """Of 8 tokens; what is filling stays on the device."""
    some = rows_of([random_tokens(7, tokens)])
    with offloading_pair("small") as pair:
        assert served(pair, some) == CASES["small"].right(*some)
        assert CountedRows.rows
        over(pair)


@pytest.mark.parametrize("name", ["small", "v4"])
def test_a_prompt_longer_than_the_device_is_received_and_its_prefix_is_a_hit_there(name):
    """It has no page there of the selected rows but its buffer, one that fills, and two more."""
    case, page = CASES[name], CASES[name].plain["page_tokens"]
    (prompt,) = rows_of([random_tokens(1, LENGTHS[name][1])])
    asked = rows_of([[*prompt, *random_tokens(2, 9)]])
    with offloading_pair(name) as pair:
        assert served(pair, [prompt]) == case.right(prompt)
        group, moved = selected_group(pair.decode.spec), dict(pair.link.moved)
        assert moved[group] == -(-len(prompt) // page)
        assert served(pair, asked, first=1) == case.right(*asked)
        again = pair.link.moved[group] - moved[group]
        assert again <= -(-len(asked[0]) // page) - len(prompt) // page, "what is there is not sent"
        evict_device(pair.decode)
        rest = rows_of([[*prompt, *random_tokens(3, 9)]])
        assert served(pair, rest, first=2) == case.right(*rest)
        over(pair)


@pytest.mark.parametrize("selected", [None, 30])
def test_who_receives_what_another_one_has_meanwhile_reads_its_pages(selected):
    """The same prompt several times at once: some have it on the device, some on the host, and what
    comes twice is free again at once."""
    one, other = prompts("small", 2)
    some = (one, other, one, (*one, 3), one)
    with offloading_pair("small", selected) as pair:
        assert served(pair, some) == CASES["small"].right(*some)
        over(pair)


@pytest.mark.parametrize("after", range(0, 12, 2))
@pytest.mark.parametrize("link", ["local", "untidy"])
def test_an_abort_at_any_moment_of_the_transfer_leaves_nothing_behind(link, after):
    some = prompts("small", 4)
    with offloading_pair("small", 2 * CASES["small"].least(24), link=link) as pair:
        for at, prompt in enumerate(some):
            pair.submit(greedy(f"{at}", prompt, ANSWER))
        until(pair, Phase.TRANSFERRING)
        for _ in range(after):
            pair.step()
        for name in ("0", "2"):
            for parts in pair.sides.values():
                parts.engine.abort(RequestId(name))
        pair.drain()
        for at in (1, 3):
            assert tokens_of(pair.outputs(f"{at}")) == CASES["small"].right(*some)[at]
        over(pair)


def test_host_pages_that_are_written_are_nobody_elses_until_the_writer_has_stopped():
    some = prompts("small", 2)
    with offloading_pair("small", host=30) as pair:
        pair.link.stop()
        for at, prompt in enumerate(some):
            pair.submit(greedy(f"{at}", prompt, ANSWER))
        until(pair, Phase.TRANSFERRING)
        held = len(some[0]) // 8

        def free():
            return 30 - pair.decode.cache.tiers.pools.tiers[1][1].available()

        assert free() == held
        pair.decode.engine.abort(RequestId("0"))
        for _ in range(20):
            pair.step()
        assert free() >= held
        pair.link.go()
        pair.drain()
        assert tokens_of(pair.outputs("1")) == CASES["small"].right(*some)[1]
        over(pair)


@pytest.mark.parametrize("name", ["small", "v4"])
def test_who_was_received_on_the_host_is_retracted_and_goes_on(name):
    case, some = CASES[name], prompts(name, 3)
    with offloading_pair(name, 2 * CASES[name].least(BUFFER[name])) as pair:
        for at, prompt in enumerate(some):
            pair.submit(greedy(f"{at}", prompt, ANSWER))
        for who, tokens in (("0", 2), ("1", 5), ("0", 9)):
            while len(pair.outputs(who)) < tokens:
                pair.step()
            pair.decode.engine.retract(RequestId(who))
        pair.drain()
        assert [tokens_of(pair.outputs(f"{at}")) for at in range(3)] == case.right(*some)
        assert pair.decode.cache.tiers.pools.counters.retracted >= 3  # and who is resident again
        over(pair)


@pytest.mark.parametrize("host", [13, 16, 19, 25, 34])
def test_a_full_host_is_waited_for_and_fails_nobody(host):
    some = prompts("small", 4)
    with offloading_pair("small", 2 * CASES["small"].least(24), host) as pair:
        assert served(pair, some) == CASES["small"].right(*some)
        over(pair)


def test_nothing_of_a_request_that_receives_leaves_the_device():
    """It stands on many pages that could, and somebody else waits for room."""
    head = random_tokens(3, 120)
    asked = {"first": head[:100], "receives": head, "waits": random_tokens(4, 100)}
    with offloading_pair("small", 28, host=14) as pair:
        pair.run(greedy("first", asked["first"], ANSWER))
        pair.link.stop()
        pair.submit(greedy("receives", asked["receives"], ANSWER))
        until(pair, Phase.TRANSFERRING, "receives")
        pair.submit(greedy("waits", asked["waits"], ANSWER))
        before = spilled(pair.decode)
        for _ in range(20):
            pair.step()
        assert spilled(pair.decode) == before
        pair.link.go()
        pair.drain()
        for name, tokens in asked.items():
            (right,) = CASES["small"].right(tuple(tokens))
            assert tokens_of(pair.outputs(name)) == right
        over(pair)


def test_who_was_received_on_the_device_may_leave_once_it_decodes():
    """For the next one that receives; and what was spilled comes back from a retraction."""
    asked = rows_of(random_tokens(seed, 110) for seed in range(3))
    with offloading_pair("small", 24) as pair:
        for at, tokens in enumerate(asked):
            pair.submit(greedy(f"{at}", tokens, ANSWER))
        while len(pair.outputs("0")) < 4:
            pair.step()
        pair.decode.engine.retract(RequestId("0"))
        pair.drain()
        for at, tokens in enumerate(asked):
            assert tokens_of(pair.outputs(f"{at}")) == CASES["small"].right(tokens)[0]
        over(pair)
