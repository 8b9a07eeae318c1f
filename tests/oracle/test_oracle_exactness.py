"""Cases without any difference at all: appends, forgets, and what other sessions see.

Bits are compared, so both sides must split the prompt into the same forwards. Each conversation
therefore has its first turn end exactly where the exact prefix ends later on.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from oracle_cases import draw_tokens
from oracle_check import BOUND, CONTROL_FACTOR, relative_error
from oracle_engine import Conversation, Ran, Treatment, edited_prompt, run_request, start_engine
from oracle_models import MODEL_NAMES, OracleModel
from oracle_reference import Fresh, Remembered, amortized_pieces, long_way_round

from leyline_engine.contract import Outcome

Models = Callable[[str], OracleModel]

FEW = ("llama", "qwen3", "glm-partial-interleaved", "deepseek-v2-yarn", "deepseek-v3")
FORCED = (5, 6, 7)


def assert_same_bits(left: Sequence[torch.Tensor], right: Sequence[torch.Tensor]) -> None:
    """Logits equal to the last bit."""
    assert len(left) == len(right)
    assert all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@dataclass(frozen=True, slots=True)
class Story:
    """An opening, and a second turn with a span in it that will be cut."""

    opening: tuple[int, ...]
    span: tuple[int, ...]
    rest: tuple[int, ...]

    @property
    def head(self) -> tuple[int, ...]:
        """The exact prefix: the first turn and its answer."""
        return (*self.opening, *FORCED)

    @property
    def whole(self) -> tuple[int, ...]:
        """The second turn's prompt."""
        return (*self.head, *self.span, *self.rest)

    @property
    def cut(self) -> tuple[int, int, tuple[int, ...]]:
        """The edit that removes the span."""
        return (len(self.head), len(self.head) + len(self.span), ())


def draw_story(seed: int, *, rest: int = 140) -> Story:
    """A story whose span and rest begin with different tokens."""
    rng = random.Random(seed)
    opening = draw_tokens(rng, 130)
    return Story(opening, (1, *draw_tokens(rng, 49)), (2, *draw_tokens(rng, rest - 1)))


def tell(conversation: Conversation, story: Story) -> Ran:
    """Run the first two turns; the second one read the span."""
    conversation.open(story.opening, FORCED)
    return conversation.open(story.whole, FORCED)


def clean_run(subject: OracleModel, story: Story, prompt: Sequence[int]) -> Ran:
    """A prompt on a fresh engine that has seen the story's first turn only."""
    engine = start_engine(subject)
    run_request(engine, story.opening, FORCED)
    ran = run_request(engine, prompt, FORCED)
    assert ran.receipt.tokens.prefix == len(story.head)
    return ran


@pytest.mark.parametrize("name", MODEL_NAMES)
def test_an_unedited_append_equals_a_run_without_leyline(name: str, oracle_model: Models) -> None:
    """Turns that only append give the bits of an engine that gets no payload."""
    rng = random.Random(1)
    subject = oracle_model(name)
    conversation, plain = Conversation(start_engine(subject)), start_engine(subject)
    prompt = draw_tokens(rng, 170)
    for _ in range(3):
        ran = conversation.open(prompt, FORCED, 9)
        bare = run_request(plain, prompt, FORCED, 9)
        assert_same_bits(ran.logits, bare.logits)
        assert ran.receipt.outcome is Outcome.UNEDITED
        assert ran.receipt.tokens == bare.receipt.tokens
        assert ran.receipt.lineage == ()
        prompt = (*ran.tokens, *draw_tokens(rng, 40))


@pytest.mark.parametrize("replacement", [(), (3, 4, 4)])
@pytest.mark.parametrize("name", MODEL_NAMES)
def test_forget_equals_a_run_that_never_saw_the_span(
    name: str, replacement: tuple[int, ...], oracle_model: Models
) -> None:
    """After a forget the bits are those of a fresh engine, and nothing is spliced."""
    subject, story = oracle_model(name), draw_story(2)
    conversation = Conversation(start_engine(subject))
    told = tell(conversation, story)
    edit = (*story.cut[:2], replacement)
    ran = conversation.edit([edit], (8, 8), FORCED, treatments=[Treatment.FORGET])
    never = clean_run(subject, story, edited_prompt(told.tokens, [edit], (8, 8)))
    assert ran.receipt.tokens.spliced == 0
    assert ran.receipt.lineage == ()
    assert_same_bits(ran.logits, never.logits)
    again = conversation.open((*ran.tokens, 4, 4), FORCED)
    assert again.receipt.tokens.prefix == len(ran.tokens)


