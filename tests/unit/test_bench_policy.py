import json
import sys
from itertools import pairwise

import pytest

from stratakv import cli
from stratakv.bench import policy, policy_branches
from stratakv.bench.countdown import Countdown
from stratakv.bench.policy import PolicyOptions, run
from stratakv.bench.policy_branches import BranchTraffic
from stratakv.bench.policy_cache import (
    RULES,
    PoolSizes,
    build_cache,
    device_pages,
    forgo_checkpoints,
    spec_named,
)
from stratakv.bench.policy_replay import Replay, ReplayFigures, TraceTokens, unlimited_tokens
from stratakv.bench.policy_traffic import ChatTraffic, generate
from stratakv.core.errors import ConfigError
from stratakv.sim.trace import TraceRequest, read_trace, write_trace
from stratakv.spec.budget import ExpectedLoad
from stratakv.tree.policies import EVICTION_POLICIES

GOOD = '{"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [1, 2]}\n'
BRANCHES = policy_branches.generate(
    BranchTraffic(sessions=50, seed=5, document_tokens=8000, step_tokens=800, system_tokens=700)
)
CHATS = generate(ChatTraffic(chats=60, start_s=6.0))
TOKENS = TraceTokens(CHATS)


def request(at_s: float, prompt: int, answer: int, *blocks: int) -> TraceRequest:
    return TraceRequest(
        timestamp_ms=at_s * 1000, input_length=prompt, output_length=answer, hash_ids=blocks
    )


TINY = [
    request(0, 1024, 64, 0, 1),
    request(10, 1024, 1, 0, 1),  # the same again: all but the last page
    request(20, 1536, 1, 0, 2, 3),  # branches after block 0
    request(30, 1536, 1, 0, 4, 5),  # branches there again
    request(40, 600, 40, 6, 7),
    request(50, 1100, 1, 6, 8, 9),  # goes on from the one above
]


def sizes(requests, *, device_tokens=100_000, chat_tokens=None, host=False, running=4) -> PoolSizes:
    mean = sum(one.total_tokens for one in requests) // len(requests)
    load = ExpectedLoad(
        max_running=running,
        max_model_len=max(one.total_tokens for one in requests) + 1,
        chunk_tokens=512,
        chat_tokens=chat_tokens or mean,
    )
    return PoolSizes(device_tokens=device_tokens, load=load, host=host)


def replay(requests, tokens, spec, size, policy="lru", baseline=False) -> ReplayFigures:
    cache = build_cache(spec_named(spec), size, policy)
    if baseline:
        forgo_checkpoints(cache)
    return Replay(cache, size.load.chunk_tokens).run(requests, tokens)


# -- the trace -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (GOOD + "nonsense", "line 2: is not JSON"),
        ("[1]", "line 1: allowed is an object with timestamp, input_length"),
        (
            '{"timestamp": 0, "input_length": 5}',
            "line 1: allowed is an object with timestamp, input_length",
        ),
        (GOOD.replace("600", "true"), "line 1: input_length True"),
        (GOOD.replace("600", "0"), "line 1: input_length 0"),
        (GOOD.replace('h": 1', 'h": -1'), "line 1: output_length -1"),
        (
            GOOD.replace("[1, 2]", "[1]"),
            "line 1: 1 hash ids for 600 tokens; allowed is one for each 512",
        ),
        (GOOD.replace("[1, 2]", '[1, "b"]'), "line 1: hash_ids: allowed are"),
        (GOOD.replace("0, ", "NaN, ", 1), "line 1: timestamp nan"),
        (GOOD.replace("0, ", "7, ", 1) + GOOD, "line 2: timestamp lies before"),
        (GOOD + GOOD.replace("[1, 2]", "[3, 2]"), "line 2: hash id 2 follows another block"),
        (GOOD.replace("[1, 2]", "[1, 1]"), "line 1: hash id 1 follows another block"),
        ("\n", "holds no request"),
    ],
)
def test_a_line_that_cannot_be_replayed_is_named(tmp_path, text, message):
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_trace(path, "TRACE")


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.jsonl: cannot be read"):
        read_trace(tmp_path / "none.jsonl", "TRACE")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="is not UTF-8"):
        read_trace(tmp_path / "binary", "TRACE")


