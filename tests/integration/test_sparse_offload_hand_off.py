"""Prompts that another engine computes, where rows of pages may be read on the host: who receives
is written to on the device, so all of its pages have a place there and none leaves meanwhile.
"""

from contextlib import ExitStack, contextmanager

from stratakv.core.ids import RequestId
from stratakv.engine.request import Failure, Phase
from stratakv.testing.hand_off import HandOffSide, LocalHandOff
from tests.engines import greedy, small_engine, tokens_of
from tests.fixtures.deepseek_v32 import random_tokens
from tests.integration.test_sparse_offload import (
    ANSWER,
    COUNTED,
    config,
    least,
    model,
    right,
    spilled,
)
from tests.pairs import Pair

BUFFER = 24
PREFILL, DECODE = HandOffSide


@contextmanager
def offloading_pair(selected):
    """``selected``: pages of the group whose home is the host, on the device that decodes."""
    link = LocalHandOff()
    pools = {PREFILL: (200, 200), DECODE: (200, selected)}
    with ExitStack() as undo:
        sides = [
            undo.enter_context(
                small_engine(
                    model("small"), config(BUFFER), pages, (400, 200),
                    role=link.roles[side], device_kind=COUNTED,
                )
            )
            for side, pages in pools.items()
        ]  # fmt: skip
        yield Pair(link, *sides)


def short(seed):
    return random_tokens(seed, 30)


def test_who_could_never_receive_all_its_pages_is_refused_alone_with_figures():
    with offloading_pair(least(BUFFER)) as pair:
        long, other = random_tokens(1, 120), short(2)
        pair.submit(greedy("long", long, ANSWER))
        pair.submit(greedy("short", other, ANSWER))
        pair.drain()
        (end,) = pair.outputs("long")
        assert end.failure is Failure.TRANSFER
        assert "140 tokens that come from another engine need 18 pages" in end.reason
        assert tokens_of(pair.outputs("short")) == right("small", tuple(other))[0]
        pair.assert_nothing_left()


def test_nothing_of_a_request_that_receives_leaves_the_device():
    """It stands on many pages that could, and somebody else waits for room."""
    head = random_tokens(3, 120)
    asked = {"first": head[:100], "receives": head, "waits": random_tokens(4, 100)}
    with offloading_pair(28) as pair:
        pair.run(greedy("first", asked["first"], ANSWER))
        pair.link.stop()
        pair.submit(greedy("receives", asked["receives"], ANSWER))
        while pair.phase(DECODE, "receives") is not Phase.TRANSFERRING:
            pair.step()
        pair.submit(greedy("waits", asked["waits"], ANSWER))
        for _ in range(20):
            pair.step()
        assert not spilled(pair.decode)
        pair.link.go()
        pair.drain()
        for name, tokens in asked.items():
            assert tokens_of(pair.outputs(name)) == right("small", tuple(tokens))[0]
        pair.assert_nothing_left()


def test_who_was_received_may_leave_once_it_decodes():
    """For the next one that receives; and what was spilled comes back from a retraction."""
    with offloading_pair(24) as pair:
        asked = [random_tokens(seed, 110) for seed in range(3)]
        for at, tokens in enumerate(asked):
            pair.submit(greedy(f"{at}", tokens, ANSWER))
        while len(pair.outputs("0")) < 4:
            pair.step()
        pair.decode.engine.retract(RequestId("0"))
        pair.drain()
        assert spilled(pair.decode)
        for at, tokens in enumerate(asked):
            assert tokens_of(pair.outputs(f"{at}")) == right("small", tuple(tokens))[0]
        pair.assert_nothing_left()
