"""The making of the shipped models' training data."""

from __future__ import annotations

import json
from itertools import islice
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

from leyline_engine.contract import normalize_messages
from leyline_lab.fidelity.recall_task import (
    STUB,
    SYSTEM_PROMPT,
    TOOLS,
    Hidden,
    Message,
    Mix,
    Turn,
    ask,
    read,
    session,
)
from leyline_lab.fidelity.recall_words import FILES, KEYS, VALUES
from leyline_lab.training.encoding import (
    Batch,
    Encoder,
    Row,
    collate,
    render,
)
from leyline_lab.training.model import hidden_states, model_config, new_model
from leyline_lab.training.tokenizer import train_tokenizer

HIDING = Mix(hidden=0.7, counted=0.5, notes=(0.3, 0.6, 0.1))


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """The tokenizer, made as training makes it."""
    return train_tokenizer(1, max_context=131_072)


def turns_of(seed: int, mix: Mix, count: int) -> list[Turn]:
    """The first turns of a session."""
    return list(islice(session(Random(seed), mix), count))


@pytest.mark.parametrize("seed", range(5))
def test_sessions_are_rendered_as_the_chat_template_does(seed: int, tokenizer: Any) -> None:
    """Training sees the same tokens that the engine makes of the same conversation."""
    turns = turns_of(seed, Mix(system=1.0), 30)
    messages = [message for turn in turns for message in turn]
    ours = "".join(render(message, tools=message.role == "system") for message in messages)
    theirs = tokenizer.apply_chat_template(
        normalize_messages([message.as_dict() for message in messages], parts=False),
        tools=list(TOOLS),
        tokenize=False,
    )
    assert ours == theirs
    row = Encoder(tokenizer.backend_tokenizer).row(turns, 10_000, tools=True)
    assert row.ids.tolist() == tokenizer.encode(theirs, add_special_tokens=False)


def test_words_are_single_tokens(tokenizer: Any) -> None:
    """Names and values of settings are one token each where a session shows them."""
    for word in (*(f"{key}=" for key in KEYS), *VALUES, *FILES):
        assert len(tokenizer.encode(word, add_special_tokens=False)) == 1, word
    assert not {*KEYS} & {*VALUES} and not {*KEYS} & {*FILES}


@pytest.mark.parametrize("text", ["", "héllo\n\t 日本 🎉", "x" * 50, "007 12345 3.14", " \r\n  a"])
def test_any_text_survives_the_tokenizer(text: str, tokenizer: Any) -> None:
    """Encoding and decoding gives back the same characters, whatever they are."""
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_the_tokenizer_can_be_made_again(tokenizer: Any) -> None:
    """Training it again gives the same one: it depends on nothing but the project."""
    again = train_tokenizer(1, max_context=131_072).backend_tokenizer.to_str()
    assert json.loads(again) == json.loads(tokenizer.backend_tokenizer.to_str())


@pytest.mark.parametrize("seed", range(20))
def test_answers_are_what_the_session_has_shown(seed: int) -> None:
    """A known setting is answered with the value shown; any other is looked up. A session asks for
    both, more often for what it has shown."""
    shown: dict[str, str] = {}
    asked = {True: 0, False: 0}
    for turn in turns_of(seed, Mix(), 60):
        for message in turn:
            if (question := message.question) is not None:
                assert question.known == (question.key in shown)
                asked[question.known] += 1
                if question.known:
                    name = f"{question.key}=" if question.shown else ""
                    assert message.content == name + shown[question.key]
                else:
                    assert message.call == ("lookup", {"line": f"{question.key}="})
            if message.role == "tool" or message.content.startswith("Read:\n"):
                pairs = (line.split("=") for line in message.content.splitlines() if "=" in line)
                shown |= dict(pairs)
    assert asked[True] > asked[False] > 0


