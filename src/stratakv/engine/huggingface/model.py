"""A Hugging Face causal LM, loaded from a directory or taken over from memory.

Owns what the rest of the engine asks about a model: config, limits, stop tokens, the identity of
its weights. Must not know pages; it only points the model at ``paged_attention``.
"""

import copy
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, cast

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from stratakv.core.errors import ConfigError
from stratakv.core.identity.safetensors_layout import StoredTensor
from stratakv.core.model_identity import ModelIdentity
from stratakv.core.units import format_bytes
from stratakv.engine.huggingface.adapters import load_adapters
from stratakv.engine.huggingface.attention import ATTENTION
from stratakv.engine.huggingface.lora_hooks import Adapters, unfit
from stratakv.engine.huggingface.model_facts import DTYPES, ModelFacts, facts_of, read_facts
from stratakv.engine.huggingface.module_code import CodeWalk, warn_of
from stratakv.engine.huggingface.module_identity import module_identity
from stratakv.engine.huggingface.other_names import take_names
from stratakv.engine.huggingface.own_memory import left_by_the_loader, own_weights
from stratakv.engine.huggingface.parallel import device_refusal, loading, tp_refusal
from stratakv.engine.huggingface.precision import computed_on, modes, releases
from stratakv.engine.huggingface.time_steps import bound_time_steps
from stratakv.engine.in_c import IN_C

if IN_C:
    from stratakv.engine.huggingface.compiled_state_steps import compile_states
else:
    compile_states = None

CPU: Final = torch.device("cpu")
_PROVEN: Final = "allowed are the model types that docs/families.md calls exact"
_CACHE_KEYWORDS: Final = ("past_key_values", "cache_params")


@dataclass(frozen=True, slots=True, eq=False)
class HuggingFaceModel:
    """``eos_ids``: may be empty. ``cache_keyword``: under which its forward takes a cache.
    ``fingerprint``: its identity, 32 bytes; another byte of the weights, another config or another
    dtype give others. ``adapters``: loaded beside it, not in the fingerprint. ``ranks``: how many
    share it; each has its part of the weights, and the same of all else."""

    module: PreTrainedModel
    facts: ModelFacts
    eos_ids: tuple[int, ...]
    device: torch.device
    cache_keyword: str
    fingerprint: bytes
    adapters: Adapters
    ranks: int

    @property
    def config(self) -> Mapping[str, object]:
        return self.facts.config

    @property
    def dtype(self) -> str:
        return self.facts.dtype

    @property
    def vocab_size(self) -> int:
        return self.facts.vocab_size

    @property
    def max_positions(self) -> int:
        return self.facts.max_positions


def load_model(
    path: Path,
    dtype: str = "auto",
    device: torch.device = CPU,
    ranks: int = 1,
    identity: ModelIdentity | None = None,
) -> HuggingFaceModel:
    """Load safetensors weights from a local directory; never asks a network. One of several
    ``ranks`` gets its share, once all are in one process group and load it too.

    dtype: a key of ``DTYPES`` or "auto", the config's own. ``identity``: of the directory, where it
    is under way already. Hugging Face shows a progress bar. Raises ConfigError for a directory that
    is not there or holds no causal LM, or is written meanwhile, for a dtype, for a model that ranks
    cannot share, and for one that does not fit the device.
    """
    facts = read_facts(path, dtype)
    if reason := tp_refusal(facts, ranks) or device_refusal(ranks, device):
        raise ConfigError(f"--tp {ranks}: {reason}")
    with identity or ModelIdentity(path) as under_way:
        kind = str(facts.config["model_type"])
        leaves = ranks == 1 and device == CPU  # whole tensors, where they are to stay
        under_way.begin(left_by_the_loader(kind, facts.dtype) if leaves else _none)
        try:
            module = _placed(_loaded(under_way.directory, dtype, facts, ranks), device)
        except ConfigError as error:
            under_way.refuse(str(error))
        own_weights(module, under_way)
        code = CodeWalk()
        code.model(module)
        warn_of(code.foreign)
        where = computed_on(module.device, module.dtype)
        how = (f"dtype {_dtype_name(module)}", *releases(), *modes(), *where, code.digest().hex())
        return _adopt(module, under_way.finish(*how, alone=bool(code.foreign)), ranks)


def _none(tensor: StoredTensor) -> bool:
    return False


