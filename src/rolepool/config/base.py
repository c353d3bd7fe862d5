"""What all sections of the config share: the base class, the value types, defaults that follow
another key, names of keys, and checks of a config in which some values are not known.

Owns the rules for all keys. Does not know any key by name.
"""

from collections.abc import Callable, Iterable
from contextlib import suppress
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Generic, Self, TypeVar, overload

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    Strict,
    TypeAdapter,
)

from rolepool.errors import collected


class UnknownValue(Exception):
    """A check has read a key whose value is not known, because what the user wrote there is
    wrong."""


Value = TypeVar("Value")
Value_co = TypeVar("Value_co", covariant=True)


class KeyName(str, Generic[Value_co]):
    """The dotted name of a key or a section, of which mypy knows the type of the value.
    `rolepool.config.schema.key_name` makes it."""

    __slots__ = ()


class _NameOf:
    """Stands for an object of which only the names of attributes are read."""

    def __init__(self, name: str = "") -> None:
        self.__name = name

    def __getattr__(self, attribute: str) -> "_NameOf":
        return _NameOf(f"{self.__name}.{attribute}".lstrip("."))

    def __str__(self) -> str:
        return self.__name


def name_read_by(read: Callable[[Any], object]) -> str:
    """The dotted name of the attribute that a function reads from its argument: `model.path` for
    `lambda keys: keys.model.path`."""
    return str(read(_NameOf()))


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

    @overload
    def at(self, path: KeyName[Value]) -> Value: ...

    @overload
    def at(self, path: str) -> Any: ...

    def at(self, path: str) -> Any:
        """The value, or the section, at a dotted path below this section."""
        return attrgetter(path)(self)

    def with_value(self, path: str, value: object) -> Self:
        """A copy in which the key at this dotted path, below this section, has another value."""
        first, _, rest = path.partition(".")
        return self.model_copy(
            update={first: getattr(self, first).with_value(rest, value) if rest else value}
        )

    def without_value(self, path: str) -> Self:
        """A copy in which the key, or the section, at this dotted path has no value. Reading it
        raises UnknownValue."""
        first, _, rest = path.partition(".")
        if rest:
            return self.model_copy(update={first: getattr(self, first).without_value(rest)})
        copied = self.model_copy()
        vars(copied).pop(first, None)
        return copied

    # Python calls this only if the attribute does not exist. It is hidden from mypy, which would
    # otherwise accept every name.
    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if name in type(self).model_fields:
                raise UnknownValue(name)
            return super().__getattr__(name)


def lines_of(*checks: Iterable[str]) -> list[str]:
    """The lines of all checks, in their order: one for each problem. Each check is a generator.

    A check that reads an unknown value ends there, and the other checks continue. The lines of a
    RolepoolError that a check raises are problems like all others.
    """
    lines: list[str] = []
    for check in checks:
        with suppress(UnknownValue), collected(lines):
            for line in check:
                lines.append(line)
    return lines


def follows(key: str) -> Any:
    """A default that is the value of another key. The loader resolves it like a `${...}` of the
    user."""
    return Field(default=f"${{{key}}}")


Item = TypeVar("Item")


def read_table(file: Path, form: type[Item]) -> Item:
    """A table of this package that is stored as YAML. The C loader, if PyYAML has it, is 15 times
    as fast."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return TypeAdapter(form).validate_python(yaml.load(file.read_text(encoding="utf-8"), loader))


def _as_tuple(value: object) -> object:
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