def test_a_written_trace_reads_the_same(tmp_path):
    write_trace(tmp_path / "trace.jsonl", CHATS)
    assert read_trace(tmp_path / "trace.jsonl", "TRACE") == CHATS


# -- tokens --------------------------------------------------------------------------------------


def test_equal_blocks_are_equal_tokens_and_answers_are_nobody_elses():
    tokens = TraceTokens(TINY)
    assert [len(tokens[at]) for at in range(len(TINY))] == [one.total_tokens for one in TINY]
    assert (tokens[0][:1024] == tokens[1][:1024]).all()
    assert (tokens[0][:512] == tokens[2][:512]).all()
    assert len({tokens[at].item(512) for at in (0, 2, 3)}) == 3
    assert len({tokens[at].item(-1) for at in range(4)}) == 4


def test_a_conversation_that_goes_on_begins_with_its_last_turn_and_the_answer():
    tokens = TraceTokens(TINY)
    assert (tokens[5][:640] == tokens[4]).all()
    forked = TraceTokens([*TINY, request(60, 1100, 1, 6, 10, 11)])
    assert not (forked[5][512:640] == forked[4][512:]).any()  # which one goes on is not known


# -- generated chats -----------------------------------------------------------------------------


def test_generated_chats_depend_on_the_seed_alone():
    traffic = ChatTraffic(chats=20, seed=3)
    assert generate(traffic) == generate(traffic)
    assert generate(traffic) != generate(ChatTraffic(chats=20, seed=4))


def test_generated_chats_interleave_and_grow_under_popular_system_prompts():
    first_blocks = [one.hash_ids[0] for one in CHATS]
    assert 1 < len(set(first_blocks)) < len(CHATS) / 8
    assert max(map(first_blocks.count, set(first_blocks))) > len(CHATS) / 6
    last_blocks = [one.full_blocks[-1] for one in CHATS if one.full_blocks]
    assert len(set(last_blocks)) > 100
    assert unlimited_tokens(TOKENS, CHATS, 64) > 0.8 * sum(one.input_length for one in CHATS)


# -- generated branches --------------------------------------------------------------------------


def test_generated_branches_depend_on_the_seed_alone():
    traffic = BranchTraffic(sessions=20, seed=3)
    assert policy_branches.generate(traffic) == policy_branches.generate(traffic)
    assert policy_branches.generate(traffic) != policy_branches.generate(
        BranchTraffic(sessions=20, seed=4)
    )


def test_generated_branches_part_inside_older_prompts(tmp_path):
    """Most of them where nobody has parted before; equal ids mean equal prefixes."""
    write_trace(tmp_path / "trace.jsonl", BRANCHES)
    assert read_trace(tmp_path / "trace.jsonl", "TRACE") == BRANCHES
    seen: set[int] = set()
    followers: dict[int, set[int]] = {}
    parted: list[int] = []
    for one in BRANCHES:
        known = [block for block in one.full_blocks if block in seen]
        if known and len(known) < len(one.full_blocks):
            parted.append(len(followers.get(known[-1], ())))
        for block, follower in pairwise(one.full_blocks):
            followers.setdefault(block, set()).add(follower)
        seen.update(one.full_blocks)
    assert len(parted) > len(BRANCHES) / 3
    assert sum(others == 1 for others in parted) > len(BRANCHES) / 6


def test_milestones_serve_branches_on_both_tiers():
    tokens, size = TraceTokens(BRANCHES), sizes(BRANCHES, device_tokens=150_000)
    ideal = replay(BRANCHES, tokens, "full", size).hit_rate
    plain = replay(BRANCHES, tokens, "window-128", size, baseline=True).hit_rate
    assert replay(BRANCHES, tokens, "window-128", size).hit_rate > 0.8 * ideal > 1.5 * plain
    assert replay(BRANCHES, tokens, "state", size).hit_rate > 0.75 * ideal


