"""Types of causal LM in Hugging Face that are not known to run exactly, and why: data of the table.

Owns the reasons. Must not repeat a type that ``stratakv.spec.families`` knows.
"""

from itertools import chain
from typing import Final

_GROUPS: Final[dict[str, tuple[str, ...]]] = {
    "its attention is its own code, which the engine cannot replace": (
        "bloom", "codegen", "cpmant", "ctrl", "falcon", "gpt_neo", "gpt_neox_japanese", "gptj",
        "mpt", "openai-gpt", "xglm", "xlm",
    ),
    "its attention masks keys by rules of its own": ("doge",),
    "its attention does not hand on what the engine gives it": ("nemotron", "stablelm"),
    "its attention changes keys or values after they are cached": ("diffllama", "jetmoe"),
    "one module of attention runs for several layers of cache": ("hrm_text",),
    "its cache slides where its mask does not: Hugging Face disagrees with itself": ("moshi",),
    "its state is in a cache of its own, or in its modules": (
        "minimax", "reformer", "rwkv", "xlnet", "xlstm",
    ),
    "sparse attention with an indexer": ("axk2", "dots3_note_text", "hy_v4", "qwen4_exp_text"),
    "more states per layer than one convolution and one recurrence": (
        "inkling2_text", "inkling_text", "zaya",
    ),
    "an encoder; as a decoder it is not tried": (
        "bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie",
        "megatron-bert", "rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer",
        "xlm-roberta", "xlm-roberta-xl", "xmod",
    ),
    "the decoder of an encoder-decoder; alone it is not tried": (
        "bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "marian", "mbart", "mvp",
        "pegasus", "plbart", "prophetnet", "trocr", "whisper",
    ),
    "images or sound beside text, or bytes instead: its text part is not known": (
        "blt", "dots3_note", "emu3", "git", "mllama", "musicgen", "musicgen_melody",
        "phi4_multimodal", "qwen4_exp",
    ),
    "images and sound beside text: it cannot be tried as a whole without timm": ("gemma3n",),
    "drafts for another model": ("gemma4_assistant", "gemma4_unified_assistant"),
    "loads as `gpt2`": ("gpt-sw3",),
}  # fmt: skip

NOT_SERVED: Final[dict[str, str]] = dict(
    sorted(chain.from_iterable(((t, why) for t in types) for why, types in _GROUPS.items()))
)
"""Reason by model type."""
