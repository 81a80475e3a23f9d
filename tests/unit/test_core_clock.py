import pytest

from stratakv.core.clock import ManualClock, MonotonicClock


def test_the_machines_clock_never_goes_back() -> None:
    clock = MonotonicClock()
    readings = [clock.now_s() for _ in range(100)]
    assert readings == sorted(readings)


def test_a_manual_clock_moves_only_when_moved() -> None:
    clock = ManualClock(start_s=5.0)
    assert (clock.now_s(), clock.now_s()) == (5.0, 5.0)
    clock.advance(1.5)
    clock.advance(0.0)
    assert clock.now_s() == 6.5


def test_a_manual_clock_refuses_to_go_back() -> None:
    clock = ManualClock()
    with pytest.raises(ValueError, match="cannot go back"):
        clock.advance(-0.1)
    assert clock.now_s() == 0.0
