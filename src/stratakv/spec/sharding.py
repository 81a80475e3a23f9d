"""How tensor-parallel ranks share a model's cache: what each keeps, and what is one stored object.

Owns which groups are split by key heads and which every rank keeps whole, read off a configuration
alone, and the cut of a host page into slices that do not depend on the number of ranks. Must not
know how weights are split (``engine.huggingface.parallel``), nor import torch or transformers.

A group is split only as a whole. Where the key heads of any layer do not divide by the number of
ranks, every rank computes all of the model's attention, and keeps all of its keys and values.
Source: the plans of transformers 5.23 (``base_model_tp_plan``); a test holds the tables to them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import gcd, lcm
from typing import Final

from stratakv.core.errors import ConfigError
from stratakv.core.ids import GroupId
from stratakv.spec.derive import default_page_tokens, family_of, spec_of
from stratakv.spec.groups import BufferSpec, CacheGroup, CacheSpec
from stratakv.spec.kinds import KEY, VALUE
from stratakv.spec.model_config import ModelConfig
from stratakv.spec.support import kind_of

SPLIT_HEADS: Final = frozenset((
    "apertus", "arcee", "aria_text", "beam", "cohere", "cohere2", "cohere2_moe",
    "cohere_compass_text", "cwm", "dots1", "ernie4_5", "ernie4_5_moe", "exaone4", "exaone_moe",
    "gemma", "gemma2", "gemma3_text", "gemma3n_text", "gemma4_text", "gemma4_unified_text", "glm",
    "glm4", "glm4_moe", "gpt_neox", "granite", "granite_swa", "granitemoe_swa", "helium", "hy_v3",
    "hyperclovax", "internlm3", "iquestcoder", "jais2", "kolibri1", "laguna", "llama",
    "llama4_text", "mellum", "mimo_v2_flash", "ministral", "ministral3", "mistral", "mixtral",
    "nanochat", "olmo", "phi", "qwen2", "qwen2_moe", "qwen3", "qwen3_5_moe_text", "qwen3_5_text",
    "qwen3_moe", "qwen3_next", "seed_oss", "smollm3", "solar_open", "starcoder2", "vaultgemma",
))  # fmt: skip
"""Model types of which each rank computes some heads, and so has the keys and values of those."""
WHOLE_CACHE: Final = frozenset((
    "afmoe", "axk1", "bailing_hybrid", "deepseek_v2", "deepseek_v3", "deepseek_v32", "deepseek_v4",
    "flex_olmo", "flint", "glm4_moe_lite", "glm_moe_dsa", "granitemoe", "granitemoehybrid",
    "granitemoeshared", "hunyuan_v1_moe", "jamba", "kimi_linear", "lfm2_moe", "longcat_flash",
    "minicpm3", "minimax_m2", "minimax_m3_vl_text", "nemotron_h", "olmo2", "olmo3", "olmo_hybrid",
    "olmoe", "phi3", "phimoe", "youtu",
))  # fmt: skip
"""Model types that ranks share all the same, while each keeps the whole cache: a latent belongs to
all heads, and of the others only the feed-forward layers are split."""
NOT_SPLIT: Final = frozenset((
    "bamba", "biogpt", "bitnet", "dbrx", "falcon_h1", "falcon_mamba", "gpt2", "gpt_bigcode",
    "gpt_oss", "hunyuan_v1_dense", "lfm2", "lfm3", "mamba", "mamba2", "modernbert-decoder", "opt",
    "persimmon", "zamba", "zamba2",
))  # fmt: skip
"""Model types for which Hugging Face has no plan, or one for the output layer alone."""
PER_HEAD_NORMS: Final = frozenset(("cohere", "cohere_compass_text"))
"""Where ``use_qk_norm`` gives each head a norm of its own, which no plan splits."""
SHARED_CUT: Final = 8
"""Slices into which ranks cut objects by default: 2, 4 and 8 ranks share a store."""


@dataclass(frozen=True, slots=True)
class Strip:
    """``count`` pieces of a host page of ``bytes`` bytes each: the first lies at ``offset_bytes``,
    and each begins ``stride_bytes`` after the one before."""

    offset_bytes: int
    count: int
    stride_bytes: int
    bytes: int


@dataclass(frozen=True, slots=True)
class ObjectShard:
    """One stored object of a page: slice ``index`` of ``cut``, whose payload is the strips' pieces
    one after the other. Those are the bytes of a host page of rank ``index`` of ``cut`` ranks, so
    that nothing in an object shows how many ranks wrote it."""

    index: int
    cut: int
    strips: tuple[Strip, ...]

    @property
    def number(self) -> int:
        """Of the object's key: 0 where the group is not cut, and never that of another cut."""
        return self.cut * (self.cut - 1) // 2 + self.index

    @property
    def payload_bytes(self) -> int:
        return sum(strip.count * strip.bytes for strip in self.strips)

    @property
    def contiguous(self) -> bool:
        """Whether the payload lies in the host page as it is stored."""
        return all(strip.count == 1 for strip in self.strips) and len(self.strips) <= 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """``whole``: the cache of one rank that has no others; its digest names pages, whatever the
    number of ranks. ``heads``: of each group, the most slices that its heads could be cut into; 1
    for one without heads. ``split``: whether each rank has some heads only, of every group that has
    any."""

    whole: CacheSpec
    ranks: int
    heads: tuple[int, ...]
    split: bool

    @property
    def spec(self) -> CacheSpec:
        """The cache of every single rank."""
        counts = [self.ranks if self.splits(group.id) else 1 for group in self.whole.groups]
        return _sliced(self.whole, counts)

    def splits(self, group: GroupId) -> bool:
        """Whether ranks have different bytes of a page of this group; else all have the same."""
        return self.split and self.heads[group] > 1

    def writes(self, group: GroupId, rank: int) -> bool:
        """Whether a rank stores pages of this group; what all have alike, the first one stores."""
        return rank == 0 or self.splits(group)

    def stored(self, cut: int) -> CacheSpec:
        """The form of one object: page bytes and digest of a store whose objects are cut so."""
        return _sliced(self.whole, [self.slices(group.id, cut) for group in self.whole.groups])

    def slices(self, group: GroupId, cut: int) -> int:
        """Objects that one page of the group is stored as, by all ranks together."""
        found = gcd(self.heads[group], cut)
        assert not self.splits(group) or found % self.ranks == 0, f"{cut} for {self.ranks} ranks"
        return found

    @property
    def cuts(self) -> tuple[int, ...]:
        """Every way in which pages can lie in a store, each by the least cut that cuts them so."""
        most = lcm(*self.heads)
        return tuple(sorted({self.alike(cut) for cut in range(1, most + 1) if most % cut == 0}))

    def alike(self, cut: int) -> int:
        """The least cut with the same slices: who stores pages by either finds the other's."""
        return lcm(*(gcd(heads, cut) for heads in self.heads))

    def joining(self, cut: int) -> int | None:
        """The least cut by which these ranks find what was stored by ``cut``; None: there is
        none, because ``cut`` has fewer slices of some group than there are ranks."""
        found = lcm(self.alike(cut), self.ranks)
        return found if self.alike(found) == self.alike(cut) else None

    def objects(self, group: GroupId, rank: int, cut: int) -> tuple[ObjectShard, ...]:
        """What a page of a rank is stored as, or read from. ``cut``: a multiple of ``ranks``; those
        that share a store must have the same. None for a group without bytes."""
        slices = self.slices(group, cut)
        mine = slices // self.ranks if self.splits(group) else slices
        first = rank * mine if self.splits(group) else 0
        buffers = self.spec.groups[group].buffers
        if not buffers:
            return ()
        return tuple(ObjectShard(first + i, slices, _strips(buffers, i, mine)) for i in range(mine))


