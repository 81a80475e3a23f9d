"""Whose turn it is: those that were retracted in the order of their submission, then new ones in
theirs; who is put back, or waits for the role meanwhile, keeps its place.
"""

import numpy as np
import pytest

from stratakv.core.ids import RequestId
from stratakv.core.page_keys import Namespace, PageHasher
from stratakv.engine.backlog import Backlog
from stratakv.engine.request import Prompt, Request, SamplingParams, Signal


def request(serial, *signals):
    prompt = Prompt(
        id=RequestId(str(serial)), tokens=np.array([1], np.int32), sampling=SamplingParams()
    )
    prefix = PageHasher(Namespace(model=b"m", spec_digest=b"s"), 4)
    made = Request(prompt=prompt, prefix=prefix, total_tokens=2, serial=serial)
    for signal in signals:
        made.signal(signal)
    return made


def retracted(serial):
    return request(serial, Signal.ADMITTED, Signal.RETRACT)


def serials(backlog):
    return [backlog.pop().serial for _ in range(len(backlog))]


def test_new_requests_come_in_order():
    backlog = Backlog()
    for serial in (1, 2, 3):
        backlog.submit(request(serial))
    assert len(backlog) == 3
    assert serials(backlog) == [1, 2, 3]


@pytest.mark.parametrize("order", [(4, 2, 5), (5, 4, 2), (2, 5, 4)])
def test_retracted_ones_come_first_in_order_of_submission(order):
    """In whichever order they left: the youngest leaves first."""
    backlog = Backlog()
    backlog.submit(request(1))
    for serial in order:
        backlog.put_back([retracted(serial)])
    backlog.submit(request(6))
    assert serials(backlog) == [2, 4, 5, 1, 6]


def test_those_put_back_keep_their_places():
    backlog = Backlog()
    backlog.put_back([retracted(3), retracted(7)])
    for serial in (8, 9, 10):
        backlog.submit(request(serial))
    looked_at = [backlog.pop() for _ in range(4)]
    assert [one.serial for one in looked_at] == [3, 7, 8, 9]
    backlog.put_back([looked_at[1], looked_at[2], looked_at[3]])  # the first was admitted
    assert serials(backlog) == [7, 8, 9, 10]


def test_any_of_them_can_be_removed():
    backlog = Backlog()
    waiting, gone = request(8), retracted(3)
    backlog.put_back([gone, retracted(4)])
    for one in (waiting, request(9)):
        backlog.submit(one)
    backlog.remove(waiting)
    backlog.remove(gone)
    assert len(backlog) == 2
    assert serials(backlog) == [4, 9]
    with pytest.raises(ValueError, match="not in"):
        backlog.remove(waiting)


def test_who_is_blocked_gets_no_turn_until_it_has_its_old_place_again():
    backlog = Backlog()
    backlog.put_back([retracted(3)])
    for serial in (8, 9, 10):
        backlog.submit(request(serial))
    both = [backlog.pop(), backlog.pop()]
    for one in both:
        backlog.block(one)
    assert (len(backlog), backlog.ready, backlog.blocked, backlog.retracted) == (4, 2, 2, 1)
    assert backlog.blocked_retracted == both[:1]
    assert backlog.head.serial == 9
    for one in both:
        backlog.unblock(one)
        backlog.unblock(one)
    assert backlog.blocked_retracted == []
    assert serials(backlog) == [3, 8, 9, 10]


def test_who_is_blocked_can_be_removed_and_is_the_head_where_nobody_is_left():
    backlog = Backlog()
    blocked = [retracted(3), request(8), request(9)]
    for one in blocked:
        backlog.block(one)
    assert backlog.head is blocked[0]
    for one in blocked[:2]:
        backlog.remove(one)
    assert (len(backlog), backlog.blocked, backlog.retracted) == (1, 1, 0)
    assert backlog.head is blocked[2]
