"""Tokens that reuse could serve: what is live, and the positions that no reuse may serve."""

from __future__ import annotations

from array import array

import pytest
from support.replay_engine import LIVE, make_engine, random_tokens, register, run

from leyline_lab.reuse.figures import Closeness
from leyline_lab.reuse.recovery import recoverable_tokens, tokens_by_arm
from leyline_lab.reuse.replay_engine import live_sequences

DOC = random_tokens(150, 9)
HEAD = random_tokens(50, 1)


def ids(*parts: list[int]) -> array[int]:
    """Parts one after the other."""
    return array("q", (token for part in parts for token in part))


@pytest.mark.parametrize(
    ("live", "prompt", "prefix", "found"),
    [
        (ids(HEAD, DOC), ids([1] * 60, DOC, [2]), 0, 150),
        (ids(HEAD, DOC), ids([1] * 60, DOC), 0, 149),
        (ids(HEAD, DOC), ids([1] * 60, DOC, [2]), 100, 110),
        (ids(DOC), ids([1] * 60, DOC, [2]), 0, 118),
        (ids(HEAD, DOC), ids([1], DOC, [2]), 0, 119),
        (ids(HEAD, DOC[:64]), ids([1] * 60, DOC, [2]), 0, 64),
        (ids(HEAD, DOC[:63]), ids([1] * 60, DOC, [2]), 0, 0),
    ],
    ids=["whole", "last token", "prefix", "sink of source", "sink of prompt", "64", "63"],
)
def test_what_could_be_reused(
    live: array[int], prompt: array[int], prefix: int, found: int
) -> None:
    """Runs of 64 tokens count, outside the prefix, the first 32 positions and the last token."""
    assert recoverable_tokens([live], prompt, prefix) == found


def test_live_sequences_that_share_a_beginning_hide_nothing() -> None:
    """A run across the point where two live sequences part is found in each of them."""
    one, other = ids(HEAD, DOC, [1] * 80), ids(HEAD, DOC[:100], [2] * 80)
    prompt = ids([3] * 60, DOC[60:100], [2] * 80, [4])
    assert recoverable_tokens([one, other], prompt, 0) == 120
    assert recoverable_tokens([one], prompt, 0) == 0


def test_other_methods_find_whole_chunks_only() -> None:
    """An aligned run of 256 tokens is found, and a document between two boundaries is not."""
    text = random_tokens(600, 4)
    prompt = ids([1] * 61, text[256:600], [2])
    found = tokens_by_arm([ids(text)], prompt, 0)
    assert found["lmcache"] == 256
    assert 0 < found["cdc"] < recoverable_tokens([ids(text)], prompt, 0) == 344
    assert tokens_by_arm([ids(HEAD, DOC[:64])], ids([1] * 60, DOC, [2]), 0)["lmcache"] == 0


def test_the_engine_is_asked_and_not_its_index() -> None:
    """Sequences are live that no index knows, also where their keys are private."""
    engine = make_engine(pool=2000)
    first, second = [*HEAD, 1, *DOC, 2], [*random_tokens(60, 3), 3, *DOC, 4]
    run(engine, first, register("t1", session="a"), reuse=LIVE)
    record = run(engine, second, register("t1", session="b"), decode=2, reuse=LIVE)[1]
    assert record.receipt.lineage != ()
    assert engine.cache.reuse is not None
    engine.cache.reuse.clear()
    live = sorted(sequence.tolist() for sequence in live_sequences(engine))
    assert live == sorted([first, [*second, *record.output_ids[:2]]])
    engine.flush()
    assert live_sequences(engine) == []


def test_divergence_is_the_first_other_token() -> None:
    """It counts equal tokens from the beginning, and is the length if all are equal."""
    zeros = (0.0, 0.0, 0.0)
    assert Closeness(zeros, (True, False, True)).first_divergence == 1
    assert Closeness(zeros, (True, True, True)).first_divergence == 3
