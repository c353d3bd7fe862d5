"""The config: its schema, and loading it from YAML files and `key=value` overrides. No torch, no
ray."""

from rolepool.config.loaded import Draft, LoadedConfig
from rolepool.config.loading import import_own_extensions, load_config, read_config
from rolepool.config.schema import Config
from rolepool.config.values import show

__all__ = [
    "Config",
    "Draft",
    "LoadedConfig",
    "import_own_extensions",
    "load_config",
    "read_config",
    "show",
]
