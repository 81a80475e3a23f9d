import asyncio
import threading
from concurrent.futures import Future
from contextlib import contextmanager

import numpy as np
import pytest

from stratakv.core.clock import MonotonicClock
from stratakv.core.ids import RequestId
from stratakv.engine.request import FinishReason, Prompt, SamplingParams
from stratakv.serve.driver import EngineDriver, Health
from stratakv.serve.errors import ApiError, ClientGoneError
from stratakv.testing.patience import PATIENCE_S
from tests.serving import EchoEngine


def prompts(name, count=1, *, length=4, max_tokens=3):
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    tokens = np.arange(length, dtype=np.int32)
    return tuple(
        Prompt(id=RequestId(f"{name}-{i}"), tokens=tokens, sampling=sampling) for i in range(count)
    )


@contextmanager
def driving(engine, *, max_waiting=8, start=True):
    driver = EngineDriver(engine, max_waiting=max_waiting, clock=MonotonicClock())
    if start:
        driver.start()
    try:
        yield driver
    finally:
        engine.gate.set()
        assert driver.stop(PATIENCE_S)


async def read(driver, wanted):
    """All tokens of one client's requests, by request."""
    found = {prompt.id: [] for prompt in wanted}
    unfinished = set(found)
    with driver.subscribe(wanted) as subscription:
        await subscription.accepted()
        while unfinished:
            for timed in await subscription.take():
                found[timed.output.request].append(timed.output.token)
                if timed.output.finish is not None:
                    unfinished.discard(timed.output.request)
    return found


async def exhaust(subscription):
    while True:
        await subscription.take()


def test_every_token_of_many_clients_arrives_and_one_thread_calls_the_engine():
    engine = EchoEngine(batch=3)

    async def main(driver):
        return await asyncio.gather(*(read(driver, prompts(f"c{i}", 2)) for i in range(20)))

    with driving(engine, max_waiting=40) as driver:
        for found in asyncio.run(main(driver)):
            assert list(found.values()) == [[0, 1, 2], [0, 1, 2]]
        assert driver.open_requests == 0
    assert len(engine.threads) == 1
    assert threading.get_ident() not in engine.threads


