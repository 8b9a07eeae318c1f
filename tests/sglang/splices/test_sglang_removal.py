"""Removal on a real SGLang: a cache that forgot a span is that of a session which never sent it."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from equality_kit import draw_tokens
from sglang_models import SglangModel
from sglang_server import SglangServer

from leyline_engine.contract import (
    Directive,
    EditPayload,
    Mode,
    SourceRef,
    edit_envelope,
    token_digest,
)

DECODED = 64
PREFIX, SPAN, MIDDLE, REST = 70, 30, 50, 20
KINDS = ("before", "middle")
ModelFolder = Callable[[SglangModel], Path]


class Session:
    """One session in a namespace of its own, so that no other's KV is found."""

    def __init__(self, server: SglangServer, name: str) -> None:
        self._server = server
        self._name = name
        self._vocabulary = vocabulary_of(server)

    def ask(self, turn: str, prompt: list[int], decoded: int, **members: Any) -> dict[str, Any]:
        """The answer to a turn, with the log-probabilities of all tokens of the vocabulary."""
        payload = EditPayload(session=self._name, scope="removal", turn=turn, **members)
        hints = msgspec.to_builtins(edit_envelope(f"{self._name}.{turn}", payload))
        sampling = {
            "temperature": 0,
            "max_new_tokens": decoded,
            "ignore_eos": True,
            "custom_params": {"kv_hints": hints},
        }
        return self._server.generate(
            prompt,
            decoded,
            sampling_params=sampling,
            cache_salt=self._name,
            return_logprob=True,
            token_ids_logprob=list(range(self._vocabulary)),
        )


def vocabulary_of(server: SglangServer) -> int:
    """The number of tokens of the server's model."""
    found = httpx.get(f"{server.base_url}/leyline/capability").json()
    return int(found["vocab_size"])


def bits(answer: dict[str, Any]) -> list[Any]:
    """The tokens, and every log-probability at every generated position."""
    scores = answer["meta_info"]["output_token_ids_logprobs"]
    assert len(scores) == DECODED
    return [answer["output_ids"], scores]


def removed(server: SglangServer, kind: str, mode: Mode, name: str, seed: int) -> list[Any]:
    """The answer after a span was sent, and taken out again."""
    prefix, span, middle, rest = parts(kind, seed)
    session = Session(server, name)
    session.ask("prefix", prefix, 1)
    told = prefix + span + middle
    answer = session.ask("told", told, 1)
    source = [*told, *answer["output_ids"]]
    # What the engine wrote has read the span, too.
    cuts = [Directive(PREFIX, PREFIX + SPAN, (), mode)]
    cuts += [Directive(len(told), len(source), (), mode)]
    return bits(
        session.ask(
            "removed",
            prefix + middle + rest,
            DECODED,
            sources=(SourceRef("told", len(source), token_digest(source)),),
            directives=tuple(cuts),
        )
    )


def never(server: SglangServer, kind: str, name: str, seed: int) -> list[Any]:
    """The answer of a session that the span was never sent in."""
    prefix, _, middle, rest = parts(kind, seed)
    session = Session(server, name)
    session.ask("prefix", prefix, 1)
    return bits(session.ask("removed", prefix + middle + rest, DECODED))


def parts(kind: str, seed: int) -> tuple[list[int], list[int], list[int], list[int]]:
    """Prefix, span, middle and rest."""
    rng = random.Random(seed)
    drawn = [list(draw_tokens(rng, count)) for count in (PREFIX, SPAN, MIDDLE, REST)]
    return drawn[0], drawn[1], drawn[2] if kind == "middle" else [], drawn[3]


def check(server: SglangServer, seed: int) -> None:
    """Forgetting leaves nothing, before and after the middle was computed; amortizing does."""
    for kind in KINDS:
        forgot = removed(server, kind, Mode.FORGET, f"f{kind}{seed}", seed)
        assert forgot == never(server, kind, f"n{kind}{seed}", seed)
    kept = removed(server, "middle", Mode.AMORTIZE, f"a{seed}", seed)
    assert kept != never(server, "middle", f"m{seed}", seed), "the control leaves no trace"


@pytest.mark.parametrize("name", ["mla_server", "gqa_server"])
def test_nothing_is_left_of_a_forgotten_span(name: str, request: pytest.FixtureRequest) -> None:
    """No log-probability of any token differs by a bit, at any of 64 decoded tokens, in fp32."""
    check(request.getfixturevalue(name), 5)


@pytest.mark.nightly
@pytest.mark.parametrize("model", [SglangModel.MLA, SglangModel.LLAMA])
def test_nothing_is_left_in_bf16(
    model: SglangModel, start_server: Callable[..., SglangServer], model_folder: ModelFolder
) -> None:
    """The same in bf16, and for several prompts."""
    server = start_server(model_folder(model), "--dtype", "bfloat16")
    for seed in range(6, 10):
        check(server, seed)
