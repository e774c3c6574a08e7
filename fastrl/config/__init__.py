"""The configuration: a closed tree of documented keys, read from YAML files and `key=value` arguments."""

from fastrl.config.load import LoadedConfig, dump_config, load_config
from fastrl.config.schema import Config

__all__ = ["Config", "LoadedConfig", "dump_config", "load_config"]
