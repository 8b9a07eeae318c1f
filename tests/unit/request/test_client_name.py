"""The program that sends a request."""

from __future__ import annotations

import pytest

from leyline_proxy.request.client_name import MAX_NAME, client_name


@pytest.mark.parametrize(
    ("agent", "name"),
    [
        ("claude-cli/2.1.330 (external, cli)", "claude-cli/2.1.330"),
        ("OpenAI/Python 3.52.0", "OpenAI/Python"),
        ("codex_exec/0.169.0 (Debian 12; x86_64)", "codex_exec/0.169.0"),
        ("Mozilla/5.0 (X11)", "Mozilla/5.0"),
        ("<script>alert(1)</script>", ""),
        ("\x1b[31mred", ""),
        ("ü/1", ""),
        ("a" * 500, "a" * MAX_NAME),
        ("", ""),
    ],
)
def test_a_client_is_its_first_product(agent: str, name: str) -> None:
    """Within a length, of few characters: what follows is the caller's text."""
    assert client_name({"user-agent": agent}) == name
    assert client_name({}) == ""
