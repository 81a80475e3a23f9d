"""Models that compute nothing: one writes for each token what only its whole prefix decides, and
before each step looks at every byte that attention would read.

Owns those bytes. SGLang makes the pools, and says where a token's rows lie; ``PROMPTS`` says which
tokens a request has. Runs in SGLang's environment.
"""

from collections import Counter

import torch
from sglang.srt.layers.attention.attention_registry import register_attention_backend
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.model_executor.forward_context import get_req_to_token_pool, get_token_to_kv_pool
from torch import nn

PROMPTS = {}
"""Tokens by request, of all that are under way."""
COUNTS = Counter()
SCALE = 4
"""Bytes of the scale of an index key."""
ROW = (576, 8)
"""Bytes of a latent of DeepSeek-V4's, and of its scales."""
OVERLAPPED = 4
"""Tokens of a row that is made from the tokens of the row before it, too."""
BEGIN = 0x1E3779B97F4A7C15
MULTIPLIERS = torch.randint(
    1, 1 << 62, (64, 8, 1024), generator=torch.Generator().manual_seed(7), dtype=torch.int64
)


@register_attention_backend("dsv4")
class NoAttention(AttentionBackend):
    """In place of DeepSeek-V4's, which plans each step by kernels: no model here calls it."""

    def __init__(self, runner):
        self.req_to_token_pool = runner.req_to_token_pool
        self.token_to_kv_pool = runner.token_to_kv_pool


def chained(tokens, digests):
    """Of each token, what all tokens up to it decide, int64; ``digests``: of the first of them."""
    found = list(digests)
    at = found[-1] if found else BEGIN
    for token in tokens[len(found) :]:
        at = ((at ^ (token + 1)) * 0x3F58476D1CE4E5B9 + 0x14D049BB133111EB) & (2**63 - 1)
        found.append(at)
    return found


class Row:
    """What a model runner keeps of a request."""

    def __init__(self, tokens):
        self.tokens = list(tokens)
        self.digests = chained(self.tokens, ())
        self.computed = 0

    def answer(self, vocabulary):
        """The next token, which the tokens so far decide."""
        self.tokens.append(self.digests[-1] % vocabulary)
        self.digests = chained(self.tokens, self.digests)
        return self.tokens[-1]


