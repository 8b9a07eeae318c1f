"""Stored responses over HTTP: continuing from them, reading rights, and their end."""

from __future__ import annotations

import pytest
from support.fake_engine import FakeEngine, forgotten, proxy_before
from support.messages_route import events
from support.responses_route import RESPONSES, RESULT, USER, ask, body, scripted

TWO = ("red:r", "blue:b")


def key(name: str) -> dict[str, str]:
    """A tenant's headers."""
    return {"authorization": f"Bearer {name}"}


async def test_a_request_goes_on_from_a_stored_response(engine: FakeEngine) -> None:
    """The engine is sent the whole conversation, and the session continues, also with other
    instructions and for a user who has several conversations."""
    engine.answers.append(scripted())
    async with proxy_before(engine) as client:
        one = events((await client.post(RESPONSES, json=body([USER], stream=True))).text)
        first = one[-1]["response"]
        second = await ask(client, [RESULT], previous_response_id=first["id"], user="u")
        third = await ask(
            client, "More?", previous_response_id=second["id"], instructions="Be terse.", user="u"
        )
        listed = (await client.get(f"{RESPONSES}/{third['id']}/input_items?order=asc")).json()
    assert [m["role"] for m in engine.sent["messages"]] == [
        "system",
        "user",
        "assistant",
        "tool",
        "assistant",
        "user",
    ]
    assert engine.sent["messages"][2]["reasoning_content"] == "Hm."
    sessions = {each["leyline"]["session"] for each in (first, second, third)}
    assert len(sessions) == 1
    assert third["leyline"]["turn_index"] == 2
    assert third["previous_response_id"] == second["id"]
    assert [item["type"] for item in listed["data"]] == [
        "message",
        "reasoning",
        "message",
        "function_call",
        "function_call_output",
        "message",
        "message",
    ]
    assert len({item["id"] for item in listed["data"]}) == 7


async def test_a_header_names_the_session_where_there_is_one(engine: FakeEngine) -> None:
    """The client's own choice wins over the response that it continues from."""
    async with proxy_before(engine) as client:
        first = await ask(client)
        asked = body("More?", previous_response_id=first["id"])
        other = await client.post(RESPONSES, json=asked, headers={"x-leyline-session": "mine"})
    assert other.json()["leyline"]["session"] == "mine"


async def test_items_may_be_referred_to(engine: FakeEngine) -> None:
    """The ids are those that answers gave them; the stored input has the items themselves."""
    async with proxy_before(engine) as client:
        first = await ask(client, [USER])
        item = first["output"][0]["id"]
        again = [USER, {"type": "item_reference", "id": item}, {"role": "user", "content": "More?"}]
        second = await ask(client, again)
        listed = (await client.get(f"{RESPONSES}/{second['id']}/input_items")).json()
        for lost in (item.replace("msg", "rs"), "msg_of_another_house"):
            asked = body([USER, {"id": lost}])
            refused = await client.post(RESPONSES, json=asked)
            assert refused.status_code == 404
            assert refused.json()["error"]["param"] == "input[1].id"
    assert [m["content"] for m in engine.sent["messages"]] == ["List.", "Hello.", "More?"]
    assert [item["type"] for item in listed["data"]] == ["message"] * 3


async def test_store_false_stores_nothing(engine: FakeEngine) -> None:
    """Neither a whole nor a streamed answer is stored; a proxy that is to keep none stores none."""
    async with proxy_before(engine) as client:
        whole = await ask(client, store=False)
        streamed = await client.post(RESPONSES, json=body(store=False, stream=True))
        last = events(streamed.text)[-1]["response"]
        for response in (whole, last):
            assert response["store"] is False
            assert (await client.get(f"{RESPONSES}/{response['id']}")).status_code == 404
    async with proxy_before(engine, max_stored_responses=0) as client:
        kept = await ask(client)
        assert (await client.get(f"{RESPONSES}/{kept['id']}")).status_code == 404


