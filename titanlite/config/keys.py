"""The sections and keys of a job file by name, as its reader and its help look them up."""

from __future__ import annotations

from typing import Any

from titanlite.config.mistakes import table_within
from titanlite.config.schema import JobConfig, Section

SECTIONS: dict[str, type[Section]] = {name: field.annotation for name, field in JobConfig.model_fields.items()}  # type: ignore[misc]
KEYS: dict[str, Any] = {
    f"{name}.{key}": field for name, section in SECTIONS.items() for key, field in section.model_fields.items()
}


def on_command_line(annotation: Any) -> bool:
    """False for tables within a section: they are written in the file only."""
    return table_within(annotation) is None


def is_flag(key: str) -> bool:
    return KEYS[key].annotation in (bool, bool | None)
