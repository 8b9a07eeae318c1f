"""``/v1/responses`` and its neighbours, whatever they are sent."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import quote

from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples
from support.fake_engine import MODEL, FakeEngine, proxy_before
from support.responses_talks import BODIES

_MORE = st.fixed_dictionaries(
    {"model": st.just(MODEL)},
    optional={
        "stream": st.booleans() | st.just("x"),
        "store": st.booleans() | st.just("x"),
        "metadata": st.dictionaries(st.text(max_size=3), st.integers(), max_size=2) | st.just([]),
        "leyline": st.dictionaries(st.sampled_from(["edits", "policy"]), st.just([]), max_size=2),
        "temperature": st.floats(allow_nan=False, allow_infinity=False) | st.none(),
    },
)


@settings(max_examples=examples(60))
@given(BODIES, _MORE)
async def test_any_request_is_answered_or_refused(
    asked: dict[str, Any], more: dict[str, Any]
) -> None:
    """Never with a failure of the proxy's own; a refusal has OpenAI's shape, and an answer can be
    read back."""
    async with proxy_before(FakeEngine(), log_level="error") as client:
        content = json.dumps({**asked, **more})
        answer = await client.post("/v1/responses", content=content)
        if answer.status_code != 200:
            assert 400 <= answer.status_code < 500, answer.text
            error = answer.json()["error"]
            assert error.keys() >= {"message", "type", "param", "code"}
            return
        if more.get("stream") is True:
            assert "event: response.completed\n" in answer.text
            return
        listed = await client.get(f"/v1/responses/{answer.json()['id']}/input_items")
        assert listed.status_code == (404 if more.get("store") is False else 200)


@settings(max_examples=examples(25))
@given(st.text(min_size=1, max_size=20), st.dictionaries(st.text(max_size=6), st.text(max_size=4)))
async def test_any_id_is_one_that_isnt_there(name: str, query: dict[str, str]) -> None:
    """It is missing unless a response has it."""
    async with proxy_before(FakeEngine(), log_level="error") as client:
        path = f"/v1/responses/{quote(name, safe='')}"
        for found in (
            await client.get(path, params=query),
            await client.delete(path),
            await client.get(f"{path}/input_items", params=query),
        ):
            assert 400 <= found.status_code < 500, found.text
            assert "error" in found.json()