class Checked(nn.Module):
    def __init__(self, config, quant_config=None, prefix=""):
        super().__init__()
        del quant_config, prefix
        self.config = config
        self.rows = {}
        self.scale = nn.Parameter(torch.zeros(1), requires_grad=False)

    def load_weights(self, weights):
        for _ in weights:
            pass

    def windows(self):
        """By layer with keys and values: how many tokens before a query it sees; None: all."""
        layers = range(self.config.num_hidden_layers)
        kinds = getattr(self.config, "layer_types", None) or ["full_attention"] * len(layers)
        window = getattr(self.config, "sliding_window", None)
        return {
            layer: window - 1 if kind == "sliding_attention" else None
            for layer, kind in zip(layers, kinds, strict=True)
        }

    def get_attention_sliding_window_size(self):
        sizes = [window for window in self.windows().values() if window is not None]
        return sizes[0] if sizes else None

    def forward(self, input_ids, positions, forward_batch, **named):
        del positions, named
        batch = forward_batch
        logits = torch.zeros(batch.batch_size, self.config.vocab_size)
        ends = batch.seq_lens.tolist()
        decoding = batch.forward_mode.is_decode()
        begins = [end - 1 for end in ends] if decoding else batch.extend_prefix_lens.tolist()
        places = get_req_to_token_pool().req_to_token
        at = 0
        for row, name in enumerate(batch.rids or ()):
            begin, end = begins[row], ends[row]
            given = input_ids[at : at + end - begin].tolist()
            at += end - begin
            place = places[int(batch.req_pool_indices[row]), :end].long()
            request = batch.req_pool_indices[row : row + 1]
            token = self.step(name, given, (begin, end), place, request)
            if token is not None:
                logits[row, token] = 1.0
        return LogitsProcessorOutput(next_token_logits=logits)

    def step(self, name, given, span, place, request):
        begin, end = span
        if name not in PROMPTS:  # one that SGLang warms up with
            return 0
        if name not in self.rows:
            self.rows[name] = Row(PROMPTS[name])
            COUNTS["cached_tokens"] += begin
        known = self.rows[name]
        COUNTS["retracted"] += begin < known.computed
        known.computed = end
        assert given == known.tokens[begin:end], f"{name}: other tokens than its own"
        digests = torch.tensor(known.digests[:end])
        for layer, window in self.windows().items():
            first = 0 if window is None else max(0, begin - window)
            self.layer(name, layer, window is not None, digests, place, (first, begin, end))
        self.states(name, known.digests, span, request)
        return known.answer(self.config.vocab_size) if end == len(known.tokens) else None

    def states(self, name, digests, span, request):
        """What else the layers keep of a request: nothing."""

    def layer(self, name, layer, sliding, digests, place, span):
        pool = get_token_to_kv_pool()
        if sliding:
            place = pool.translate_loc_from_full_to_swa(place).long()
        for part, (words, at) in enumerate(self.rows_of(pool, layer, place)):
            self.compare_and_write(f"{name}: attention of layer {layer}", words, at, digests, span,
                                   MULTIPLIERS[layer, part])  # fmt: skip

    def rows_of(self, pool, layer, place):
        """Buffers that attention reads, and where in each the rows of tokens lie."""
        for buffer in (pool.get_key_buffer(layer), pool.get_value_buffer(layer)):
            yield buffer.view(torch.int64).flatten(1), (place,)

    def compare_and_write(self, who, words, at, digests, span, factors):
        first, begin, end = span
        known = begin - first
        expected = (digests[first:end, None] * factors[: words.shape[-1]]).to(words.dtype)
        found = words[tuple(part[first:begin] for part in at)]
        wrong = (found != expected[:known]).any(1).nonzero().flatten().tolist()
        assert not wrong, (
            f"{who} would read {len(wrong)} wrong tokens of {first} to {begin}, the first "
            f"{first + wrong[0]}"
        )
        COUNTS["checked_bytes"] += found.numel() * found.element_size()
        words[tuple(part[begin:end] for part in at)] = expected[known:]


