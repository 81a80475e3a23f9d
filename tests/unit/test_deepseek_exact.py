"""What is chosen by: the same to the last bit in any batch, at any place, on any code path.

A GEMM in float32 fails this on any CPU with wide vectors. The tests of the tests put orders that
depend on a shape where ours are, so that they can fail on every machine.
"""

import itertools
import math
import os
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stratakv.engine.deepseek import common_votes
from stratakv.engine.deepseek.common_exact import (
    exact_bits,
    folded,
    limbs,
    on_grid,
    sigmoid,
    softplus,
)
from stratakv.engine.deepseek.common_votes import votes
from stratakv.engine.deepseek.v4_config import V4Config
from stratakv.engine.deepseek.v4_model import V4Model
from stratakv.engine.deepseek.v32_model import take_over
from stratakv.testing.patience import PATIENCE_S
from tests.fixtures import exact_scores
from tests.fixtures.deepseek_v4 import hugging_face
from tests.fixtures.deepseek_v32 import v32_model
from tests.fixtures.exact_scores import numbers

ROOT = Path(__file__).parents[2]
CAPABILITIES = ["DEFAULT", "AVX2", "AVX512"]
PLAIN = CAPABILITIES[:1]
NATIVE = torch.backends.cpu.get_cpu_capability()
MKL = {"DEFAULT": "SSE4_2", "AVX2": "AVX2", "AVX512": "AVX512"}
ONEDNN = {"DEFAULT": "SSE41", "AVX2": "AVX2", "AVX512": "AVX512_CORE"}


def bits(tensor):
    """As whole numbers; the sign of a zero counts for nothing."""
    return (tensor.contiguous() + 0.0).view(torch.int32)


def all_equal(found):
    return bits(found).eq(bits(found)[:1]).all()


# --- the grid ------------------------------------------------------------------------------------

floats = st.floats(width=32, allow_nan=False, allow_infinity=False)


@given(st.integers(1, 9000))
def test_bits_are_as_many_as_float64_has_room_for(terms):
    most = exact_bits(terms)
    assert terms * 4**most <= 2**53
    assert terms * 4 ** (most + 1) > 2**53 or 4 * terms > 2 ** math.ceil(math.log2(terms) + 1)


@given(st.lists(floats, min_size=1, max_size=12), st.integers(8, 26))
def test_a_row_becomes_whole_multiples_near_it(row, most):
    x = torch.tensor([row], dtype=torch.float32)
    found = on_grid(x, most)
    assert found.dtype == torch.float64
    largest = max(map(abs, x[0].tolist()))
    if not largest:
        assert not found.any()
        return
    unit = Fraction(2) ** (math.frexp(largest)[1] - most)
    counts = [Fraction(value) / unit for value in found[0].tolist()]
    assert all(count.denominator == 1 and abs(count) <= 2**most for count in counts)
    off = [abs(a - Fraction(b)) for a, b in zip(map(Fraction, found[0].tolist()), x[0].tolist())]  # noqa: B905
    assert max(off) <= unit / 2


@pytest.mark.parametrize("dim", [1, 8, 18, 128, 7168])
@pytest.mark.parametrize("size", [1.0, 2.0**-140, 2.0**120])
def test_products_of_rows_are_exact(dim, size):
    """The largest sums there can be among them."""
    a, b = numbers(1, 3, dim) * size, numbers(2, 4, dim) * size
    a[0], b[0] = a[0].abs().max(), -b[0].abs().max() * (2 - 2.0**-23)
    left, right = (on_grid(x, exact_bits(dim)) for x in (a, b))
    for (i, x), (j, y) in itertools.product(enumerate(left), enumerate(right)):
        exact = sum(map(lambda p, q: Fraction(p) * Fraction(q), x.tolist(), y.tolist()))
        assert Fraction(float((left @ right.mT)[i, j])) == exact
        assert Fraction(float(x.flip(0) @ y.flip(0))) == exact


def test_two_limbs_hold_twice_the_bits():
    x = numbers(3, 4, 50)
    x[0, 0] = 2.0**12
    large, small = limbs(x, 20)
    assert ((large + small - x).abs() <= 2.0**-39 * x.abs().amax(-1, keepdim=True)).all()
    assert small[0].any()


