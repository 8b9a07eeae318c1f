"""Templates that are published, and the tiny model's."""

from __future__ import annotations

from pathlib import Path

import pytest

from leyline_replay.models.tiny_chat_template import CHAT_TEMPLATE


@pytest.fixture
def sources(templates_dir: Path) -> dict[str, str]:
    """Every published template, and the tiny model's."""
    found = {path.stem: path.read_text() for path in sorted(templates_dir.glob("*.jinja"))}
    return {**found, "tiny": CHAT_TEMPLATE}