# -- replay --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "hits"),
    [
        ("full", 960 + 512 + 512 + 576),
        ("window-128", 960 + 512 + 512 + 576),  # nothing has left yet
        ("state", 960 + 512 + 512 + 576),  # the branch lies at a milestone
    ],
)
def test_a_tiny_trace_hits_what_a_reader_counts(spec, hits):
    tokens = TraceTokens(TINY)
    figures = replay(TINY, tokens, spec, sizes(TINY))
    assert figures.prompt_tokens == 1024 + 1024 + 1536 + 1536 + 600 + 1100
    assert figures.device_tokens == hits
    assert (figures.host_tokens, figures.evicted_device_pages, figures.refused_requests) == (0,) * 3
    assert unlimited_tokens(tokens, TINY, 64) == 960 + 512 + 512 + 576


def test_what_the_device_evicts_comes_back_from_the_host():
    apart = [
        request(0, 1024, 1, 0, 1),
        request(9, 2048, 64, 2, 3, 4, 5),
        request(18, 1024, 1, 0, 1),
    ]
    tokens = TraceTokens(apart)
    size = sizes(apart, device_tokens=2112)
    assert replay(apart, tokens, "full", size).hit_rate == 0
    with_host = replay(apart, tokens, "full", sizes(apart, device_tokens=2112, host=True))
    assert (with_host.device_tokens, with_host.host_tokens) == (0, 960)


def test_a_request_larger_than_the_device_is_counted_and_left_out():
    size = sizes(TINY, device_tokens=1088)
    figures = replay(TINY, TraceTokens(TINY), "full", size)
    assert figures.refused_requests == 3
    assert figures.prompt_tokens == sum(one.input_length for one in TINY)


@pytest.mark.parametrize("spec", RULES)
def test_the_cache_is_whole_after_a_replay_with_queues(spec):
    size = sizes(CHATS, device_tokens=40_000, host=True, running=2)
    cache = build_cache(spec_named(spec), size, "lru")
    figures = Replay(cache, 512).run(CHATS, TOKENS)
    assert min(figures.evicted_device_pages, figures.evicted_host_pages, figures.host_tokens) > 0
    cache.check()
    assert all(pool.free + pool.evictable == pool.total for pool in cache.tiers.pools.stats())


def test_an_unlimited_window_pool_reaches_the_ideal_exactly():
    ideal = replay(CHATS, TOKENS, "full", sizes(CHATS))
    size = sizes(CHATS, chat_tokens=128)
    assert device_pages(spec_named("window-128"), size) == (1562, 1562)
    assert replay(CHATS, TOKENS, "window-128", size).hit_rate == ideal.hit_rate


def test_checkpoints_reach_nine_tenths_of_the_ideal_where_plain_lru_reaches_half():
    size = sizes(CHATS)
    ideal = replay(CHATS, TOKENS, "full", size)
    rule = replay(CHATS, TOKENS, "window-128", size)
    plain = replay(CHATS, TOKENS, "window-128", size, baseline=True)
    assert ideal.hit_rate > 0.7
    assert 0.9 * ideal.hit_rate <= rule.hit_rate <= ideal.hit_rate
    assert 0.3 * ideal.hit_rate < plain.hit_rate < 0.6 * ideal.hit_rate


# -- the command ---------------------------------------------------------------------------------


def test_the_report_has_every_policy_and_none_beats_its_ideal(capsys):
    options = PolicyOptions(
        chats=8, device_tokens=8_000, chat_tokens=1024, max_running=2, requests=25
    )
    report = json.loads(json.dumps(run(options)))
    cases = report["cases"]
    assert len(cases) == 2 * len(EVICTION_POLICIES) * len(RULES) + len(RULES) - 1
    assert {case["policy"] for case in cases} == set(EVICTION_POLICIES)
    assert all(0 < case["ratio"] <= 1.02 for case in cases)  # LRU's bound, and nearly the others'
    assert all(case["ratio"] <= 1 for case in cases if case["policy"] == "lru")
    assert all(case["hit_rate"] <= report["unlimited_hit_rate"] for case in cases)
    assert capsys.readouterr().out.count("\n") == len(cases) + len(report) - 1 + 2


