"""How ranks share a cache: which groups they split, and objects that do not tell how many wrote."""

import itertools

import numpy as np
import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from stratakv.core.errors import ConfigError
from stratakv.core.ids import GroupId
from stratakv.engine.huggingface.model_facts import plain_config
from stratakv.memory.layout import HostPageLayout
from stratakv.spec.derive import spec_of
from stratakv.spec.families import FAMILIES
from stratakv.spec.groups import ANCHOR, CacheGroup
from stratakv.spec.sharding import (
    NOT_SPLIT,
    SPLIT_HEADS,
    WHOLE_CACHE,
    ObjectShard,
    Sharding,
    Strip,
    attention_splits,
    default_cut,
    sharding_of,
    sharding_refusal,
)
from tests.fixtures.tiny_configs import tiny_config

FULL, SLIDING = "full_attention", "sliding_attention"
SIZES = {
    "num_hidden_layers": 4, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 4,
    "hidden_size": 64,
}  # fmt: skip
LLAMA = {"model_type": "llama", **SIZES}
GEMMA = {
    "model_type": "gemma3_text", **SIZES, "sliding_window": 40,
    "layer_types": [SLIDING, FULL, SLIDING, FULL],
}  # fmt: skip
NEXT = {
    "model_type": "qwen3_next", **SIZES, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 16, "linear_value_head_dim": 12, "linear_conv_kernel_dim": 3,
    "layer_types": ["linear_attention", FULL, "linear_attention", FULL],
}  # fmt: skip
MIMO = {
    "model_type": "mimo_v2_flash", **SIZES, "num_key_value_heads": 4, "v_head_dim": 6,
    "sliding_window": 40, "layer_types": [FULL, SLIDING, SLIDING, FULL],
}  # fmt: skip


def share(config: dict[str, object], ranks: int) -> Sharding:
    return sharding_of(config, spec_of(config, page_tokens=8, dtype="float32"), ranks)


def rows_of(group: CacheGroup) -> list[tuple[int, ...]]:
    return [buffer.row_shape for buffer in group.buffers]


# --- what each rank keeps ------------------------------------------------------------------------


def test_one_rank_has_the_cache_that_it_always_had() -> None:
    for config in (LLAMA, GEMMA, NEXT, MIMO):
        alone = share(config, 1)
        assert alone.spec == alone.whole
        for group in alone.whole.groups:
            assert not alone.splits(group.id)
            assert alone.writes(group.id, 0)


def test_each_rank_has_its_heads_of_every_group_with_heads() -> None:
    four = share(GEMMA, 4)
    assert [rows_of(group) for group in four.spec.groups] == [[(2, 4)] * 2, [(2, 4)] * 2]
    assert all(four.splits(group.id) for group in four.spec.groups)
    assert four.whole.groups[0].page_bytes == 4 * four.spec.groups[0].page_bytes


def test_states_stay_whole_and_the_first_rank_stores_them() -> None:
    two = share(NEXT, 2)
    anchor, state = two.spec.groups
    assert rows_of(anchor) == [(4, 4), (4, 4)]
    assert state == two.whole.groups[1]
    assert [two.writes(state.id, rank) for rank in range(2)] == [True, False]
    assert all(two.writes(anchor.id, rank) for rank in range(2))


def test_latents_belong_to_all_heads() -> None:
    config = plain_config(tiny_config("deepseek_v3"))
    four = share(config, 4)
    assert four.spec == four.whole
    assert not four.splits(ANCHOR)
    assert [four.writes(ANCHOR, rank) for rank in range(4)] == [True, False, False, False]


@pytest.mark.parametrize("ranks", [3, 16])
def test_heads_that_do_not_divide_are_whole_on_every_rank(ranks: int) -> None:
    odd = share(LLAMA, ranks)
    assert odd.spec == odd.whole
    assert not odd.splits(ANCHOR)


