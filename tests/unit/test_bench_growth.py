"""``stratakv bench growth``: its rows, and what one of them is made of."""

import pytest

from stratakv.bench import growth
from stratakv.bench.growth import StepCase, StoreCase, question_us, step_us
from stratakv.bench.growth_bytes import copies_us, stored_us


def test_each_cost_is_measured_at_a_size_and_at_ten_times_that(monkeypatch, capsys):
    """Costs are given: what is asked for is the arithmetic, and which case is which."""
    monkeypatch.setattr(growth, "step_us", lambda case, steps: 10.0 * case.running + case.waiting)
    monkeypatch.setattr(growth, "question_us", lambda case, repeats: float(case.asked) ** 0.5)
    monkeypatch.setattr(growth, "copies_us", lambda pages, repeats: float(pages))
    monkeypatch.setattr(growth, "stored_us", lambda pages, repeats: float(pages) ** 0.9)
    cases = {case["name"]: case for case in growth.run()["cases"]}
    assert {name: case["exponent"] for name, case in cases.items()} == pytest.approx(
        {
            "a step, by requests that run": 1.0,
            "a step, by requests that wait": 0.641474,  # (160 + 1000) / (160 + 100)
            "a step, by tokens of each": 0.0,
            "a step, by pages that are cached": 0.0,
            "a question to a file store, by keys": 0.5,
            "the same, by pages in the store": 0.0,
            "pages to the host and back, by pages": 1.0,
            "pages into a store and out, by pages": 0.9,
        },
        abs=0.01,
    )
    assert {case["allowed"] for case in cases.values()} == {0.0, 1.0}
    assert capsys.readouterr().out.count("at most") == len(cases)


def test_steps_questions_and_moves_of_any_size_are_what_their_case_says():
    """Each asserts it."""
    small = StepCase(running=2, context=70, waiting=3, cached=4)
    assert step_us(small, 3) > 0
    assert question_us(StoreCase(asked=5, stored=2), 2) > 0
    assert copies_us(3, 1) > 0
    assert stored_us(3, 1) > 0
