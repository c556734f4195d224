"""Base classes of the pydantic models for the contents of files and the sections of a job."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, model_validator


class FileModel(BaseModel):
    """Base class of pydantic models for the content of a file.

    Values are not converted (the string "5" is not an integer), unknown keys are errors, and
    instances are immutable.
    """

    model_config = ConfigDict(
        strict=True, extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=()
    )


class Section(FileModel):
    """Base class for a section of a job file, such as [training].

    The docstring of each field is its help text.
    """

    # Instances are validated again, because `model_copy(update=...)` does not validate.
    model_config = ConfigDict(use_attribute_docstrings=True, revalidate_instances="always")

    dropped: ClassVar[dict[str, tuple[object, str]]] = {}
    """Former default of each key that was removed, and the error message for any other value.

    Earlier versions saved every key of a job, so a removed key that has its default is ignored.
    """
    advanced: ClassVar[tuple[str, ...]] = ()
    """Rarely used keys. The help lists them last."""
    on_resume: ClassVar[Literal["compatible", "affects training", "incompatible"]] = (
        "affects training"
    )
    """Effect of changed values in this section on a run that resumes. Plugins set it for their
    sections.
    """

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        """Join the lines of each field's description, so that the help can wrap it."""
        for field in cls.model_fields.values():
            field.description = " ".join((field.description or "").split())

    @model_validator(mode="before")
    @classmethod
    def _ignore_dropped_defaults(cls, values: Any) -> Any:
        """Call `without_dropped_defaults` on the values before they are validated."""
        return cls.without_dropped_defaults(values) if isinstance(values, dict) else values

    @classmethod
    def without_dropped_defaults(cls, values: dict[Any, Any]) -> dict[Any, Any]:
        """Return a copy of `values` without obsolete keys that still have their former default.

        `dropped` lists the obsolete keys. If one has another value, it is kept, so that validation
        reports it.
        """
        kept = dict(values)
        for key, (former_default, _) in cls.dropped.items():
            if key in values and values[key] == former_default:
                del kept[key]
        return kept