def test_one_layer_whose_heads_do_not_divide_keeps_all_groups_whole() -> None:
    eight = share(MIMO, 8)  # 4 heads in full layers, 8 in sliding ones
    assert eight.spec == eight.whole
    assert share(MIMO, 4).splits(GroupId(1))


def test_keys_and_values_stay_whole_where_only_feed_forward_layers_are_split() -> None:
    two = share({**LLAMA, "model_type": "olmo2"}, 2)
    assert two.spec == two.whole
    assert not two.splits(ANCHOR)
    assert (two.heads, two.cuts) == ((1,), (1,))


@pytest.mark.parametrize(
    ("family", "normed", "splits"),
    [("cohere", True, False), ("cohere", False, True), ("cohere", None, True),
     ("cohere_compass_text", True, False), ("llama", True, True)],
)  # fmt: skip
def test_norms_over_all_heads_keep_heads_together(
    family: str, normed: bool | None, splits: bool
) -> None:
    config = {**LLAMA, "model_type": family, "use_qk_norm": normed, "layer_types": [FULL] * 4}
    assert attention_splits(config, 2) is splits
    assert share(config, 2).splits(ANCHOR) is splits


def test_query_heads_divide_too() -> None:
    assert attention_splits({**LLAMA, "num_attention_heads": 12, "num_key_value_heads": 4}, 4)
    assert not attention_splits({**LLAMA, "num_attention_heads": 14, "num_key_value_heads": 4}, 4)
    latents = {"kv_lora_rank": 7, "qk_rope_head_dim": 2, "num_hidden_layers": 1}
    assert attention_splits({"model_type": "deepseek_v3", **latents}, 3), "no heads are named"


def test_pages_are_named_alike_however_many_ranks_there_are() -> None:
    assert len({share(LLAMA, ranks).whole.digest for ranks in (1, 2, 4, 8)}) == 1
    assert len({share(LLAMA, ranks).spec.digest for ranks in (1, 2, 4, 8)}) == 4


# --- who is refused ------------------------------------------------------------------------------


def test_what_has_no_plan_is_refused_with_the_reason() -> None:
    config = plain_config(tiny_config("gpt2"))
    assert sharding_refusal(config, 1) is None
    assert "no plan" in str(sharding_refusal(config, 2))
    with pytest.raises(ConfigError, match=r"--tp 2: .*'gpt2'"):
        share(config, 2)


def test_no_ranks_and_unknown_models_are_refused() -> None:
    assert sharding_refusal(LLAMA, 0) == "allowed is 1 and more"
    with pytest.raises(ConfigError, match="--tp 0: allowed is 1 and more"):
        share(LLAMA, 0)
    for ranks in (1, 2):
        with pytest.raises(ConfigError, match="'rwkv' is not known"):
            sharding_refusal({**LLAMA, "model_type": "rwkv"}, ranks)


def test_every_model_type_is_in_one_table_and_as_hugging_faces_plan_has_it() -> None:
    tables = [SPLIT_HEADS, WHOLE_CACHE, NOT_SPLIT]
    assert sum(map(len, tables)) == len(FAMILIES)
    for family in FAMILIES:
        plan = CONFIG_MAPPING[family].base_model_tp_plan or {}
        keys = [name for name in plan if name.rpartition(".")[2] in ("k_proj", "query_key_value")]
        wanted = WHOLE_CACHE if plan else NOT_SPLIT
        if any(plan[name] == "colwise" for name in keys):
            wanted = SPLIT_HEADS
        assert family in wanted, family


# --- objects -------------------------------------------------------------------------------------


def whole_page(group: CacheGroup) -> list[np.ndarray]:
    """Every buffer as [layers, rows, heads, bytes of a head], no byte like its neighbours."""
    random = np.random.default_rng(group.id)
    pages = []
    for buffer in group.buffers:
        shape = (len(buffer.layers), buffer.rows_per_page, buffer.row_shape[0])
        head_bytes = buffer.row_bytes // buffer.row_shape[0]
        pages.append(random.integers(0, 256, (*shape, head_bytes), np.uint8))
    return pages


