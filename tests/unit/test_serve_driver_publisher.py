"""Who follows the engine is called on its thread, after every turn, and told of every end."""

import asyncio
import threading
from dataclasses import dataclass, field

import numpy as np
import pytest

from stratakv.core.clock import MonotonicClock
from stratakv.core.errors import RequestError
from stratakv.core.ids import RequestId
from stratakv.engine.request import Prompt, SamplingParams
from stratakv.serve.driver import EngineDriver, Health
from stratakv.serve.errors import ApiError
from stratakv.testing.patience import PATIENCE_S, wait_until
from tests.serving import EchoEngine


@dataclass
class Publisher:
    engine: EchoEngine
    steps: list[int] = field(default_factory=list)  # the engine's count at each call
    threads: set[int] = field(default_factory=set)
    closed: int = 0

    def step_done(self):
        assert not self.closed
        self.threads.add(threading.get_ident())
        self.steps.append(self.engine.steps)

    def close(self):
        self.threads.add(threading.get_ident())
        self.closed += 1


def driven(engine):
    publisher = Publisher(engine)
    driver = EngineDriver(engine, max_waiting=8, clock=MonotonicClock(), publisher=publisher)
    driver.start()
    return driver, publisher


async def ask(driver):
    prompt = Prompt(
        id=RequestId("a"),
        tokens=np.arange(4, dtype=np.int32),
        sampling=SamplingParams(max_tokens=3, temperature=0.0),
    )
    with driver.subscribe((prompt,)) as subscription:
        await subscription.accepted()
        while True:
            for timed in await subscription.take():
                if timed.output.finish is not None:
                    return


def test_every_step_is_followed_by_one_call_on_the_engines_thread():
    engine = EchoEngine()
    driver, publisher = driven(engine)
    asyncio.run(ask(driver))
    wait_until(lambda: engine.steps in publisher.steps)
    assert asyncio.run(driver.flush())
    wait_until(lambda: publisher.steps.count(engine.steps) > 1)  # what happened between steps too
    assert driver.stop(PATIENCE_S)
    assert set(range(1, engine.steps + 1)) <= set(publisher.steps)
    assert publisher.threads == engine.threads
    assert publisher.closed == 1


def test_a_follower_is_notified_of_the_engines_death():
    engine = EchoEngine(failure=ValueError("seeded"))
    driver, publisher = driven(engine)
    with pytest.raises((ApiError, RequestError)):
        asyncio.run(ask(driver))
    wait_until(lambda: publisher.closed)
    assert driver.stop(PATIENCE_S)
    assert driver.health is Health.FAILED
    assert publisher.closed == 1
