"""One token on a state in C is what Hugging Face computes, and its state too."""

import math
from importlib import import_module

import pytest
import torch

COMPILED = "stratakv.engine.huggingface.compiled_state_steps"
helper = pytest.importorskip(COMPILED, exc_type=ImportError)

NEMOTRON = import_module("transformers.models.nemotron_h.modeling_nemotron_h")
QWEN = import_module("transformers.models.qwen3_next.modeling_qwen3_next")
CLOSE = {"atol": 1e-5, "rtol": 1e-5}


def draw(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def refused(*args, **kwargs):
    raise AssertionError("the call went to Hugging Face")


def twice(name, module, *args, **kwargs):
    """(ours, theirs), each on a state of its own."""
    ours = helper.WRAPS[name](refused)
    mine, its = ([each.clone() for each in args] for _ in range(2))
    return (ours(*mine, **kwargs), mine), (getattr(module, name)(*its, **kwargs), its)


def mamba_call(n, heads, groups, dim, size):
    steps = draw(1, n, heads, 1).abs()
    return (
        draw(2, n, heads, dim, size), draw(3, n, heads, dim), steps.expand(n, heads, dim),
        -draw(4, heads).exp()[:, None, None].expand(-1, dim, size),
        draw(5, n, groups, size), draw(6, n, groups, size), draw(7, heads)[:, None].expand(-1, dim),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("heads", "groups", "dim", "size"),
    [(4, 2, 32, 32), (16, 2, 32, 32), (3, 3, 8, 5), (6, 1, 17, 16), (2, 1, 1, 40), (8, 4, 64, 128)],
)
@pytest.mark.parametrize("bias", [False, True])
def test_mamba_moves_on_by_a_token(heads, groups, dim, size, bias):
    call = mamba_call(3, heads, groups, dim, size)
    how = {"dt_softplus": bias, "z": None}
    how["dt_bias"] = draw(8, heads)[:, None].expand(-1, dim) if bias else None
    (out, mine), (right, its) = twice("mamba2_selective_state_update", NEMOTRON, *call, **how)
    torch.testing.assert_close(out, right, **CLOSE)
    torch.testing.assert_close(mine[0], its[0], **CLOSE)
    assert not mine[0].equal(call[0])


@pytest.mark.parametrize(
    ("heads", "key_heads", "key_dim", "value_dim"),
    [(8, 4, 32, 32), (4, 4, 16, 16), (6, 2, 5, 9), (2, 1, 128, 128), (1, 1, 40, 17)],
)
def test_the_delta_rule_moves_on_by_a_token(heads, key_heads, key_dim, value_dim):
    n = 3
    query, key = draw(1, n, 1, key_heads, key_dim), draw(2, n, 1, key_heads, key_dim)
    value, state = draw(3, n, 1, heads, value_dim), draw(4, n, heads, key_dim, value_dim)
    gate, beta = -draw(5, n, 1, heads).exp(), draw(6, n, 1, heads).sigmoid()
    how = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
    name = "torch_recurrent_gated_delta_rule"
    (mine, _), (right, _) = twice(name, QWEN, query, key, value, gate, beta, state, **how)
    torch.testing.assert_close(mine[0], right[0], **CLOSE)
    torch.testing.assert_close(mine[1], right[1], **CLOSE)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("width", [1, 2, 4])
def test_a_convolution_moves_on_by_a_token(width, activation, bias):
    weight, state = draw(1, 33, width), draw(2, 3, 33, width)
    args = [draw(3, 3, 33, 1), state, weight] + [draw(4, 33)] * bias
    how = {"activation": activation}
    (out, mine), (right, its) = twice("causal_conv1d_update", QWEN, *args, **how)
    torch.testing.assert_close(out, right, **CLOSE)
    assert mine[1].equal(its[1])
    assert not mine[1].equal(state)


@pytest.mark.parametrize("threads", [2, 3, 16])
def test_threads_share_the_requests_and_change_no_bit(threads, monkeypatch):
    step = helper.WRAPS["mamba2_selective_state_update"](refused)
    call, again = (mamba_call(5, 4, 2, 32, 32) for _ in range(2))
    right = step(*call)
    monkeypatch.setattr("stratakv.engine.in_c.PART_BYTES", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert step(*again).equal(right)
    assert again[0].equal(call[0])


def test_what_is_not_finite_stays_with_its_request():
    call = mamba_call(2, 4, 2, 32, 32)
    call[0][0, 1, 3, 5] = math.nan
    (out, mine), _ = twice("mamba2_selective_state_update", NEMOTRON, *call)
    assert out[0].isnan().any()
    assert mine[0][0].isnan().any()
    assert out[1].isfinite().all()
    assert mine[0][1].isfinite().all()


@pytest.mark.parametrize("why", ["dtype", "tokens"])
def test_any_other_call_is_hugging_faces(why):
    inputs, state, weight = draw(1, 2, 8, 1), draw(2, 2, 8, 4), draw(3, 8, 4)
    if why == "dtype":
        inputs, state, weight = (each.bfloat16() for each in (inputs, state, weight))
    if why == "tokens":
        inputs = draw(1, 2, 8, 3)
    seen = []
    update = helper.WRAPS["causal_conv1d_update"](lambda *args, **_: seen.append(args))
    update(inputs, state, weight)
    assert seen[0][1] is state


def test_arrays_that_do_not_belong_together_are_refused():
    update = helper.WRAPS["causal_conv1d_update"](refused)
    with pytest.raises(ValueError, match="belong together"):
        update(draw(1, 2, 8, 1), draw(2, 2, 7, 4), draw(3, 8, 4))
