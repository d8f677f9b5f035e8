"""Base of all frozen, validated models."""

from __future__ import annotations

from functools import cache
from numbers import Integral
from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, JsonValue, ValidationInfo, field_validator


class Section(BaseModel):
    """Refuses unknown keys, NaN, infinities, and `true` or `false` for a number, which Python would take as 1 or 0."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth_for_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        return _plain(value, bools=not _has_no_bools(cls, str(info.field_name)))


@cache
def _has_no_bools(section: type[Section], field: str) -> bool:
    """Whether no value of the field may hold a bool: by itself, as free data, or in a section that checks its own."""
    kinds = _kinds(section.model_fields[field].annotation)
    inner = any(isinstance(kind, type) and issubclass(kind, BaseModel) for kind in kinds)
    return not inner and kinds.isdisjoint({bool, Any, object, JsonValue})


def _kinds(annotation: Any) -> set[Any]:
    """A type and all that it is made of; of literal values, their types."""
    if isinstance(annotation, (str, int)):
        return {type(annotation)}
    return {annotation}.union(*(_kinds(part) for part in get_args(annotation)))


def _plain(value: Any, bools: bool) -> Any:
    """The value, with NumPy's integers as Python's. Without `bools`, raises `ValueError` on one at any depth."""
    if isinstance(value, bool):
        if not bools:
            raise ValueError(f"Input should not be true or false (got {str(value).lower()})")
        return value
    if isinstance(value, dict):
        return {key: _plain(item, bools) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, bools) for item in value]
    return int(value) if isinstance(value, Integral) else value