async def test_tenants_dont_see_each_others_responses(engine: FakeEngine) -> None:
    """They can't read, continue from, refer to, list or delete them: the response isn't there."""
    async with proxy_before(engine, api_keys=TWO) as client:
        first = (await client.post(RESPONSES, json=body(), headers=key("r"))).json()
        path = f"{RESPONSES}/{first['id']}"
        onward = body("More?", previous_response_id=first["id"])
        referring = body([USER, {"type": "item_reference", "id": first["output"][0]["id"]}])
        refused = [
            await client.get(path, headers=key("b")),
            await client.get(f"{path}/input_items", headers=key("b")),
            await client.delete(path, headers=key("b")),
            await client.post(RESPONSES, json=referring, headers=key("b")),
            await client.post(RESPONSES, json=onward, headers=key("b")),
        ]
        assert [answer.status_code for answer in refused] == [404] * 5
        error = refused[-1].json()["error"]
        assert (error["code"], error["param"]) == (
            "previous_response_not_found",
            "previous_response_id",
        )
        assert (await client.get(path)).status_code == 401
        assert (await client.get(path, headers=key("r"))).json() == first
        mine = await client.post(RESPONSES, json=onward, headers=key("r"))
        assert mine.json()["leyline"]["session"] == first["leyline"]["session"]
    assert len(engine.bodies) == 2


async def test_a_deleted_response_is_gone_for_all_that_go_on_from_it(engine: FakeEngine) -> None:
    """Its text isn't in any other stored response."""
    async with proxy_before(engine) as client:
        first = await ask(client, "The password is swordfish.")
        second = await ask(client, "More?", previous_response_id=first["id"])
        deleted = (await client.delete(f"{RESPONSES}/{first['id']}")).json()
        assert deleted == {"id": first["id"], "object": "response", "deleted": True}
        onward = await client.post(RESPONSES, json=body("And?", previous_response_id=second["id"]))
        listed = await client.get(f"{RESPONSES}/{second['id']}/input_items")
        kept = await client.get(f"{RESPONSES}/{second['id']}")
    assert onward.status_code == listed.status_code == 404
    assert "swordfish" not in kept.text


async def test_policies_see_stored_items_on_every_turn(engine: FakeEngine) -> None:
    """Text they take out never goes upstream; the stored copy is its owner's, as it was sent."""
    policy = "redact:patterns=[swordfish]"
    engine.receipt = forgotten
    async with proxy_before(engine, policy=policy) as client:
        first = await ask(client, "The password is swordfish.")
        second = await ask(client, "More?", previous_response_id=first["id"])
        listed = await client.get(f"{RESPONSES}/{second['id']}/input_items")
    assert len(engine.bodies) == 2
    assert not [sent for sent in engine.bodies if b"swordfish" in sent]
    assert [m["role"] for m in engine.sent["messages"]] == ["user", "assistant", "user"]
    assert "swordfish" in listed.text


async def test_a_conversation_is_bounded(engine: FakeEngine) -> None:
    """The bound is that of one request: storing it part by part is no way around."""
    async with proxy_before(engine, max_body_bytes=4096) as client:
        previous = None
        for _ in range(2):
            previous = (await ask(client, "x" * 3000, previous_response_id=previous))["id"]
        refused = await client.post(RESPONSES, json=body(previous_response_id=previous))
    assert refused.status_code == 413
    assert refused.json()["error"]["param"] == "previous_response_id"


@pytest.mark.parametrize(
    ("path", "param"),
    [
        ("?stream=true", "stream"),
        ("/input_items?limit=0", "limit"),
        ("/input_items?after=x", "after"),
    ],
)
async def test_wrong_parameters_are_named(engine: FakeEngine, path: str, param: str) -> None:
    """The routes of stored responses name them."""
    async with proxy_before(engine) as client:
        first = await ask(client)
        refused = await client.get(f"{RESPONSES}/{first['id']}{path}")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


async def test_references_dont_multiply_what_a_request_may_hold(engine: FakeEngine) -> None:
    """A small body that names a large item many times counts with the full length."""
    limits = {"red": {"max_body_bytes": 20_000}}
    async with proxy_before(engine, api_keys=TWO, tenants=limits) as client:
        large = body([{"role": "user", "content": "x" * 10_000}])
        first = (await client.post(RESPONSES, json=large, headers=key("r"))).json()
        listed = await client.get(f"{RESPONSES}/{first['id']}/input_items", headers=key("r"))
        item = {"type": "item_reference", "id": listed.json()["data"][0]["id"]}
        fine = await client.post(RESPONSES, json=body([item]), headers=key("r"))
        sent = len(engine.bodies)
        refused = await client.post(RESPONSES, json=body([item] * 3), headers=key("r"))
    assert fine.status_code == 200
    assert refused.status_code == 413
    assert refused.json()["error"]["param"] == "input"
    assert len(engine.bodies) == sent
