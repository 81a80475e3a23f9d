"""What every model does whose rows may be on the host: prefixes come from each tier, requests are
retracted and aborted at any step, the host is full. Each takes an ``OffloadCase`` and a buffer.
"""

from stratakv.core.ids import RequestId
from tests.engines import (
    all_free,
    computing,
    drain,
    evict_device,
    greedy,
    on_host,
    on_storage,
    retract_youngest,
    run,
    tokens_of,
)
from tests.offloading import ANSWER, answers, by_name, submit
from tests.storage_cases import PATIENT, Shelf, attach_backend, format_of


def whole_pages(case, prompt):
    """Tokens of the pages that a prompt can stand on."""
    page = case.plain["page_tokens"]
    return (len(prompt) - 1) // page * page


def asked(case, parts, name, prompt):
    """What it was answered, which must be right; the first output."""
    outputs = run(parts, greedy(name, prompt, ANSWER))[name]
    assert tokens_of(outputs) == case.right(tuple(prompt))[0]
    return outputs[0]


def prefix_from_the_host(case, buffer, prompt, selected):
    with case.engine(buffer, selected=selected) as parts:
        answers([prompt], parts)
        evict_device(parts)
        again = asked(case, parts, "again", prompt)
        assert again.cached == on_host(parts.spec, whole_pages(case, prompt))


def prefix_from_a_store(case, buffer, prompt, selected):
    """After a restart."""
    shelf = Shelf(format_of(case.spec(buffer)), 1 << 30)
    for name, stored in (("first", 0), ("second", whole_pages(case, prompt))):
        with case.engine(buffer, selected=selected, **PATIENT) as parts:
            attach_backend(parts, shelf)
            first = asked(case, parts, name, prompt)
            assert first.cached == on_storage(parts.spec, stored)
            parts.cache.progress.settle()


def retracted_again_and_again(case, buffer, prompts, after):
    """The youngest, each ``after`` steps, three times."""
    with case.engine(buffer, selected=2 * case.least(buffer)) as parts:
        submit(parts, prompts)
        outputs = []
        for step in range(3 * after):
            outputs += parts.engine.step()
            if step % after == after - 1 and len(computing(parts)) > 1:
                retract_youngest(parts)
                parts.engine.check()
        outputs += drain(parts)
        assert list(map(tokens_of, by_name(outputs, len(prompts)))) == case.right(*prompts)
        assert parts.cache.progress.flush()
        assert all_free(parts)


def two_of_four_aborted(case, buffer, prompts, after):
    with case.engine(buffer, selected=2 * case.least(buffer)) as parts:
        submit(parts, prompts)
        outputs = []
        for _ in range(after):
            outputs += parts.engine.step()
            parts.engine.check()
        parts.engine.abort(RequestId("0"))
        parts.engine.abort(RequestId("2"))
        parts.engine.check()
        outputs += drain(parts)
        found = by_name(outputs, 4)
        for at in (1, 3):
            assert tokens_of(found[at]) == case.right(*prompts)[at]
        assert parts.cache.progress.flush()
        assert all_free(parts)


def a_full_host(case, buffer, prompts, host):
    with case.engine(buffer, selected=2 * case.least(buffer), host=host) as parts:
        assert answers(prompts, parts) == case.right(*prompts)
        assert parts.cache.progress.flush()
        assert all_free(parts)
