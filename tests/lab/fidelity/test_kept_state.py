"""The recall task in single words, and what a hybrid model answers about what was cut of it."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from leyline_engine.contract import Directive
from leyline_lab.fidelity.comparison import FULL, REPREFILL, SPLICE
from leyline_lab.fidelity.experiment import Scale
from leyline_lab.fidelity.kept_state import KeptState
from leyline_lab.fidelity.replay_subject import ReplaySubject
from leyline_lab.fidelity.word_task import (
    ASK,
    CUT,
    KEYS,
    TOOL,
    UNKNOWN,
    VOCABULARY,
    cut_session,
    session,
)
from leyline_lab.training.hybrid import Stage, new_model, new_tokenizer, train
from leyline_replay.models.loader import load_model


def facts_of(words: list[str]) -> tuple[dict[str, str], list[tuple[str, str, str | None]]]:
    """All settings that outputs show, and each question with its answer and the value shown last,
    read word by word."""
    shown, asked, where = dict[str, str](), list[tuple[str, str, str | None]](), ""
    for place, word in enumerate(words):
        if word.startswith("<"):
            where = where if word == UNKNOWN else word
        elif word in KEYS and where == TOOL:
            shown[word] = words[place + 1]
        elif word in KEYS and where == ASK:
            asked.append((word, words[place + 1], shown.get(word)))
    return shown, asked


@pytest.mark.parametrize("seed", range(5))
def test_answers_are_what_was_shown_last(seed: int) -> None:
    """Whatever is asked has been answered with the last value, or is unknown."""
    words = session(Random(seed), 1200)
    _, asked = facts_of([*words, "<end>", "<end>"])
    complete = asked[:-1]
    assert len(complete) > 100 and any(value is None for *_, value in complete)
    assert all(said == (value or UNKNOWN) for _, said, value in complete)
    assert set(words) <= set(VOCABULARY) and CUT in words


@pytest.mark.parametrize("seed", range(5))
def test_only_the_cut_output_has_its_settings(seed: int) -> None:
    """Nothing else names them, and each question's answer is that of the whole session."""
    drawn = cut_session(Random(seed), 60, 40)
    before, cut, after = (facts_of([*part])[0] for part in (drawn.head, drawn.output, drawn.rest))
    assert len(cut) == 3 and not cut.keys() & {*drawn.head, *drawn.rest}
    asked = {kind: {key: value} for kind, (key, value) in drawn.questions.items()}
    assert asked.keys() == {"cut", "before", "after", "never"}
    for kind, shown in (("cut", cut), ("before", before), ("after", after)):
        assert asked[kind].items() <= shown.items()
    assert not asked["never"].keys() & {*drawn.head, *drawn.output, *drawn.rest}


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A hybrid model after three steps."""
    folder = tmp_path_factory.mktemp("hybrid") / "short"
    new_tokenizer().save_pretrained(folder)
    train(new_model(1).train(), folder, seed=1, stages=(Stage(3, 32, 8, 1e-3),))
    return folder


def test_messages_are_rendered_in_the_task_s_words(short: Path) -> None:
    """The chat template gives the tokens that training sees."""
    subject = ReplaySubject(load_model(str(short), device="cpu"), 1)
    messages = [
        {"role": "tool", "content": "k3 v17 k8 v2"},
        {"role": "system", "content": "w4 w9"},
        {"role": "user", "content": "k8"},
        {"role": "assistant", "content": "v2"},
        {"role": "user", "content": "k5"},
    ]
    words = [VOCABULARY[token] for token in subject.render(messages).tokens]
    shown = "<tool> k3 v17 k8 v2 <end> <text> w4 w9 <end> <ask> k8 v2 <end> <ask> k5"
    assert " ".join(words) == shown


def test_the_splice_keeps_the_state(short: Path) -> None:
    """Nothing but the question is computed, and the receipt says what was kept; a full case has all
    figures, and models without the words have no case."""
    subject = ReplaySubject(load_model(str(short), device="cpu"), 1)
    source = [*range(7, 71), *range(7, 71)]
    receipt = subject.spliced(source, [Directive(40, 50)], [3, 8]).receipt
    assert (receipt.state, receipt.tokens.prefilled) == ("kept", 2)
    experiment = KeptState([subject])
    cases = [case for case in experiment.cases(Scale.QUICK) if case.endswith("/0")]
    records = {case: experiment.measure(case) for case in cases}
    table = experiment.table(records)
    assert len(table.rows) == len(cases) * 4 == 24
    assert all(len(row) == len(table.columns) for row in table.rows)
    by_arm = {(row[1], row[2], row[3]): row for row in table.rows}
    for edit, rest in {key[:2] for key in by_arm}:
        full, again, spliced = (by_arm[edit, rest, arm] for arm in (FULL, REPREFILL, SPLICE))
        assert full[-4:-2] == again[-2:] == (0, 0)
        assert 0 < float(spliced[-2] or 0) < 1 and spliced[-2] != again[-4]
    assert not KeptState([ReplaySubject(load_model(device="cpu"), 1)]).cases(Scale.FULL)


@pytest.mark.nightly
def test_a_trained_hybrid_knows_what_was_cut(tmp_path: Path) -> None:
    """After ten minutes of training, kept values are right in every arm; a cut one comes back over
    a kept state, and never after a new prefill."""
    new_tokenizer().save_pretrained(tmp_path)
    train(new_model(1).train(), tmp_path, seed=1)
    subject = ReplaySubject(load_model(str(tmp_path), device="cpu"), 1)
    experiment = KeptState([subject])
    cases = [case for case in experiment.cases(Scale.FULL) if int(case.rsplit("/")[-1]) < 8]
    records = [experiment.measure(case) for case in cases]

    def count(what: str, arm: str) -> float:
        return sum(float(record[f"{what}|{arm}"] or 0) for record in records) / len(records)

    for arm in (FULL, REPREFILL, SPLICE):
        assert min(count("before|right", arm), count("after|right", arm)) > 0.85
    assert count("cut|right", REPREFILL) < 0.1
    assert count("cut|right", SPLICE) > 0.3
