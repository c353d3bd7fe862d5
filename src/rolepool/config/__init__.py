"""The config: its schema, and loading it from YAML files and `key=value` overrides. No torch, no
ray."""

from rolepool.config.loading import (
    Draft,
    LoadedConfig,
    import_own_extensions,
    load_config,
    read_config,
    show,
)
from rolepool.config.schema import Config

__all__ = [
    "Config",
    "Draft",
    "LoadedConfig",
    "import_own_extensions",
    "load_config",
    "read_config",
    "show",
]