def sharding_of(config: Mapping[str, object], whole: CacheSpec, ranks: int) -> Sharding:
    """How ``ranks`` share the cache ``whole`` of a model. config: as for ``spec_of``. ConfigError
    where they cannot share the model."""
    if reason := sharding_refusal(config, ranks):
        raise ConfigError(f"--tp {ranks}: {reason}")
    has_heads = str(config["model_type"]) in SPLIT_HEADS
    heads = tuple(_common_heads(group) if has_heads else 1 for group in whole.groups)
    return Sharding(
        whole=whole, ranks=ranks, heads=heads, split=ranks > 1 and attention_splits(config, ranks)
    )


def unshared(whole: CacheSpec) -> Sharding:
    """One rank has all of every page, and stores it whole."""
    return Sharding(whole=whole, ranks=1, heads=(1,) * len(whole.groups), split=False)


def sharding_refusal(config: Mapping[str, object], ranks: int) -> str | None:
    """Why ranks cannot share a model; None where they can. ConfigError for an unknown type."""
    if ranks < 1:
        return "allowed is 1 and more"
    name = ModelConfig(config).model_type
    family_of(ModelConfig(config))
    if ranks == 1 or name not in NOT_SPLIT:
        return None
    return (
        f"Hugging Face has no plan that splits the layers of model type {name!r}; "
        "docs/families.md has those with which more than 1 is allowed"
    )


