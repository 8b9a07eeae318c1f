"""Real clients, unmodified, against the proxy: whole sessions in which files come to be.

Those that are no packages of the tests themselves are installed by ``make clients-setup`` and run
by ``make nightly``.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from leyline_lab.clients.agents import clients
from leyline_lab.clients.cases import Client, play
from leyline_lab.stand_ins.scripted_model import build_scripted

CLIENTS = clients()

AT_NIGHT = {"openai responses, streamed", "openai-agents responses", "anthropic"}
"""Whose like is played at each commit: the same client streamed, or the same API stored."""

SLACK = 64
"""Tokens that the dates and ids in a client's prompts may make a difference of."""


def case(client: Client, *, nightly: bool) -> object:
    """A client as a parameter."""
    marks = [pytest.mark.nightly] if nightly else []
    return pytest.param(client, id=client.name.replace(", ", "-").replace(" ", "-"), marks=marks)


@pytest.fixture(scope="module")
def model_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The scripted model's files."""
    return build_scripted(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize(
    "client", [case(each, nightly=each.nightly or each.name in AT_NIGHT) for each in CLIENTS]
)
def test_a_clients_session_ends_well(client: Client, model_files: Path, tmp_path: Path) -> None:
    """Tools act, one session is recognised, all that is known is cached, and nothing is refused."""
    outcome = play(client, model_files, tmp_path)
    assert outcome.verdict.problems == (), outcome.ran.output


@pytest.mark.parametrize(
    "client",
    [
        case(client, nightly=client.name != "openai chat")
        for client in CLIENTS
        if client.speaks_to_engines
    ],
)
def test_the_cache_serves_as_without_the_proxy(
    client: Client, model_files: Path, tmp_path: Path
) -> None:
    """Turn by turn, the share of the prompt that is cached is what the engine alone would have."""
    direct = play(client, model_files, tmp_path, proxied=False).verdict
    proxied = play(client, model_files, tmp_path).verdict
    assert direct.problems == proxied.problems == ()
    assert len(direct.cached_tokens) == len(proxied.cached_tokens)
    for alone, through in zip(direct.prefilled, proxied.prefilled, strict=True):
        assert through <= alone + SLACK
