"""A wait that ends early."""

import threading

from stratakv.core.wakeup import Wakeup
from stratakv.testing.patience import PATIENCE_S


def test_a_wait_for_which_nothing_comes_says_so():
    assert not Wakeup().wait(0)


def test_what_came_before_ends_the_next_wait_and_no_other():
    wakeup = Wakeup()
    wakeup.set()
    wakeup.set()
    assert wakeup.wait(PATIENCE_S)
    assert not wakeup.wait(0)


def test_what_comes_meanwhile_ends_it():
    wakeup, waited = Wakeup(), []
    thread = threading.Thread(target=lambda: waited.append(wakeup.wait(PATIENCE_S)))
    thread.start()
    wakeup.set()
    thread.join(PATIENCE_S)
    assert waited == [True]