@pytest.mark.parametrize("name", FEW)
def test_forget_behind_a_splice_leaves_nothing_of_the_splice(
    name: str, oracle_model: Models
) -> None:
    """Spliced KV may hide a reader of the forgotten span, so all of it is computed again."""
    subject, story = oracle_model(name), draw_story(3)
    conversation = Conversation(start_engine(subject))
    tell(conversation, story)
    spliced = conversation.edit([story.cut], (8, 8), FORCED)
    assert spliced.receipt.tokens.spliced > 0
    later = (len(story.head) + 70, len(story.head) + 90, (3,))
    ran = conversation.edit([later], (8,), FORCED, treatments=[Treatment.FORGET])
    never = clean_run(subject, story, edited_prompt(spliced.tokens, [later], (8,)))
    assert_same_bits(ran.logits, never.logits)
    assert ran.receipt.tokens.spliced == 0


@pytest.mark.parametrize("scope", ["tenant", "another tenant"])
@pytest.mark.parametrize("name", FEW)
def test_equal_tokens_of_another_session_get_clean_logits(
    name: str, scope: str, oracle_model: Models
) -> None:
    """A session that sends the spliced prompt's very tokens gets a fresh engine's bits."""
    subject, story = oracle_model(name), draw_story(4)
    poisoned = Conversation(start_engine(subject))
    tell(poisoned, story)
    spliced = poisoned.edit([story.cut], (8, 8), FORCED)
    prompt = (*spliced.tokens, 9, 9)
    other = Conversation(poisoned.engine, session="other", scope=scope).open(prompt, FORCED)
    clean = clean_run(subject, story, prompt)
    assert other.receipt.tokens.spliced == 0
    assert_same_bits(other.logits, clean.logits)

    source = remember_story(subject, story)
    truth = long_way_round(subject, amortized_pieces(source, [story.cut], (8, 8)), FORCED)
    assert relative_error(spliced.logits, truth.logits) <= BOUND
    # What the other session was spared: the cut span still shows in the splice.
    assert relative_error(spliced.logits, unspliced_logits(subject, spliced)) >= (
        CONTROL_FACTOR * BOUND
    )


def remember_story(subject: OracleModel, story: Story) -> Remembered:
    """The second turn, run plainly."""
    return long_way_round(subject, [Fresh(story.whole)], FORCED).turn


def unspliced_logits(subject: OracleModel, spliced: Ran) -> tuple[torch.Tensor, ...]:
    """Logits of the spliced turn's tokens in a plain run."""
    prompt = spliced.tokens[: -len(FORCED)]
    return long_way_round(subject, [Fresh(prompt)], FORCED).logits


@pytest.mark.parametrize("name", FEW)
def test_two_edits_with_equal_tokens_are_two_histories(name: str, oracle_model: Models) -> None:
    """Sessions that cut different spans and see the same tokens each keep their own KV."""
    subject = oracle_model(name)
    left = draw_story(5)
    right = Story(left.opening, (300, *left.span[:0:-1]), left.rest)
    first = Conversation(start_engine(subject), session="left")
    second = Conversation(first.engine, session="right")
    answers = []
    for conversation, story in ((first, left), (second, right)):
        tell(conversation, story)
        conversation.edit([story.cut], (8, 8), FORCED)
    for conversation, story in ((first, left), (second, right)):
        prompt = (*conversation.turns[-1].tokens, 9, 9)
        ran = conversation.open(prompt, FORCED)
        assert ran.receipt.tokens.prefix == len(prompt) - 2
        source = remember_story(subject, story)
        cut = long_way_round(subject, amortized_pieces(source, [story.cut], (8, 8)), FORCED).turn
        truth = long_way_round(subject, amortized_pieces(cut, (), (9, 9)), FORCED)
        assert relative_error(ran.logits, truth.logits) <= BOUND
        answers.append(ran)
    assert answers[0].tokens == answers[1].tokens
    assert answers[0].receipt.lineage != answers[1].receipt.lineage
    assert relative_error(answers[0].logits, answers[1].logits) >= CONTROL_FACTOR * BOUND