@pytest.mark.parametrize("broken", [torch.nan, torch.inf, -torch.inf])
def test_a_broken_row_is_broken_in_all_its_scores(broken):
    query, weights, pool = numbers(1, 3, 4, 8), numbers(2, 3, 4), numbers(3, 20, 8)
    sound = votes(query, weights, pool, torch.arange(20))
    pool[7, 5] = broken
    found = votes(query, weights, pool, torch.arange(20))
    assert found[:, 7].isnan().all()
    found[:, 7] = sound[:, 7]
    assert found.equal(sound)
    query[1, 2, 3] = broken
    assert votes(query, weights, pool, torch.arange(20))[1].isnan().all()


# --- the indexers' scores ------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shared", [False, True])
def test_scores_are_the_formula(shared, dtype):
    random = np.random.default_rng(3)
    query, keys = random.standard_normal((5, 3, 8)), random.standard_normal((11, 8))
    weights, rows = random.standard_normal((5, 3)), random.integers(0, 11, (5, 30))
    query, keys, weights = (torch.from_numpy(x) for x in (query, keys, weights))
    query, keys = query.to(dtype), keys.to(dtype)
    rows = rows[0] if shared else rows
    dots = np.einsum("mhd,nd->mhn", query.double(), keys.double()).clip(min=0)
    wanted = np.einsum("mh,mhn->mn", weights, dots)
    wanted = wanted[:, rows] if shared else np.take_along_axis(wanted, rows, 1)
    found = votes(query, weights.float(), keys, torch.from_numpy(rows))
    assert found.dtype == torch.float32
    assert np.abs(found.numpy() - wanted).max() <= 1e-6 * np.abs(wanted).max()


def unsteady_pairs(score, sizes=exact_scores.SIZES):
    found = {}
    for pair, scores in exact_scores.pair_scores(score, sizes):
        found.setdefault(pair, []).append(scores)
    return [pair for pair, scores in found.items() if not all_equal(torch.cat(scores))]


def test_a_pair_scores_alike_in_all_surroundings():
    assert not unsteady_pairs(votes)


def product_whose_order_depends_on_its_shape(query, weights, pool, rows):
    """float32, added from the front or from the back."""
    keys = pool[rows] if rows.dim() > 1 else pool[rows].expand(len(query), -1, -1)
    terms = query[:, :, None] * keys[:, None]
    terms = terms.flip(-1) if rows.shape[-1] % 2 else terms
    dots = sum(terms.unbind(-1), torch.zeros(()))
    return (weights[:, :, None] * dots.relu()).sum(1)


def test_another_product_would_show():
    assert unsteady_pairs(product_whose_order_depends_on_its_shape, exact_scores.SIZES[:1])


def grid_by_count(rows, most):
    return on_grid(rows, most - len(rows) % 3)


def test_another_grid_would_show(monkeypatch):
    monkeypatch.setattr(common_votes, "on_grid", grid_by_count)
    assert unsteady_pairs(votes, exact_scores.SIZES[:1])


def folded_in_an_order_of_its_width(terms):
    if terms.shape[-1] % 2:
        return sum(terms.float().unbind(1), torch.zeros(()))
    return folded(terms.float())


def test_another_order_of_heads_would_show(monkeypatch):
    monkeypatch.setattr(common_votes, "folded", folded_in_an_order_of_its_width)
    assert unsteady_pairs(votes, exact_scores.SIZES[2:])


# --- routers -------------------------------------------------------------------------------------


def test_a_token_has_one_set_of_logits():
    assert all_equal(exact_scores.token_logits())


def test_another_product_would_show_in_a_router():
    weight = exact_scores.router().weight.detach()

    def logits(x):
        turned = x.roll(len(x), 1)[:, None] * weight.roll(len(x), 1)
        return sum(turned.unbind(-1), torch.zeros(()))

    assert not all_equal(exact_scores.token_logits(logits))


@pytest.mark.parametrize("outlier", [1.0, 1e4])
def test_logits_are_the_product_rounded_once(outlier):
    x = numbers(1, 9, exact_scores.HIDDEN)
    x[:, 3] = outlier
    router = exact_scores.router()
    exact = x.double() @ router.weight.double().T
    scale = x.double().abs() @ router.weight.double().abs().T
    off = (router.logits(x).double() - exact).abs()
    assert (off <= 2.0**-24 * exact.abs() + 2.0**-34 * scale).all()


def test_logits_keep_the_dtype_and_what_is_broken():
    router = exact_scores.router()
    x = numbers(1, 4, exact_scores.HIDDEN).bfloat16()
    x[2, 5] = torch.inf
    found = router.logits(x)
    assert found.dtype == torch.bfloat16
    assert found.isnan().all(-1).tolist() == [False, False, True, False]


