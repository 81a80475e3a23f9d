"""What an ``adapter_config.json`` of PEFT says: ranks, scales and which modules it is for.

Owns the fields that are honoured and those that are refused, because ignoring them would change the
answer. Names and matching follow PEFT (``check_target_module_exists``, ``get_pattern_key``). Must
not see tensors.
"""

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias, TypeVar, cast

from stratakv.core.errors import ConfigError

T = TypeVar("T")

FILE: Final = "adapter_config.json"
ALL_LINEAR: Final = "all-linear"

JsonObject: TypeAlias = Mapping[str, object]
Names: TypeAlias = re.Pattern[str] | frozenset[str]
"""A regular expression for whole paths, or paths and ends of paths."""

HONOURED: Final = frozenset({
    "peft_type", "task_type", "bias", "r", "lora_alpha", "use_rslora", "rank_pattern",
    "alpha_pattern", "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern",
    "init_lora_weights",
})  # fmt: skip
HARMLESS: Final = frozenset({
    "auto_mapping", "base_model_name_or_path", "revision", "peft_version", "inference_mode",
    "lora_dropout", "megatron_core", "qalora_group_size", "loftq_config", "eva_config",
    "ensure_weight_tying", "runtime_config",
})  # fmt: skip
"""Of training, or of another field that is refused itself."""
PLAIN_STARTS: Final = (None, True, False, "gaussian", "eva", "orthogonal")
"""Ways to start a training that leave the base weights as they are; others (PiSSA, OLoRA, CorDA,
LoftQ and so on) train against a changed base."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraConfig:
    """``layers``: indexes to be adapted, None: all. ``layer_lists``: names of the module list that
    they count in, empty: any."""

    rank: int
    alpha: float
    rank_stabilized: bool
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    targets: Names
    excluded: Names
    layers: frozenset[int] | None
    layer_lists: tuple[str, ...]

    @property
    def all_linear(self) -> bool:
        """Every linear layer but the output's."""
        return isinstance(self.targets, re.Pattern) and self.targets.pattern.lower() == ALL_LINEAR

    def is_target(self, path: str) -> bool:
        """Whether the module at ``path`` is adapted; not to be asked if ``all_linear``."""
        if _among(path, self.excluded) or not _among(path, self.targets):
            return False
        if self.layers is None or isinstance(self.targets, re.Pattern) or path in self.targets:
            return True
        return self._layer(path) in self.layers

    def is_excluded(self, path: str) -> bool:
        return _among(path, self.excluded)

    def rank_of(self, path: str) -> int:
        return self.rank_pattern.get(_pattern_of(self.rank_pattern, path), self.rank)

    def scale_of(self, path: str) -> float:
        rank = self.rank_of(path)
        alpha = self.alpha_pattern.get(_pattern_of(self.alpha_pattern, path), self.alpha)
        return alpha / (math.sqrt(rank) if self.rank_stabilized else rank)

    def _layer(self, path: str) -> int | None:
        for name in self.layer_lists or (r"[^.]*",):
            lead = r"(?:^|.*?\.)" if self.layer_lists else r".*?\."
            if found := re.match(rf"{lead}{name}\.(\d+)\.", path):
                return int(found[1])
        return None


def read_config(directory: Path) -> LoraConfig:
    """Read ``directory``'s config. ConfigError, not yet naming the flag, says what is refused."""
    file = directory / FILE
    if not file.is_file():
        raise ConfigError(f"allowed is a directory with a PEFT {FILE}")
    try:
        data: object = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{FILE} cannot be read ({error}); allowed is PEFT's") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{FILE}: allowed is a JSON object")
    return parse_config(cast("JsonObject", data))


def parse_config(data: JsonObject) -> LoraConfig:
    """``data``: the JSON object of the file. Raises as ``read_config``."""
    _refuse(data)
    try:
        return LoraConfig(
            rank=_rank("r", data.get("r", 8)),
            alpha=_number("lora_alpha", data.get("lora_alpha", 8)),
            rank_stabilized=data.get("use_rslora") is True,
            rank_pattern=_pattern(data, "rank_pattern", _rank),
            alpha_pattern=_pattern(data, "alpha_pattern", _number),
            targets=_names("target_modules", data.get("target_modules")),
            excluded=_names("exclude_modules", data.get("exclude_modules") or []),
            layers=_layers(data.get("layers_to_transform")),
            layer_lists=_strings("layers_pattern", data.get("layers_pattern") or []),
        )
    except re.error as error:
        raise ConfigError(
            f"{FILE} holds no regular expression where one is allowed: {error}"
        ) from None


def _refuse(data: JsonObject) -> None:
    kind, task = data.get("peft_type"), data.get("task_type")
    if kind != "LORA":
        raise ConfigError(f"peft_type {kind}: allowed is LORA")
    if task not in (None, "CAUSAL_LM"):
        raise ConfigError(f"task_type {task}: allowed is CAUSAL_LM")
    if data.get("bias", "none") != "none":
        raise ConfigError(f"bias {data['bias']}: allowed is none")
    if data.get("init_lora_weights") not in PLAIN_STARTS:
        raise ConfigError(
            f"init_lora_weights {data['init_lora_weights']}: it belongs to changed base weights; "
            "allowed is a plain LoRA"
        )
    # What PEFT grows next is refused too, as long as it is in use.
    for name in sorted(data.keys() - HONOURED - HARMLESS):
        if data[name]:
            raise ConfigError(f"{name} is not served: allowed is a plain LoRA")


def _among(path: str, names: Names) -> bool:
    if isinstance(names, re.Pattern):
        return names.fullmatch(path) is not None
    return path in names or any(path.endswith(f".{name}") for name in names)


def _pattern_of(patterns: Mapping[str, object], path: str) -> str:
    """The first pattern that matches an end of ``path``, as PEFT finds it; "" if none does."""
    return next((key for key in patterns if re.match(rf"(.*\.)?({key})$", path)), "")


def _rank(name: str, value: object) -> int:
    if type(value) is not int or value < 1:
        raise ConfigError(f"{name} {value!r}: allowed is 1 and more")
    return value


def _number(name: str, value: object) -> float:
    if type(value) not in (int, float) or not math.isfinite(cast("float", value)):
        raise ConfigError(f"{name} {value!r}: allowed is a finite number")
    return float(cast("float", value))


def _pattern(data: JsonObject, name: str, read: Callable[[str, object], T]) -> dict[str, T]:
    value = data.get(name) or {}
    if not isinstance(value, dict):
        raise ConfigError(f"{name} {value!r}: allowed is an object")
    found = {key: read(f"{name}.{key}", one) for key, one in cast("JsonObject", value).items()}
    for key in found:
        re.compile(key)
    return found


def _strings(name: str, value: object) -> tuple[str, ...]:
    listed = [value] if isinstance(value, str) else value
    if not isinstance(listed, list) or not all(
        isinstance(one, str) for one in cast("list[object]", listed)
    ):
        raise ConfigError(f"{name} {value!r}: allowed are strings")
    return tuple(cast("list[str]", listed))


def _names(name: str, value: object) -> Names:
    if isinstance(value, str):
        return re.compile(value)
    return frozenset(_strings(name, value))


def _layers(value: object) -> frozenset[int] | None:
    listed = [value] if type(value) is int else value or []
    if not isinstance(listed, list) or not all(type(one) is int for one in listed):
        raise ConfigError(f"layers_to_transform {value!r}: allowed are layer numbers")
    return frozenset(cast("list[int]", listed)) or None
