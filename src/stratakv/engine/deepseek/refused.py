"""What our own DeepSeek modules do not run, read off a configuration alone.

Owns the reasons. Must not load anything: it is asked before weights are read.
"""

from collections.abc import Callable, Mapping
from typing import Final

from stratakv.core.errors import ConfigError
from stratakv.engine.deepseek.v4_config import V4Config
from stratakv.engine.deepseek.v32_config import check_v32
from stratakv.engine.huggingface.model_facts import ModelFacts

_CHECKS: Final[Mapping[str, Callable[[Mapping[str, object]], object]]] = {
    "deepseek_v32": check_v32,
    "glm_moe_dsa": check_v32,
    "deepseek_v4": V4Config.of,
}
"""By model type: raises ConfigError for a field that its module cannot honour."""
OWN_TYPES: Final = frozenset(_CHECKS)
"""Model types that run on a module of our own in place of Hugging Face's."""
_MIXED: Final = "deepseek_v4"


def own_refusal(facts: ModelFacts) -> str | None:
    """Why a model of one of these types cannot run; None where it can, and for any other type."""
    name = str(facts.config["model_type"])
    if name not in OWN_TYPES:
        return None
    if facts.config.get("quantization_config") is not None:
        return f"its weights are quantized; of type {name!r} allowed are plain ones"
    if name == _MIXED and facts.dtype == "float16":  # Hugging Face keeps some of it in float32
        return f"of type {name!r} allowed are float32 and bfloat16, not float16"
    try:
        _CHECKS[name](facts.config)
    except ConfigError as error:
        return str(error)
    return None
