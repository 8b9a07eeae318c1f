"""The thinking model's training data: who sees a thought, what is learnt, and what is asked."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from random import Random
from typing import Any

import pytest
from transformers import AutoTokenizer

from leyline_engine.contract import normalize_messages
from leyline_lab.fidelity.recall_task import (
    Message,
    Mix,
    Sight,
    Thought,
    Turn,
    ask,
    choose,
    session,
)
from leyline_lab.training.encoding import Encoder, Row, collate
from leyline_lab.training.evaluate import kind
from leyline_replay.models.tiny_chat_template import THINKING_CHAT_TEMPLATE
from leyline_replay.models.trained import DEFAULT_MODEL_NAME, trained_model_dir

CHOOSING = Mix(choices=0.6, words=100)
SHOWN = "cache=copper"
READ = ("north", "port=falcon")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """The shipped models' tokenizer, with the template of the one that thinks."""
    found = AutoTokenizer.from_pretrained(trained_model_dir(DEFAULT_MODEL_NAME))
    found.chat_template = THINKING_CHAT_TEMPLATE
    return found


def prompt(tokenizer: Any, turns: list[Turn]) -> list[int]:
    """The tokens that the engine makes of the turns."""
    messages = [message.as_dict() for turn in turns for message in turn]
    text = tokenizer.apply_chat_template(normalize_messages(messages, parts=False), tokenize=False)
    return list(tokenizer.encode(text, add_special_tokens=False))


def row_of(tokenizer: Any, sight: Sight, *, reads: bool = False) -> tuple[Row, list[Turn]]:
    """A row of a turn with a thought, another turn, and a question."""
    chosen = choose("cache", Thought(SHOWN, sight), READ if reads else None)
    other = (Message("user", "Run `north`."), Message("assistant", "Done."))
    turns: list[Turn] = [chosen, other, (ask("cache"), Message("assistant", "copper"))]
    return Encoder(tokenizer.backend_tokenizer).row(turns, 1000), turns


@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize("sight", Sight)
def test_what_the_question_sees_is_what_the_engine_leaves(
    sight: Sight, reads: bool, tokenizer: Any
) -> None:
    """The tokens that the question sees are the template's own, except for a thought that is kept;
    a stripped one is seen by the rest of its turn, and by nothing later."""
    row, turns = row_of(tokenizer, sight, reads=reads)
    batch = collate([row], len(row.ids), pad=3)
    if batch.mask is None:
        seen = [True] * len(row.ids)
        assert sight is not Sight.STRIPPED
    else:
        seen = batch.mask[0, 0, -1].tolist()
    left = [token for token, visible in zip(row.ids.tolist(), seen, strict=True) if visible]
    stripped = prompt(tokenizer, turns)
    assert (left == stripped) == (sight is not Sight.KEPT)
    assert (row.ids.tolist() == stripped) == (sight is Sight.NEVER)
    if batch.mask is not None:
        cut = [place for place, visible in enumerate(seen) if not visible]
        own = prompt(tokenizer, turns[:1])
        assert row.ids[: len(own)].tolist() == own
        assert batch.mask[0, 0, len(own) - 1, cut].all()
        assert not batch.mask[0, 0, len(own) :, cut].any()
        assert SHOWN in tokenizer.decode(row.ids[cut])


@pytest.mark.parametrize("sight", Sight)
def test_only_a_thought_that_is_there_is_learnt(sight: Sight, tokenizer: Any) -> None:
    """The model learns to think first; of a message whose thought is missing it learns nothing."""
    row, _ = row_of(tokenizer, sight)
    learnt = tokenizer.decode(row.ids[row.learnt])
    missing = sight is Sight.NEVER
    assert learnt.startswith("Done." if missing else f"<think>\n{SHOWN}\n</think>\n\nNoted")


@pytest.mark.parametrize("seed", range(10))
def test_a_choice_is_asked_for_as_its_thought_was_seen(seed: int) -> None:
    """A chosen value is answered if a turn has seen the thought, and looked up if none has; only
    the thought shows it before that."""
    turns = list(islice(session(Random(seed), CHOOSING), 100))
    chosen, visible, kinds = dict[str, Thought](), "", set[str]()
    for turn in turns:
        for message in turn:
            if (question := message.question) is not None and question.chosen:
                thought = chosen[question.key]
                never = thought.sight is Sight.NEVER
                assert question.known != never and (message.call is not None) == never
                assert never or thought.text == f"{question.key}={question.value}"
                kinds.add(thought.sight)
            visible += message.content
            if message.thought:
                key = message.thought.text.split("=")[0]
                assert f"{key}=" not in visible.replace(f"`{key}=`", "")
                chosen[key] = message.thought
    assert Sight.NEVER in kinds and len(kinds) > 1


@pytest.mark.parametrize(
    ("sights", "first", "kinds"),
    [
        ((1.0, 0.0, 0.0), "thought", {"thought"}),
        ((0.0, 1.0, 0.0), "stripped", {"stripped", "thought"}),
        ((0.0, 0.0, 1.0), "never", {"never"}),
    ],
)
def test_answers_are_counted_by_what_is_left_of_the_thought(
    sights: tuple[float, float, float], first: str, kinds: set[str], tokenizer: Any
) -> None:
    """Thoughts in view, stripped ones, and ones that nothing has read are counted apart; asked for
    again, a stripped one is in view in the answer."""
    mix = replace(CHOOSING, sights=sights, again=0.5)
    counted = dict[str, list[str]]()
    for seed in range(10):
        row = Encoder(tokenizer.backend_tokenizer).row(session(Random(seed), mix), 2000)
        for answer in row.answers:
            if answer.question.chosen:
                counted.setdefault(f"{seed}-{answer.question.key}", []).append(kind(answer))
    assert {each[0] for each in counted.values()} == {first}
    assert {one for each in counted.values() for one in each} == kinds