def hidden_row(tokenizer: Any, hide: int) -> tuple[Row, dict[str, slice]]:
    """A row of four turns, the first of which reads an output that is hidden, and its parts."""
    done = (Message("user", "Run `north`."), Message("assistant", "Done."))
    turns = (
        read("north", "port=8417", "Noted: `port=`.", Hidden(hide)),
        done,
        done,
        (ask("port"),),
    )
    encoder = Encoder(tokenizer.backend_tokenizer)
    row = encoder.row(((Message("system", SYSTEM_PROMPT),), *turns), 1000)
    ids, parts = row.ids.tolist(), {}
    for name, text in (("stub", STUB), ("content", "port=8417")):
        wanted = encoder.ids(text)
        size = len(wanted)
        start = next(i for i in range(len(ids)) if ids[i : i + size] == wanted)
        parts[name] = slice(start, start + size)
    starts = [i for i, token in enumerate(ids) if token == encoder.ids("<|im_start|>")[0]]
    for name, index in (("note", 4), ("second", 5), ("third", 7), ("question", 9)):
        parts[name] = slice(starts[index], starts[index] + 3)
    return row, parts


def test_a_hidden_output_is_seen_by_the_next_turns_only(tokenizer: Any) -> None:
    """The note reads the output and not the stub; what comes after reads the stub alone."""
    row, part = hidden_row(tokenizer, hide=1)
    batch = collate([row], len(row.ids), pad=3)
    assert batch.mask is not None
    seen = batch.mask[0, 0]
    for reader, output in (("note", True), ("second", True), ("third", False), ("question", False)):
        assert bool(seen[part[reader], part["content"]].all()) == output, reader
        assert bool(seen[part[reader], part["content"]].any()) == output, reader
        assert bool(seen[part[reader], part["stub"]].all()) != output, reader
        assert bool(seen[part[reader], part["stub"]].any()) != output, reader
    assert not seen[part["content"], part["stub"]].any()
    assert row.positions[part["stub"].start] == row.positions[part["content"].start]
    assert np.all(np.diff(row.positions[part["content"].start :]) == 1)


def forward(model: Any, batch: Batch) -> torch.Tensor:
    """The input of the head, without gradients."""
    with torch.inference_mode():
        return hidden_states(model, batch.ids, batch.positions, batch.mask)


def test_what_is_hidden_has_no_direct_influence(tokenizer: Any) -> None:
    """Another hidden output changes what is computed later only by way of the note that read it."""
    config = model_config(vocab_size=len(tokenizer), eos_token_id=2, max_context=4096)
    model = new_model(config, seed=0).eval()
    row, part = hidden_row(tokenizer, hide=0)
    batch = collate([row], len(row.ids), pad=3)
    ids = batch.ids.clone()
    ids[0, part["content"]] = ids[0, part["content"]].flip(0)
    other = Batch(ids, batch.positions, batch.mask, batch.learnt, batch.real, batch.rows)
    assert not torch.equal(forward(model, batch)[0, -1], forward(model, other)[0, -1])

    assert batch.mask is not None
    unread = batch.mask.clone()
    unread[0, 0, part["content"].stop :, part["content"]] = False
    alone, changed = (
        forward(model, Batch(b.ids, b.positions, unread, b.learnt, b.real, b.rows))
        for b in (batch, other)
    )
    assert torch.equal(alone[0, part["content"].stop :], changed[0, part["content"].stop :])


def test_the_training_forward_is_the_models_own() -> None:
    """If positions don't jump, hidden states are those of transformers' forward, bit for bit."""
    model = new_model(model_config(vocab_size=300, eos_token_id=2, max_context=512), seed=0).eval()
    ids = torch.randint(0, 300, (2, 40), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        wanted = model.model(input_ids=ids, use_cache=False).last_hidden_state
        given = hidden_states(model, ids, torch.arange(40).expand(2, 40), None)
    assert torch.equal(given, wanted)


def test_rows_are_the_same_for_the_same_seed(tokenizer: Any) -> None:
    """Sessions and their rows depend on the generator's seed alone."""
    encoder = Encoder(tokenizer.backend_tokenizer)
    one, two = (encoder.row(session(Random(3), HIDING), 700, gaps=Random(4)) for _ in range(2))
    assert one.ids.tolist() == two.ids.tolist() and len(one.ids) <= 700
    assert one.positions.tolist() == two.positions.tolist()
    assert one.answers == two.answers and one.answers