def host_page(sharding: Sharding, group: GroupId, rank: int) -> np.ndarray:
    """What a rank's host page holds, put together as ``HostPageLayout`` says."""
    whole, mine = whole_page(sharding.whole.groups[group]), sharding.spec.groups[group]
    layout = HostPageLayout.of(mine)
    page = np.zeros(layout.page_bytes, np.uint8)
    for segment in layout.segments:
        heads = mine.buffers[segment.buffer].row_shape[0]
        first = rank * heads if sharding.splits(group) else 0
        part = whole[segment.buffer][segment.layer][:, first : first + heads]
        page[segment.offset_bytes :][: segment.bytes] = part.reshape(-1)
    return page


def pieces(page: np.ndarray, shard: ObjectShard) -> list[np.ndarray]:
    """Views of a host page."""
    return [
        np.lib.stride_tricks.as_strided(
            page[s.offset_bytes :], (s.count, s.bytes), (s.stride_bytes, 1)
        )
        for s in shard.strips
    ]


def payload(page: np.ndarray, shard: ObjectShard) -> bytes:
    return b"".join(piece.tobytes() for piece in pieces(page, shard))


def written(config: dict[str, object], ranks: int, cut: int) -> dict[tuple[int, int], bytes]:
    """All objects of one page position, by group and number; each is written once."""
    sharding = share(config, ranks)
    found: dict[tuple[int, int], bytes] = {}
    for group, rank in itertools.product(sharding.spec.groups, range(ranks)):
        if sharding.writes(group.id, rank):
            for shard in sharding.objects(group.id, rank, cut):
                assert (group.id, shard.number) not in found
                page = host_page(sharding, group.id, rank)
                found[group.id, shard.number] = payload(page, shard)
                assert shard.payload_bytes == sharding.stored(cut).groups[group.id].page_bytes
    return found


UNLIKE = {**LLAMA, "model_type": "qwen3", "per_layer_config": {"1": {"head_dim": 12}}}


@pytest.mark.parametrize(
    "config", [LLAMA, UNLIKE, GEMMA, NEXT, MIMO], ids=lambda c: c["model_type"]
)
def test_objects_do_not_show_how_many_ranks_wrote_them(config: dict[str, object]) -> None:
    alone = written(config, 1, 8)
    assert len(alone) >= 4
    for ranks in (2, 4, 8):
        assert written(config, ranks, 8) == alone


@pytest.mark.parametrize("config", [GEMMA, NEXT], ids=lambda c: c["model_type"])
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_what_four_ranks_wrote_fills_the_pages_of_any_number(
    config: dict[str, object], ranks: int
) -> None:
    stored, sharding = written(config, 4, 8), share(config, ranks)
    for group, rank in itertools.product(sharding.spec.groups, range(ranks)):
        wanted = host_page(sharding, group.id, rank)
        page = np.zeros_like(wanted)
        for shard in sharding.objects(group.id, rank, 8):
            left = np.frombuffer(stored[group.id, shard.number], np.uint8)
            for piece in pieces(page, shard):
                piece[:] = left[: piece.size].reshape(piece.shape)
                left = left[piece.size :]
            assert not left.size
        assert page.tobytes() == wanted.tobytes()


def test_a_rank_with_one_slice_stores_its_page_as_it_lies() -> None:
    for ranks in (1, 2, 4):
        sharding = share(GEMMA, ranks)
        for group, rank in itertools.product(sharding.spec.groups, range(ranks)):
            (shard,) = sharding.objects(group.id, rank, ranks)
            assert shard.contiguous
            assert shard.payload_bytes == group.page_bytes
            assert (shard.index, shard.cut) == (rank, ranks)
    assert not share(GEMMA, 2).objects(ANCHOR, 0, 4)[0].contiguous


