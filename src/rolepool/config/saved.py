"""The config.yaml of a run folder, read as plain data: nothing in it is imported, looked up or
replaced.

A run writes all keys with their final values, so there is nothing to resolve. In the file, text
such as `${x}` is written as `\\${x}`, so that it is the same text when the file is used as a config
file.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rolepool.config.loaded import LoadedConfig
from rolepool.config.loading import PlainValues, load_config
from rolepool.config.parsing import UNPARSABLE
from rolepool.errors import ConfigError, one_line
from rolepool.reading import MAX_YAML_BYTES, parse_yaml, read_small

FILE_NAME = "config.yaml"
FIX = "give a run folder with readable files"
_ESCAPED = re.compile(r"(\\+)(?=\$\{)")


def saved_values(text: bytes) -> dict[str, Any]:
    """The keys and values in the text of a config.yaml. Raises ValueError if it has none."""
    content = _unescaped(parse_yaml(text))
    if not isinstance(content, dict):
        raise ValueError("must contain keys and values")
    return content


def saved_config(values: Mapping[str, object], folder: Path) -> LoadedConfig:
    """The config of a run, from the values that were read in its folder. Raises ConfigError if they
    are not one.

    Names that only an extension of the run has are kept as they are, and listed in `unknown_names`.
    """
    try:
        return load_config([PlainValues(values)])
    except ConfigError as error:
        file = folder / FILE_NAME
        problems = [f"{file}: {problem}" for problem in error.problems]
        raise ConfigError(problems) from None
    except UNPARSABLE as error:  # such as names that no key can have
        file = folder / FILE_NAME
        raise ConfigError(f"{file}: cannot be read ({one_line(error)}); {FIX}") from None


def load_saved(folder: Path) -> LoadedConfig:
    """The config of a run folder. Raises ConfigError if it cannot be read."""
    file = folder / FILE_NAME
    if not file.is_file():
        raise ConfigError(
            f"{folder}: not a run folder (it has no {FILE_NAME}); give the folder of a run"
        )
    try:
        values = saved_values(read_small(file, MAX_YAML_BYTES))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: cannot be read ({one_line(error)}); {FIX}") from None
    return saved_config(values, folder)


def _unescaped(value: object) -> object:
    """The opposite of `rolepool.config.values.escaped`. Text that was not escaped stays as it
    is."""
    if isinstance(value, dict):
        return {str(name): _unescaped(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_unescaped(item) for item in value]
    if isinstance(value, str):
        return _ESCAPED.sub(_half, value)
    return value


def _half(escape: re.Match[str]) -> str:
    """What an odd number of backslashes before `${` stands for. An even number means that nothing
    is escaped."""
    backslashes = escape[1]
    is_escaped = len(backslashes) % 2 == 1
    if not is_escaped:
        return backslashes
    num_left = len(backslashes) // 2
    return backslashes[:num_left]
