"""What all sections of the config share: the base class, the value types, defaults that follow another key.

Owns the rules for all keys. Does not know any key by name.
"""

from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, Self, TypeVar

import yaml
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, Strict, TypeAdapter


class Section(BaseModel):
    """A frozen group of keys. The text under a field is the documentation of that key."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        use_attribute_docstrings=True,
        allow_inf_nan=False,
        validate_default=True,
    )

    def at(self, path: str) -> Any:
        """The value, or the section, at a dotted path below this section."""
        return attrgetter(path)(self)

    def with_value(self, path: str, value: Any) -> Self:
        """A copy in which the key at this dotted path, below this section, has another value."""
        first, _, rest = path.partition(".")
        return self.model_copy(update={first: getattr(self, first).with_value(rest, value) if rest else value})


def follows(key: str) -> Any:
    """A default that is the value of another key. The loader resolves it like a `${...}` of the user."""
    return Field(default=f"${{{key}}}")


Item = TypeVar("Item")


def read_table(file: Path, form: type[Item]) -> Item:
    """A table of this package that is stored as YAML. The C loader, if PyYAML has it, is 15 times as fast."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return TypeAdapter(form).validate_python(yaml.load(file.read_text(encoding="utf-8"), loader))


def _as_tuple(value: Any) -> Any:
    items = () if value is None else value
    return (items,) if isinstance(items, str) else items


def _not_zero(value: int) -> int:
    if value == 0:
        raise ValueError("must be -1 or at least 1")
    return value


MAX_COUNT = 2**31 - 1
Count = Annotated[int, Field(ge=1, le=MAX_COUNT)]
CountOrZero = Annotated[int, Field(ge=0, le=MAX_COUNT)]
CountOrMinusOne = Annotated[int, Field(ge=-1, le=MAX_COUNT), AfterValidator(_not_zero)]
Fraction = Annotated[float, Field(gt=0, le=1)]
Ratio = Annotated[float, Field(ge=0, le=1)]
NonNegative = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
Items = Annotated[tuple[Item, ...], Strict(False), BeforeValidator(_as_tuple)]
"""A list of texts. One text needs no brackets, and null is an empty list."""
