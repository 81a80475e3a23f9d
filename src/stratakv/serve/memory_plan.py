"""What a model's cache would take, for a machine that need not be this one.

Owns the report of ``stratakv plan bytes``. Its figures come from the functions that size a server;
must not read weights, take memory, or ask this machine what is free.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from stratakv.assembly.sizing import Sizes, planned, spec_for
from stratakv.core.config import EngineConfig
from stratakv.core.device_memory import MemoryBytes
from stratakv.core.errors import ConfigError
from stratakv.engine.deepseek.refused import own_refusal
from stratakv.engine.huggingface.model_facts import read_planned
from stratakv.engine.huggingface.parallel import tp_refusal
from stratakv.spec.budget import AUTO_RATIO
from stratakv.spec.budget_table import BudgetTable
from stratakv.spec.model_facts import ModelFacts
from stratakv.spec.row_format import RowFormat, fp8_rows, in_rows
from stratakv.spec.support import refusal


@dataclass(frozen=True, slots=True, kw_only=True)
class BytePlan:
    """``not_yet``: why the engine cannot serve the model, or None. ``auto_host``: no flag sizes the
    host tier. ``formats``: of buffers whose rows are not plain, by name."""

    model: str
    model_type: str
    dtype: str
    not_yet: str | None
    auto_host: bool
    device_budget_bytes: int
    sizes: Sizes
    table: BudgetTable
    formats: Mapping[str, RowFormat]

    def render(self) -> str:
        """The server's own table, with what a server would report beside it."""
        longest = self.sizes.max_model_len
        lines = [f"{self.model}: {self.model_type}, {self.dtype}, requests up to {longest} tokens"]
        if self.not_yet is not None:
            lines.append(f"cannot be served yet: {self.not_yet}")
        lines.append(self.table.render())
        if self.sizes.notice is not None:
            lines.append(self.sizes.notice)
        lines += [f"{name}: {_text(row)}" for name, row in self.formats.items()]
        if self.auto_host:
            lines.append(
                f"host: {AUTO_RATIO:.1f} pages per device page of what is cached, since neither "
                "--host-memory nor --host-ratio is given; a server takes less where that exceeds "
                "0.8 of its free memory"
            )
        return "\n".join(lines)

    def figures(self) -> Mapping[str, object]:
        """All of it as plain data."""
        return {
            "model": self.model,
            "model_type": self.model_type,
            "dtype": self.dtype,
            "cannot_be_served_yet": self.not_yet,
            "max_model_len": self.sizes.max_model_len,
            "spec_digest": self.sizes.spec.digest.hex(),
            "device_budget_bytes": self.device_budget_bytes,
            **self.table.figures(),
            "row_formats": {name: _plain(row) for name, row in self.formats.items()},
        }


def plan_bytes(path: Path, config: EngineConfig, rows: str = "plain") -> BytePlan:
    """Of the model directory ``path``, whose weights need not be there. rows: "plain" or "fp8".
    ConfigError for a model that is not known, and for flags that the model or the device memory
    rules out."""
    facts, surroundings = read_planned(path, config.dtype)
    memory = config.device_tier
    if not isinstance(memory, MemoryBytes):
        raise ConfigError(
            f"--device-memory {config.device_memory_text}: a plan is for any machine, and looks at "
            "no GPU; allowed are bytes, as 80GiB"
        )
    spec = spec_for(facts, config)
    not_yet = surroundings or refusal(spec) or own_refusal(facts) or _unshared(facts, config)
    formats: Mapping[str, RowFormat] = {}
    if rows == "fp8":
        formats = fp8_rows(spec, facts.config)
        spec = in_rows(spec, formats)
        not_yet = not_yet or "rows in fp8 are described and planned for, the engine runs plain ones"
    sizes = planned(spec, facts, config)
    no_flag = config.host_memory is None and config.host_ratio is None
    return BytePlan(
        model=str(path),
        model_type=str(facts.config["model_type"]),
        dtype=facts.dtype,
        not_yet=not_yet,
        auto_host=config.cache == "host" and no_flag,
        device_budget_bytes=memory.size_bytes,
        sizes=sizes,
        table=BudgetTable.of(sizes.spec, sizes.device, sizes.host),
        formats=formats,
    )


def _unshared(facts: ModelFacts, config: EngineConfig) -> str | None:
    reason = tp_refusal(facts, config.tp)
    return None if reason is None else f"--tp {config.tp}: {reason}"


def _text(row: RowFormat) -> str:
    fields = ", ".join(f"{field.elements} {field.dtype} {field.name}" for field in row.fields)
    return f"rows of {fields}: {row.row_bytes} bytes"


def _plain(row: RowFormat) -> Mapping[str, object]:
    fields = [asdict(field) | {"bytes": field.bytes} for field in row.fields]
    return {"row_bytes": row.row_bytes, "fields": fields}
