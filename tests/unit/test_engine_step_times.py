from stratakv.core.clock import ManualClock
from stratakv.engine.step_times import StepPart, StepTimes


def test_a_part_lasts_until_the_next_begins_and_a_pause_belongs_to_none():
    clock = ManualClock()
    times = StepTimes(clock.now_s)
    times.pause()
    clock.advance(100)
    times.enter(StepPart.TREE)
    clock.advance(1)
    times.enter(StepPart.FORWARD)
    clock.advance(5)
    times.pause()
    clock.advance(100)
    times.enter(StepPart.TREE)
    clock.advance(2)
    times.enter(StepPart.TREE)
    clock.advance(3)
    times.pause()
    found = times.sums_s()
    assert found == {"schedule": 0, "tree": 6, "copies": 0, "forward": 5, "sample": 0}
