"""The config: its schema, and loading it from YAML files and `key=value` overrides. No torch, no ray."""

from rolepool.config.loading import LoadedConfig, load_config, show
from rolepool.config.schema import Config

__all__ = ["Config", "LoadedConfig", "load_config", "show"]