def _loaded(path: Path, dtype: str, facts: ModelFacts, ranks: int) -> PreTrainedModel:
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        loaded = AutoModelForCausalLM.from_pretrained(
            path,
            config=config,
            dtype=DTYPES.get(dtype, "auto"),
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
            **loading(config, facts, ranks),
        )
    except (ValueError, OSError, KeyError, RuntimeError, MemoryError, SafetensorError) as error:
        raise ConfigError(f"MODEL {path}: not a causal LM that loads: {error}") from error
    module, info = cast("tuple[PreTrainedModel, dict[str, set[str]]]", loaded)
    if info["missing_keys"]:
        missing = ", ".join(sorted(info["missing_keys"])[:3])
        raise ConfigError(f"MODEL {path}: not a whole causal LM; its weights lack {missing}")
    return module


def _placed(module: PreTrainedModel, device: torch.device) -> PreTrainedModel:
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0
    try:
        return module.to(device)  # pyright: ignore[reportArgumentType]
    except torch.OutOfMemoryError as error:
        weights = sum(each.nbytes for each in (*module.parameters(), *module.buffers()))
        raise ConfigError(
            f"MODEL: its weights take {format_bytes(weights)}, and {format_bytes(free)} of "
            f"{device} are free; allowed is a smaller one, a --dtype of fewer bits, or a GPU that "
            "nobody else uses"
        ) from error


def wrap(module: PreTrainedModel) -> HuggingFaceModel:
    """Take over a model in memory: from here on it runs only under a ``ModelRunner``."""
    take_names(module)
    return _adopt(module, module_identity(module, _dtype_name(module)), ranks=1)


def with_adapters(model: HuggingFaceModel, directories: Mapping[str, Path]) -> HuggingFaceModel:
    """``model`` with LoRA adapters, by name; ConfigError for one that does not fit."""
    if not directories:
        return model
    if model.ranks > 1:
        raise ConfigError("--lora: adapters are not split among ranks; allowed with --tp 1")
    output = model.module.get_output_embeddings()
    adapters = load_adapters(model.module, output, directories)
    paths = {path for adapter in adapters for path in adapter.weights}
    bad = unfit(model.module, model.cache_keyword, paths)
    for adapter in adapters:
        if found := [path for path in bad if path in adapter.weights]:
            raise ConfigError(
                f"--lora {adapter.name}={directories[adapter.name]}: {found[0]} does not see "
                "every token of a step once; allowed are adapters of layers that do"
            )
    return replace(model, adapters=Adapters(model.module, adapters))


def _adopt(module: PreTrainedModel, fingerprint: bytes, ranks: int) -> HuggingFaceModel:
    name = type(module).__name__
    takes = inspect.signature(module.forward).parameters
    keywords = [keyword for keyword in _CACHE_KEYWORDS if keyword in takes]
    if "logits_to_keep" not in takes or not keywords:
        raise ConfigError(
            f"MODEL: {name} is not a causal LM that takes logits_to_keep, a cache; {_PROVEN}"
        )
    _own_config(module)
    module.set_attn_implementation(ATTENTION)
    text = module.config.get_text_config(decoder=True)
    if text._attn_implementation != ATTENTION:  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]
        raise ConfigError(
            f"MODEL: {name} has attention of its own that cannot be replaced; {_PROVEN}"
        )
    facts = facts_of(module.config, _dtype_name(module))
    if compile_states is not None and (module.device, module.dtype) == (CPU, torch.float32):
        compile_states(module)
    if facts.time_steps is not None:
        bound_time_steps(module, facts.time_steps)
    return HuggingFaceModel(
        module=module.eval(),
        facts=facts,
        eos_ids=_eos_ids(module, facts.config),
        device=module.device,
        cache_keyword=keywords[0],
        fingerprint=fingerprint,
        adapters=Adapters(module, ()),
        ranks=ranks,
    )


def _own_config(module: PreTrainedModel) -> None:
    """Copy the config that all submodules hold: another model may hold the same object, and setting
    the attention writes to it."""
    copies: dict[int, object] = {}
    for part in module.modules():
        config = vars(part).get("config")
        if isinstance(config, PretrainedConfig):
            part.config = copy.deepcopy(config, copies)  # pyright: ignore[reportArgumentType]


def _dtype_name(module: PreTrainedModel) -> str:
    for name, dtype in DTYPES.items():
        if module.dtype == dtype:
            return name
    raise ConfigError(f"--dtype: weights are {module.dtype}, allowed are {', '.join(DTYPES)}")


def _eos_ids(module: PreTrainedModel, config: Mapping[str, object]) -> tuple[int, ...]:
    """Stop tokens: the generation config's if it has any, else the model's."""
    ids: object = module.generation_config.eos_token_id
    ids = config.get("eos_token_id") if ids is None else ids
    match ids:
        case int():
            return (ids,)
        case list():
            return tuple(cast("list[int]", ids))
        case _:
            return ()