def test_weights_that_were_never_loaded_are_not_used():
    with pytest.raises(AssertionError, match="never split"):
        exact_scores.RouterLogits(2, 3).logits(torch.zeros(1, 3))


def v4_gates():
    config = V4Config.of(hugging_face().config.to_dict())
    model = V4Model.of(config, hugging_face().state_dict())
    return [layer.mlp.gate for layer in model.model.layers]


def v32_gates(name):
    model, _ = take_over(v32_model(name))
    return [layer.mlp.gate for layer in model.model.layers[-1:]]


GATES = {
    "V4": v4_gates,
    "V3.2": lambda: v32_gates("small"),
    "V3.2 in groups": lambda: v32_gates("groups"),
}


@pytest.mark.parametrize("name", GATES)
def test_a_token_takes_its_experts_in_the_same_shares_in_any_batch(name):
    for gate in GATES[name]():
        x, ids = numbers(1, 67, gate.weight.shape[1]), torch.arange(67)

        def routed(some, gate=gate, x=x, ids=ids):
            return gate(x[some], ids[some]) if name == "V4" else gate(x[some])

        chosen, shares = routed(slice(None))
        for at, width in itertools.product(range(67), (1, 5)):
            some = slice(max(0, at - width + 1), at + 1)
            mine, my_shares = routed(some)
            assert mine[-1].equal(chosen[at])
            assert bits(my_shares[-1]).equal(bits(shares[at]))


# --- functions -----------------------------------------------------------------------------------


@pytest.mark.parametrize("function", [sigmoid, softplus])
def test_a_function_says_the_same_wherever_a_number_lies(function):
    assert all(map(all_equal, exact_scores.choosing_numbers(function)))


def sigmoid_by_math(x):
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


def softplus_by_math(x):
    return max(x, 0) + math.log1p(math.exp(-abs(x)))


@pytest.mark.parametrize(
    ("function", "by_math"), [(sigmoid, sigmoid_by_math), (softplus, softplus_by_math)]
)
def test_a_function_is_as_near_as_its_type_allows(function, by_math):
    x = torch.cat((numbers(1, 3000), torch.linspace(-80, 80, 3000), torch.tensor([0.0, -0.0])))
    wanted = np.array([by_math(value) for value in x.tolist()])
    found = function(x)
    assert found.dtype == torch.float32
    assert (np.abs(found.double().numpy() - wanted) <= 0.51 * 2.0**-23 * wanted).all()


def test_functions_of_what_is_not_finite():
    x = torch.tensor([torch.inf, -torch.inf, torch.nan])
    assert sigmoid(x)[:2].tolist() == [1, 0]
    assert softplus(x)[:2].tolist() == [torch.inf, 0]
    assert sigmoid(x)[2].isnan()
    assert softplus(x)[2].isnan()


# --- code paths ----------------------------------------------------------------------------------


def digests_under(**variables):
    clean = {name: value for name, value in os.environ.items() if name != "MKL_CBWR"}
    command = [sys.executable, "-m", "tests.fixtures.exact_scores"]
    done = subprocess.run(
        command, check=False, cwd=ROOT, env={**clean, **variables},
        capture_output=True, text=True, timeout=PATIENCE_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def possible():
    """Narrower code paths than this CPU's, and its own; on other CPUs than x86 the plain one, for
    which the libraries' settings mean nothing."""
    return CAPABILITIES[: CAPABILITIES.index(NATIVE) + 1] if NATIVE in CAPABILITIES else PLAIN


@pytest.mark.parametrize("capability", possible())
def test_every_code_path_and_number_of_threads_says_the_same(capability):
    found = digests_under(
        ATEN_CPU_CAPABILITY=capability.lower(),
        MKL_ENABLE_INSTRUCTIONS=MKL[capability],
        ONEDNN_MAX_CPU_ISA=ONEDNN[capability],
    )
    assert found == {exact_scores.digest()}


@pytest.mark.long
@pytest.mark.parametrize("mkl", ["", *(MKL[name] for name in possible())])
@pytest.mark.parametrize("onednn", ["", *(ONEDNN[name] for name in possible()), "AVX512_CORE_AMX"])
@pytest.mark.parametrize("capability", possible())
def test_every_mixture_of_code_paths_says_the_same(capability, onednn, mkl):
    variables = {"MKL_ENABLE_INSTRUCTIONS": mkl, "ONEDNN_MAX_CPU_ISA": onednn}
    given = {name: value for name, value in variables.items() if value}
    found = digests_under(ATEN_CPU_CAPABILITY=capability.lower(), **given)
    assert found == {exact_scores.digest()}
