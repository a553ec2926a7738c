"""How does an unmodified Hydra application find the presets, and Lightning the name "dapple"?

Hydra imports this file in every application of the environment, so nothing here imports torch or Lightning.
"""

from __future__ import annotations

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.plugins.search_path_plugin import SearchPathPlugin

import lightning_pipe  # noqa: F401  registers the strategy as soon as Lightning is imported
from lightning_pipe.config import conf_dir, hydra_schema


class LightningPipeSearchPath(SearchPathPlugin):
    """Add the presets of this package to the search path."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Append `conf`, and the schema that its presets start from."""
        ConfigStore.instance().store(
            group="strategy", name="dapple_options", node=hydra_schema(), provider="lightning_pipe"
        )
        search_path.append(provider="lightning_pipe", path=f"file://{conf_dir()}")