def with_scales(pages, rows, sizes, place):
    """Of pages that have all rows of one size, then all of another: both, and where ``place`` is
    in each."""
    begin = 0
    for size in sizes:
        words = pages.view(torch.int64 if size % 8 == 0 else torch.int32)
        step = size // words.itemsize
        shape, strides = (len(pages), rows, step), (words.shape[1], step, 1)
        split = words.as_strided(shape, strides, begin // words.itemsize)
        yield split, (place // rows, place % rows)
        begin += rows * size


class Sparse(Checked):
    """Latents, and index keys: of a page all keys, then all scales."""

    def rows_of(self, pool, layer, place):
        yield pool.get_key_buffer(layer).view(torch.int64).flatten(1), (place,)
        keys = pool.get_index_k_with_scale_buffer(layer)
        yield from with_scales(keys, pool.page_size, (pool.index_head_dim, SCALE), place)
        COUNTS["checked_index_rows"] += len(place)


class Linear(Checked):
    """Full attention, and layers whose states all tokens so far decide."""

    def windows(self):
        return dict.fromkeys(self.config.full_attention_layer_ids)

    def states(self, name, digests, span, request):
        begin, end = span
        pool = get_req_to_token_pool()
        slot = int(pool.get_mamba_indices(request)[0])
        for layer in self.config.linear_layer_ids:
            cache = pool.mamba2_layer_cache(layer)
            for part, kept in enumerate((*cache.conv, cache.temporal)):
                words = kept[slot].contiguous().flatten().view(torch.int64)
                factors = torch.arange(len(words)) * 0x1E3779B97F4A7C15 + 64 * layer + part + 1
                if begin:
                    wrong = (words != digests[begin - 1] * factors).any()
                    assert not wrong, f"{name}: layer {layer} would go on from a wrong state"
                    COUNTS["checked_states"] += 1
                written = (digests[end - 1] * factors).view(kept.dtype)
                kept[slot] = written.view(kept[slot].shape)


class Compressed(Checked):
    """DeepSeek-V4: windows, one row for several tokens in most layers, index keys beside some of
    those, and states of the tokens that have no row yet."""

    def windows(self):
        return dict.fromkeys(range(self.config.num_hidden_layers), self.config.sliding_window - 1)

    def layer(self, name, layer, sliding, digests, place, span):
        del sliding
        pool, (_, begin, end) = get_token_to_kv_pool(), span
        recent = pool.translate_loc_from_full_to_swa(place).long()
        who = f"{name}: attention of layer {layer}"
        rows = with_scales(pool.swa_kv_pool.kv_buffer[layer], pool.swa_page_size, ROW, recent)
        part = self.parts(who, layer, 0, rows, digests, span)
        if ratio := self.config.compress_ratios[layer]:
            whole, last = end // ratio, slice(ratio - 1, end, ratio)
            few = place[last] // ratio
            pages, size = pool.get_extra_key_buffer(layer), pool.get_extra_key_page_size(layer)
            rows = [*with_scales(pages.view(torch.uint8), size, ROW, few)]
            if ratio == OVERLAPPED:
                keys, width = pool.get_index_k_with_scale_buffer(layer), pool.indexer_head_dim
                size = pool.get_index_k_page_size()
                rows += with_scales(keys, size, (width, SCALE), few)
            of_rows = (0, begin // ratio, whole)
            part = self.parts(who, layer, part, rows, digests[last], of_rows)
            COUNTS["checked_rows"] += begin // ratio
        if ratio == OVERLAPPED:
            for kept in (pool.compress_state_pools, pool.indexer_compress_state_pools):
                self.pending(who, layer, part, kept[layer], digests, recent, span)
                part += 1

    def parts(self, who, layer, part, rows, digests, span):
        """The number of the next part of a layer."""
        for words, at in rows:
            self.compare_and_write(who, words, at, digests, span, MULTIPLIERS[layer, part])
            part += 1
        return part

    def pending(self, who, layer, part, states, digests, recent, span):
        """Tokens that a row to come is made from: those before it, and those of the row before. A
        page keeps its last ones."""
        _, begin, end = span
        first = max(0, begin // OVERLAPPED * OVERLAPPED - OVERLAPPED)
        at = states.translate_from_swa_loc_to_state_loc(recent.clone())
        words = states.kv_score_buffer.kv_score.view(torch.int64)
        factors = MULTIPLIERS[layer, part]
        self.compare_and_write(f"{who}, its states,", words, (at,), digests, (first, begin, begin),
                               factors)  # fmt: skip
        place, page = torch.arange(begin, end), states.swa_page_size
        ends = torch.minimum((place // page + 1) * page, torch.tensor(end))
        kept = place[place >= ends - states.ring_size]
        words[at[kept]] = digests[kept, None] * factors[: words.shape[1]]
        COUNTS["checked_states"] += begin - first


class LlamaForCausalLM(Checked):
    """Full attention."""


class LagunaForCausalLM(Checked):
    """Full and sliding attention."""


class Qwen3NextForCausalLM(Linear):
    """Of a gated delta rule."""


class DeepseekV32ForCausalLM(Sparse):
    """Latents, and index keys beside them."""


class DeepseekV4ForCausalLM(Compressed):
    """Layers of all three kinds."""


EntryClass = [
    DeepseekV32ForCausalLM, DeepseekV4ForCausalLM, LlamaForCausalLM, LagunaForCausalLM,
    Qwen3NextForCausalLM,
]  # fmt: skip