@pytest.mark.parametrize("terminal", [False, True])
def test_how_far_it_is_is_shown_now_and_then(terminal, capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    now_s = [0.0]
    progress = Countdown(4096, "requests", lambda: now_s[0])
    progress.at("lru, full, device")
    for _ in range(1024):
        now_s[0] += 1 / 64
        progress.one_more()
    progress.clear()
    shown = capsys.readouterr().err
    if terminal:
        lines = [line.strip() for line in shown.split("\r") if line.strip()]
        assert len(lines) == 32
        assert lines[-1] == "lru, full, device: 1,024 of 4,096 requests, about 48 s left"
        assert shown.endswith("\r")
        assert "\n" not in shown
    else:
        assert shown == "lru, full, device: 640 of 4,096 requests, about 54 s left\n"


def test_work_of_unequal_size_is_shown_as_a_bar(capsys):
    now_s = [0.0]
    progress = Countdown(40.0, clock=lambda: now_s[0])
    progress.at("by tier")
    now_s[0] = 12.0
    progress.one_more(10.0)
    assert capsys.readouterr().err == "by tier: [#####               ] 25%, about 36 s left\n"


def test_the_command_replays_what_it_has_saved(tmp_path, capsys):
    trace, first, second = (tmp_path / name for name in ("trace.jsonl", "1.json", "2.json"))
    flags = ["--policies", "lru", "--specs", "full", "--device-tokens", "16000"]
    made = ["--chats", "5", "--seed", "7", "--save-trace", str(trace), "--json", str(first)]
    assert cli.main(["bench", "policy", *made, *flags]) == 0
    assert cli.main(["bench", "policy", str(trace), "--json", str(second), *flags]) == 0
    capsys.readouterr()
    one, two = (json.loads(path.read_text()) for path in (first, second))
    timed = ("replay_s", "requests_s")
    for report in (one, two):
        report.pop("workload")
        report["cases"] = [
            {key: value for key, value in case.items() if key not in timed}
            for case in report["cases"]
        ]
    assert one == two


@pytest.mark.parametrize("flags", [["--chats", "5"], ["--branching", "5"]], ids=" ".join)
def test_sizes_follow_from_the_trace_where_none_are_given(flags, monkeypatch, tmp_path):
    monkeypatch.setattr(policy, "cases_of", lambda *_: [])
    path = tmp_path / "figures.json"
    assert cli.main(["bench", "policy", *flags, "--seed", "2", "--json", str(path)]) == 0
    report = json.loads(path.read_text())
    anew = (1 - report["unlimited_hit_rate"]) * report["prompt_tokens"]
    assert anew / 9 < report["device_tokens"] < report["prompt_tokens"]
    assert not report["device_tokens"] % 100


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--policies", "mru"], "--policies mru: allowed are lru, lfu"),
        (["--specs", "half"], "--specs half: allowed are full, window-128"),
        (["--chats", "0"], "--chats 0: allowed is 1 and more"),
        (["--seed", "-1"], "--seed -1: allowed is 0 and more"),
        (["--branching", "0"], "--branching 0: allowed is 1 and more"),
        (["--branching", "2", "--chats", "3"], "--chats 3: not with --branching; allowed is one"),
        (["--branching", "2", "--message-tokens", "9"], "--message-tokens 9: not with --branching"),
        (["--branching", "2", "a.jsonl"], "--branching 2: not with TRACE; allowed is one of them"),
        (["--chats", "2", "a.jsonl"], "--chats 2: not with TRACE"),
        (["--message-tokens", "2", "a.jsonl"], "--message-tokens 2: not with TRACE"),
        (["--device-tokens", "63"], "--device-tokens 63: allowed is 64 and more"),
        (["--chunk-tokens", "0"], "--chunk-tokens 0: allowed is 1 and more"),
        (
            ["--chats", "1", "--save-trace", "nowhere/x"],
            "--save-trace nowhere/x: allowed is a file",
        ),
    ],
)
def test_a_flag_that_cannot_be_honoured_is_named(flags, message, capsys, monkeypatch):
    monkeypatch.setattr(policy, "cases_of", lambda *_: [])
    assert cli.main(["bench", "policy", *flags]) == 2
    assert message in capsys.readouterr().err