def test_one_rank_alone_stores_whole_pages_under_the_old_name() -> None:
    alone = share(LLAMA, 1)
    (shard,) = alone.objects(ANCHOR, 0, default_cut(1))
    assert (shard.number, shard.contiguous) == (0, True)
    page_bytes = alone.whole.groups[0].page_bytes
    assert shard.strips == (Strip(0, 1, page_bytes, page_bytes),)
    assert alone.stored(1) == alone.whole


@pytest.mark.parametrize(
    ("strips", "lies_whole"),
    [((Strip(64, 1, 8, 8),), True), ((Strip(0, 2, 8, 4),), False),
     ((Strip(0, 1, 8, 4), Strip(8, 1, 8, 4)), False)],
)  # fmt: skip
def test_a_payload_lies_in_its_page_only_as_one_piece(
    strips: tuple[Strip, ...], lies_whole: bool
) -> None:
    assert ObjectShard(0, 2, strips).contiguous is lies_whole


def test_two_four_and_eight_ranks_share_a_store_unasked() -> None:
    cuts = {default_cut(ranks) for ranks in (2, 4, 8)}
    assert len(cuts) == 1
    assert len({share(LLAMA, ranks).stored(*cuts).digest for ranks in (2, 4, 8)}) == 1
    assert default_cut(3) % 3 == 0


def test_heads_that_are_whole_on_every_rank_are_stored_in_the_slices_of_those_that_split() -> None:
    few = {**LLAMA, "num_key_value_heads": 2}
    assert share(few, 2).splits(ANCHOR)
    assert not share(few, 4).splits(ANCHOR)
    assert written(few, 4, 8) == written(few, 2, 8)


def test_numbers_of_different_cuts_never_meet() -> None:
    numbers = [ObjectShard(index, cut, ()).number for cut in range(1, 40) for index in range(cut)]
    assert numbers == list(range(len(numbers)))
    assert {type(number) for number in numbers} == {int}, "they are packed into keys"


def test_a_group_without_bytes_has_no_object() -> None:
    config = {**LLAMA, "model_type": "mistral", "sliding_window": 40}
    assert share(config, 2).objects(ANCHOR, 0, 8) == ()


# --- who finds whose objects ---------------------------------------------------------------------


def test_cuts_that_cut_alike_are_one() -> None:
    alone = share(LLAMA, 1)  # 8 heads
    assert alone.cuts == (1, 2, 4, 8)
    assert [alone.alike(cut) for cut in (1, 2, 3, 8, 16, 24, 12)] == [1, 2, 1, 8, 8, 8, 4]
    for cut in range(1, 40):
        assert alone.stored(cut).digest == alone.stored(alone.alike(cut)).digest
    kinds = {alone.stored(cut).digest for cut in range(1, 100)}
    assert kinds == {alone.stored(cut).digest for cut in alone.cuts}
    assert len(kinds) == len(alone.cuts)


def test_groups_with_different_heads_have_cuts_of_their_own() -> None:
    alone = share({**MIMO, "num_key_value_heads": 6}, 1)
    assert len({alone.stored(cut).digest for cut in alone.cuts}) == len(alone.cuts)
    assert {alone.stored(cut).digest for cut in range(1, 100)} == {
        alone.stored(cut).digest for cut in alone.cuts
    }


def test_what_is_never_cut_has_one_cut() -> None:
    config = plain_config(tiny_config("deepseek_v3"))
    for ranks in (1, 4):
        assert share(config, ranks).cuts == (1,)
        assert share(config, ranks).joining(1) == ranks


def test_ranks_join_the_cuts_that_they_divide() -> None:
    assert [share(LLAMA, 4).joining(cut) for cut in (1, 2, 4, 8)] == [None, None, 4, 8]
    assert [share(LLAMA, 1).joining(cut) for cut in (1, 2, 4, 8)] == [1, 2, 4, 8]
    for ranks, cut in ((1, 8), (2, 4), (4, 8), (16, 8)):
        found = share(LLAMA, ranks).joining(cut)
        assert found is not None
        assert found % ranks == 0
        assert share(LLAMA, ranks).stored(found).digest == share(LLAMA, 1).stored(cut).digest
