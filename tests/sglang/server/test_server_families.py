"""Real servers of current model families, against the contract computed the long way round.

Each is made small from its published configuration, with random weights that SGLang loads as it
loads a checkpoint. The families differ in what touches keys: partial bands, both pairings, norms of
keys per head and over all heads, a latent with a rotary key.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from equality_kit import PlayedSession
from families import build_family
from sglang_server import SglangServer
from test_server_pages import check_server

Start = Callable[[SglangServer, str], PlayedSession]

pytestmark = pytest.mark.nightly


@pytest.mark.parametrize(
    ("name", "page"),
    [
        ("glm-4.6", 64),
        ("minimax-m2", 16),
        ("hy3", 64),
        ("glm-4.7-flash", 64),
        ("ernie-4.5-0.3b", 1),
        ("olmo-2-7b", 16),
        ("olmo-3-7b", 16),
        ("command-a", 64),
        ("phi-4", 64),
        ("command-r-08-2024", 16),
        ("granite-4-8b-dense", 1),
        ("ministral-3-14b", 64),
        ("qwen3-30b-a3b", 64),
    ],
)
def test_a_family_gives_the_contracts_answers(
    name: str,
    page: int,
    *,
    start_server: Callable[..., SglangServer],
    probed: dict[str, str],
    start_session: Start,
    tmp_path: Path,
) -> None:
    """Answers, counts and rows agree; wrong rotations, and other sessions, don't."""
    folder = build_family(name, tmp_path / name)
    server = start_server(folder, "--page-size", str(page), environment=probed)
    check_server(start_session, server, page, range(2))
