"""The settings from flags, the environment and a file."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    InitSettingsSource,
    PydanticBaseSettingsSource,
)

from .file import read_config
from .proxy import Settings


class _Others(PydanticBaseSettingsSource):
    """A source without some settings."""

    def __init__(
        self,
        settings_cls: type[BaseSettings],
        source: PydanticBaseSettingsSource,
        without: Collection[str],
    ) -> None:
        super().__init__(settings_cls)
        self._source, self._without = source, without

    def get_field_value(self, field: Any, field_name: str) -> tuple[Any, str, bool]:
        """Return what the source has."""
        return self._source.get_field_value(field, field_name)

    def __call__(self) -> dict[str, Any]:
        """Return the values of all other settings."""
        if isinstance(self._source, EnvSettingsSource):
            # It decodes every variable that it knows, and one may be no JSON.
            prefix = self._source.env_prefix.lower()
            self._source.env_vars = {
                key: text
                for key, text in self._source.env_vars.items()
                if key.lower().removeprefix(prefix).partition("__")[0] not in self._without
            }
        return {name: value for name, value in self._source().items() if name not in self._without}


def load_settings(
    config: Path | None = None, *, without: Collection[str] = (), **flags: Any
) -> Settings:
    """Return the settings from all sources; flags that are None count as not given.

    Args:
        without: settings that no source but the flags may set.

    Raises:
        pydantic.ValidationError: a wrong or unknown setting; names it.
        pydantic_settings.SettingsError: a variable that must be JSON isn't.
        leyline_policies.config.ConfigError: the file can't be read; names the line.
        FileNotFoundError: ``config`` doesn't exist.
    """
    given = {name: value for name, value in flags.items() if value is not None}
    if config is None and not without:
        return Settings(**given)
    document = read_config(config).plain() if config is not None else {}

    class FromFile(Settings):
        @classmethod
        def settings_customise_sources(
            cls,
            settings_cls: type[BaseSettings],
            init_settings: PydanticBaseSettingsSource,
            env_settings: PydanticBaseSettingsSource,
            dotenv_settings: PydanticBaseSettingsSource,
            file_secret_settings: PydanticBaseSettingsSource,
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            """Return the sources: flags first, then the environment, then the file."""
            file = InitSettingsSource(settings_cls, document)
            others = (env_settings, file_secret_settings, file)
            return init_settings, *(_Others(settings_cls, each, without) for each in others)

    read = FromFile(**given)
    # Workers get their settings pickled, for which a class must have a name.
    return Settings.model_construct(read.model_fields_set, **dict(read))