def attention_splits(config: Mapping[str, object], ranks: int) -> bool:
    """Whether each rank computes some of the heads of attention, or all of them."""
    model = ModelConfig(config)
    if model.model_type in PER_HEAD_NORMS and config.get("use_qk_norm") is True:
        return False
    spec = spec_of(config, page_tokens=default_page_tokens(config), dtype="float32")
    heads = [shape[0] for group in spec.groups for shape in _head_shapes(group)]
    return not any(count % ranks for count in (*heads, model.integer("num_attention_heads", 0)))


def default_cut(ranks: int) -> int:
    """One rank alone stores whole pages; several leave room for others to share their store."""
    return 1 if ranks == 1 else lcm(ranks, SHARED_CUT)


def _head_shapes(group: CacheGroup) -> list[tuple[int, ...]]:
    return [buffer.row_shape for buffer in group.buffers if kind_of(buffer) in (KEY, VALUE)]


def _common_heads(group: CacheGroup) -> int:
    """The most slices that every buffer of the group can be cut into, all between two heads."""
    shapes = _head_shapes(group)
    assert len(shapes) in (0, len(group.buffers)), f"group {group.name} has more than heads"
    return gcd(*(shape[0] for shape in shapes)) if shapes else 1


def _sliced(spec: CacheSpec, counts: Sequence[int]) -> CacheSpec:
    """One of ``counts[g]`` equal slices of group g."""
    groups = tuple(
        replace(group, buffers=tuple(_slice(buffer, count) for buffer in group.buffers))
        for group, count in zip(spec.groups, counts, strict=True)
    )
    return replace(spec, groups=groups)


def _slice(buffer: BufferSpec, count: int) -> BufferSpec:
    if count == 1:
        return buffer
    heads, *rest = buffer.row_shape
    assert heads % count == 0, f"{heads} heads of buffer {buffer.name} in {count} slices"
    return replace(buffer, row_shape=(heads // count, *rest))


def row_slices(buffer: BufferSpec, at: int, slices: int) -> Strip:
    """Slice ``at`` of a page of one layer of a buffer, as a device has it."""
    if slices == 1:
        return Strip(0, 1, buffer.layer_bytes, buffer.layer_bytes)
    piece = buffer.row_bytes // slices
    return Strip(at * piece, buffer.rows_per_page, buffer.row_bytes, piece)


def _strips(buffers: Sequence[BufferSpec], at: int, slices: int) -> tuple[Strip, ...]:
    """Slice ``at`` of a rank's page, buffer by buffer as ``HostPageLayout`` has them."""
    page_bytes = sum(buffer.page_bytes for buffer in buffers)
    if slices == 1:
        return (Strip(0, 1, page_bytes, page_bytes),)
    strips: list[Strip] = []
    offset = 0
    for buffer in buffers:
        piece = buffer.row_bytes // slices
        rows = len(buffer.layers) * buffer.rows_per_page
        strips.append(Strip(offset + at * piece, rows, buffer.row_bytes, piece))
        offset += buffer.page_bytes
    return tuple(strips)