def test_clients_on_two_event_loops_are_served():
    with driving(EchoEngine()) as driver:
        found = []
        threads = [
            threading.Thread(target=lambda i=i: found.append(asyncio.run(read(driver, prompts(i)))))
            for i in range(2)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
        assert sorted(found, key=str) == [{"0-0": [0, 1, 2]}, {"1-0": [0, 1, 2]}]


def test_outputs_of_one_step_wake_a_loop_once():
    engine = EchoEngine()

    async def main(driver):
        loop = asyncio.get_running_loop()
        calls = []
        engine.gate.clear()
        with driver.subscribe(prompts("a", 4, max_tokens=1)) as subscription:
            await subscription.accepted()
            wake = loop.call_soon_threadsafe
            loop.call_soon_threadsafe = lambda *args: (calls.append(args), wake(*args))
            engine.gate.set()
            outputs = await subscription.take()
        assert len(outputs) == 4
        assert len(calls) == 1

    with driving(engine) as driver:
        asyncio.run(main(driver))


def test_one_prompt_that_cannot_be_served_refuses_its_siblings_too():
    engine = EchoEngine()

    async def main(driver):
        with driver.subscribe((*prompts("a"), *prompts("long", length=401))) as subscription:
            with pytest.raises(ApiError, match="more than 400") as caught:
                await subscription.accepted()
            assert caught.value.status == 400
        assert (await driver.stats()).running == 0
        return await read(driver, prompts("b"))

    with driving(engine) as driver:
        assert asyncio.run(main(driver)) == {"b-0": [0, 1, 2]}
    assert "a-0" in engine.aborted


def test_leaving_a_subscription_aborts_what_is_unfinished():
    engine = EchoEngine()

    async def main(driver):
        with driver.subscribe(prompts("a", 2, max_tokens=10**6)) as subscription:
            await subscription.accepted()
            await subscription.take()
        assert (await driver.stats()).running == 0

    with driving(engine) as driver:
        asyncio.run(main(driver))
        assert driver.open_requests == 0
    assert set(engine.aborted) == {"a-0", "a-1"}


def test_a_client_that_is_gone_stops_waiting():
    async def main(driver):
        with driver.subscribe(prompts("a")) as subscription:
            await subscription.accepted()
            asyncio.get_running_loop().call_soon(subscription.fail, ClientGoneError("gone"))
            with pytest.raises(ClientGoneError):
                await exhaust(subscription)

    engine = EchoEngine()
    with driving(engine) as driver:
        engine.gate.clear()
        asyncio.run(main(driver))


def test_a_closed_event_loop_frees_its_requests():
    engine = EchoEngine()

    async def main(driver):
        driver.subscribe(prompts("a", max_tokens=10**6))

    with driving(engine) as driver:
        engine.gate.clear()
        asyncio.run(main(driver))
        engine.gate.set()
        assert engine.abort_seen.wait(PATIENCE_S)
        assert driver.open_requests == 0
        assert asyncio.run(read(driver, prompts("b"))) == {"b-0": [0, 1, 2]}


def test_waiting_requests_are_bounded_and_the_first_token_ends_the_wait():
    engine = EchoEngine()

    async def main(driver):
        engine.gate.clear()
        with driver.subscribe(prompts("a", 3)) as subscription:
            with pytest.raises(ApiError, match="--max-waiting is 4") as caught:
                driver.subscribe(prompts("b", 2))
            assert caught.value.status == 503
            assert caught.value.headers == {"Retry-After": "1"}
            engine.gate.set()
            await subscription.accepted()
            await subscription.take()
            await driver.stats()
            driver.subscribe(prompts("c", 4)).__exit__()
        await driver.stats()
        driver.subscribe(prompts("d", 4)).__exit__()

    with driving(engine, max_waiting=4) as driver:
        asyncio.run(main(driver))


def test_an_engine_that_dies_notifies_everyone_and_takes_no_more():
    engine = EchoEngine(failure=ValueError("seeded"))

    async def main(driver):
        engine.gate.clear()
        with driver.subscribe(prompts("a")) as subscription:
            await subscription.accepted()
            asks = [asyncio.ensure_future(driver.stats()), asyncio.ensure_future(driver.flush())]
            await asyncio.sleep(0)
            engine.gate.set()
            with pytest.raises(ApiError) as caught:
                await subscription.take()
            assert (caught.value.status, caught.value.code) == (500, "engine_failed")
            assert "seeded" not in caught.value.message
            for ask in asks:
                with pytest.raises(ApiError):
                    await ask
        with pytest.raises(ApiError, match="failed"):
            driver.subscribe(prompts("b"))
        with pytest.raises(ApiError, match="failed"):
            await driver.stats()

    with driving(engine) as driver:
        asyncio.run(main(driver))
        assert driver.health is Health.FAILED
    assert driver.health is Health.FAILED


def test_draining_finishes_what_runs_and_abort_all_ends_it():
    engine = EchoEngine()

    async def main(driver):
        engine.gate.clear()
        with (
            driver.subscribe(prompts("a")) as short,
            driver.subscribe(prompts("b", max_tokens=10**6)) as endless,
        ):
            await short.accepted()
            driver.drain()
            with pytest.raises(ApiError, match="draining"):
                driver.subscribe(prompts("c"))
            engine.gate.set()
            last = None
            while last is None:
                last = (await short.take())[-1].output.finish
            assert last is FinishReason.LENGTH
            driver.abort_all()
            last = None
            while last is None:
                last = (await endless.take())[-1].output.finish
            assert last is FinishReason.ABORT

    with driving(engine) as driver:
        asyncio.run(main(driver))
        assert driver.open_requests == 0
    assert engine.requests == {}


def test_stopping_notifies_who_waits():
    engine = EchoEngine()

    async def main(driver):
        with driver.subscribe(prompts("a", max_tokens=10**6)) as subscription:
            await subscription.accepted()
            await asyncio.to_thread(driver.stop, 10)
            with pytest.raises(ApiError, match="shut down"):
                await exhaust(subscription)

    with driving(engine) as driver:
        asyncio.run(main(driver))


def test_flush_waits_for_an_idle_engine():
    engine = EchoEngine()

    async def main(driver):
        engine.gate.clear()
        with driver.subscribe(prompts("a", max_tokens=10**6)) as subscription:
            await subscription.accepted()
            engine.gate.set()
            assert not await driver.flush()
        assert await driver.flush()

    with driving(engine) as driver:
        asyncio.run(main(driver))


def test_a_question_that_was_given_up_does_no_harm():
    engine = EchoEngine()

    async def main(driver):
        engine.gate.clear()
        with driver.subscribe(prompts("a")) as subscription:
            await subscription.accepted()
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(driver.stats(), 0.01)
            engine.gate.set()
            await subscription.take()
        return await driver.stats()

    with driving(engine) as driver:
        assert asyncio.run(main(driver)).running == 0


def test_a_driver_that_did_not_start_takes_nothing():
    async def main(driver):
        with pytest.raises(ApiError, match="starting"):
            driver.subscribe(prompts("a"))

    with driving(EchoEngine(), start=False) as driver:
        asyncio.run(main(driver))


def test_work_is_done_on_the_engines_thread_for_any_thread():
    engine = EchoEngine()

    async def main(driver):
        return await read(driver, prompts("a"))

    with driving(engine) as driver:
        asyncio.run(main(driver))
        assert {driver.ask(threading.get_ident).result(PATIENCE_S)} == engine.threads
        driver.drain()
        assert driver.ask(lambda: 3).result(PATIENCE_S) == 3
    with pytest.raises(ApiError, match="stopped"):
        driver.ask(lambda: 3)


def test_who_asked_for_what_kills_the_engine_and_who_stands_behind_him_get_an_error():
    with driving(EchoEngine()) as driver:
        begun, go = threading.Event(), threading.Event()
        driver.ask(lambda: begun.set() or go.wait(PATIENCE_S))
        assert begun.wait(PATIENCE_S)
        answers = [driver.ask(work) for work in (lambda: 1, lambda: 1 // 0, lambda: 3)]
        go.set()
        assert answers[0].result(PATIENCE_S) == 1
        for answer in answers[1:]:
            with pytest.raises(ApiError) as caught:
                answer.result(PATIENCE_S)
            assert caught.value.code == "engine_failed"
        assert driver.health is Health.FAILED


def test_what_a_later_step_answers_is_passed_on_and_fails_at_once_where_the_engine_ends():
    with driving(EchoEngine()) as driver:
        asked = [Future() for _ in range(3)]
        answers = [driver.ask_later(lambda one=one: one) for one in asked]
        asked[0].set_result("joined")
        assert answers[0].result(PATIENCE_S) == "joined"
        killed = [driver.ask_later(work) for work in (lambda: 1 // 0, Future)]
        for answer in (*answers[1:], *killed):
            with pytest.raises(ApiError) as caught:
                answer.result(PATIENCE_S)
            assert caught.value.code == "engine_failed"
        asked[1].set_result("too late")
    with pytest.raises(ApiError, match="failed"):
        driver.ask_later(Future)


def test_what_a_later_step_would_answer_ends_with_a_driver_that_is_stopped():
    with driving(EchoEngine()) as driver:
        answer = driver.ask_later(Future)
        driver.ask(lambda: None).result(PATIENCE_S)
    with pytest.raises(ApiError):
        answer.result(PATIENCE_S)
