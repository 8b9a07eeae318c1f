"""A warm start of a real SGLang: its empty cache gets the prompt of a session, and forgets it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
from support.agent_history import agent_history
from support.sglang_stack import API_KEY, MODEL, Proxies, SglangServer
from support.waiting import wait

from leyline_proxy.warm_start.folder import ManifestFolder
from leyline_proxy.warm_start.manifests import Manifests, max_manifest
from leyline_proxy.warm_start.runs import Outcome
from leyline_proxy.warm_start.sealing import ManifestSeal

KEY = "a key of tests, long enough"
TOKENS = 200_000
SECRET = "key=7391"
REDACT = r"redact:pattern='key=\d+',replacement='[gone]'"


def ask(origin: str, messages: list[dict[str, Any]], **options: Any) -> dict[str, Any]:
    """The account of a turn."""
    body = {"model": MODEL, "messages": messages, "max_tokens": 2, "leyline": options}
    headers = {"x-leyline-session": "s"}
    answer = httpx.post(f"{origin}/v1/chat/completions", json=body, headers=headers, timeout=120)
    assert answer.status_code == 200, answer.text
    account: dict[str, Any] = answer.json()["leyline"]
    return account


def of_an_earlier_run(folder: Path) -> None:
    """Change the manifest as if an earlier run of the engine had computed its run."""
    manifests = Manifests(ManifestFolder(folder, max_manifest(TOKENS)), ManifestSeal(KEY), TOKENS)
    (loaded,) = manifests.load(60)
    assert not isinstance(loaded.found, Outcome)
    manifests.change([replace(run, engine="earlier") for run in loaded.found[1]], {})
    manifests.folder.release()


def test_an_empty_cache_is_warmed_and_forgets(engine: SglangServer, tmp_path: Path) -> None:
    """In the tenant's own cache scope, signed: the next turn finds its history, a redaction then
    removes all from the secret on, and without the warm start nothing is found."""
    messages = agent_history(4, "warm", secret=SECRET)
    settings = {
        "warm_start_path": tmp_path,
        "warm_start_key": KEY,
        "cache_scope": "tenant",
    }
    with Proxies() as proxies:
        ask(proxies.start(engine.base_url, **settings), messages)
    of_an_earlier_run(tmp_path)
    for warm in (True, False):
        flushed = httpx.post(
            f"{engine.base_url}/flush_cache",
            params={"timeout": 30},
            headers={"authorization": f"Bearer {API_KEY}"},
            timeout=60,
        )
        assert flushed.status_code == 200, flushed.text
        with Proxies() as proxies:
            own = settings if warm else {"cache_scope": "tenant"}
            origin = proxies.start(engine.base_url, **own)
            wait(lambda origin=origin: httpx.get(f"{origin}/readyz").status_code == 200)
            tokens = ask(origin, [*messages, {"role": "user", "content": "And now?"}])["tokens"]
            assert (tokens["prefilled"] < 60) == warm, tokens
            assert (tokens["prefix"] > tokens["prompt"] - 60) == warm, tokens
            if warm:
                account = ask(origin, messages, policy=REDACT)
                assert account["forgot"]["overwritten"] > tokens["prefix"] // 2
                assert ask(origin, messages)["tokens"]["prefilled"] > tokens["prompt"] // 2
