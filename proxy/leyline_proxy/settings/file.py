"""The file of ``--config``: YAML with the line of every value."""

from __future__ import annotations

from pathlib import Path

from leyline_policies.located import MAX_BYTES, ConfigError, Located, read_yaml

__all__ = ["ConfigError", "Located", "read_config"]


def read_config(path: Path) -> Located:
    """Return the settings in a file; none if it is empty.

    Raises:
        ConfigError: the file can't be read, or isn't a YAML object; names the line.
        FileNotFoundError: there is no such file.
    """
    if not path.exists():
        raise FileNotFoundError(f"no configuration file at {path}")
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"can't be read: {error.strerror}", str(path)) from error
    try:
        # Some editors write a byte order mark, which would become part of the first name.
        text = raw.decode("utf-8-sig", "strict" if len(raw) <= MAX_BYTES else "replace")
    except UnicodeDecodeError as error:
        at = (raw.count(b"\n", 0, error.start) + 1, 1)
        raise ConfigError("is no UTF-8 text", str(path), at) from error
    if len(raw) <= MAX_BYTES and not any(map(_says_something, text.splitlines())):
        return Located({}, (1, 1), {})
    found = read_yaml(text, str(path))
    if not isinstance(found.value, dict):
        raise ConfigError("settings are written as NAME: VALUE", str(path), found.at)
    return found


def _says_something(line: str) -> bool:
    text = line.strip()
    return text not in ("", "---") and not text.startswith("#")
