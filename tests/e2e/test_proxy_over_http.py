"""The engine in another process's place: proxy and engine talk over real sockets."""

from __future__ import annotations

import httpx
import openai
from test_openai_sdk import POLICY, ask, conversation, wait_for

from leyline_lab.stand_ins.serving import serving
from leyline_proxy.http.app import create_app
from leyline_proxy.settings import Settings
from leyline_proxy.upstream.embedded import create_embedded_engine


def test_an_engine_behind_a_url() -> None:
    """With a URL and a key instead of an embedded engine, turns splice and disconnects pass on."""
    options = {"device": "cpu", "api_secret": "engine-key"}
    engine = create_embedded_engine("replay", options)
    with serving(engine) as upstream:
        settings = Settings(upstream=f"{upstream}/v1", upstream_api_key="engine-key")
        with (
            serving(create_app(settings)) as origin,
            openai.OpenAI(base_url=f"{origin}/v1", api_key="mine", max_retries=0) as sdk,
        ):
            model = sdk.models.list().data[0].id
            headers = {"x-leyline-session": "remote"}
            for turn in (2, 3):
                account = ask(
                    sdk,
                    model,
                    conversation(turn, "Remote."),
                    stream=turn == 3,
                    policy=POLICY,
                    headers=headers,
                )
            stream = sdk.chat.completions.create(
                model=model,
                messages=[{"role": "user", "content": "Go on."}],
                stream=True,
                max_tokens=2000,
                extra_body={"ignore_eos": True},
            )
            next(iter(stream))
            stream.close()
            wait_for(origin, 'status="disconnected"')
            ready = httpx.get(f"{origin}/readyz").json()["upstreams"][0]
    assert (account["outcome"], account["turn_index"]) == ("spliced", 1)
    assert (ready["upstream"], ready["splices"]) == (upstream, True)
    assert "engine-key" not in str(ready)
