import pytest
import torch

from stratakv.engine.attention.page_bounds import chosen_pages, page_scores, widen

PAGES, ROWS, KEYS, HEADS, DIM = 6, 4, 2, 4, 8


def random(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def bounds_of(keys):
    """Of [pages, rows, heads, dim]."""
    return torch.stack((keys.amin(1), keys.amax(1)), 1)


@pytest.mark.parametrize("seed", range(5))
def test_no_row_scores_more_than_its_page(seed):
    keys, query = random(seed, PAGES, ROWS, KEYS, DIM), random(100 + seed, 3, HEADS, DIM)
    found = page_scores(query, bounds_of(keys))
    each = query.view(3, KEYS, HEADS // KEYS, DIM).double()
    rows = torch.einsum("mkgd,prkd->mkgpr", each, keys.double())
    assert (found + 1e-5 >= rows.amax(-1).sum((1, 2))).all()


def test_the_bound_of_a_page_of_one_row_is_its_score():
    keys, query = random(1, PAGES, 1, KEYS, DIM), random(2, 3, HEADS, DIM)
    each = query.view(3, KEYS, -1, DIM).sum(2).double()
    right = torch.einsum("mkd,pkd->mp", each, keys[:, 0].double())
    assert torch.allclose(page_scores(query, bounds_of(keys)), right, atol=1e-4)


def test_scores_are_the_same_in_any_batch():
    bounds, query = bounds_of(random(1, PAGES, ROWS, KEYS, DIM)), random(2, 7, HEADS, DIM)
    whole = page_scores(query, bounds)
    for at in range(7):
        own = page_scores(query[at : at + 1], bounds[None])
        assert torch.equal(own, whole[at : at + 1])
        assert torch.equal(page_scores(query[at : at + 1], bounds[2:3])[0], whole[at, 2:3])


def test_heads_that_share_no_key_evenly_are_refused():
    with pytest.raises(AssertionError, match="evenly"):
        page_scores(random(1, 1, 3, DIM), bounds_of(random(2, PAGES, ROWS, KEYS, DIM)))


@pytest.mark.parametrize("cut", [1, 3, 4, 10])
def test_bounds_grow_row_by_row_or_all_at_once(cut):
    """Rows of two pages, of which the second has somebody else's bounds before."""
    keys = random(3, 10, KEYS, DIM)
    bounds = torch.full((PAGES, 2, KEYS, DIM), torch.nan)
    bounds[4] = 1000.0
    page = torch.tensor([2] * 4 + [4] * 6)
    for start in range(0, 10, cut):
        part = slice(start, min(10, start + cut))
        begun = torch.tensor([p for at, p in ((0, 2), (4, 4)) if part.start <= at < part.stop])
        widen(bounds, keys[part], page[part], begun.long())
    assert torch.equal(bounds[2], bounds_of(keys[None, :4])[0])
    assert torch.equal(bounds[4], bounds_of(keys[None, 4:])[0])
    assert bounds[[0, 1, 3, 5]].isnan().all()


def test_the_best_pages_and_the_newest_and_none_behind_ones_own():
    scores = torch.tensor([[5.0, 1, 9, 2, 7, 8]] * 3, dtype=torch.float64)
    found = chosen_pages(scores, torch.tensor([5, 3, 1]), 3)
    assert found[0].nonzero().flatten().tolist() == [2, 4, 5]
    assert found[1].nonzero().flatten().tolist() == [0, 2, 3]
    assert found[2, :2].all()


def test_of_equal_scores_the_lower_page():
    scores = torch.zeros(1, 6, dtype=torch.float64)
    assert chosen_pages(scores, torch.tensor([5]), 4)[0].nonzero().flatten().tolist() == [
        0,
        1,
        4,
        5,
    ]
