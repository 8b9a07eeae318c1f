"""The recall table: a session through real proxies, with all outputs, cut and recalled ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from support.http_thread import serving

from leyline_lab.engines.stack import ServedEngine, StackOptions
from leyline_lab.errors import SubjectError
from leyline_lab.evaluation import recalled
from leyline_lab.evaluation.composed import ComposedModel
from leyline_lab.evaluation.recalled import RecallArm, RecallOfCut
from leyline_lab.evaluation.replies import (
    Reply,
    answer_of,
    judged,
    looked_up,
)
from leyline_lab.fidelity.experiment import Scale
from leyline_lab.fidelity.recall_prompts import recall_steps
from leyline_replay.factory import serve_model
from leyline_replay.http.app import ServingOptions
from leyline_replay.models.loader import load_model

MODEL = "leyline-recall"
CASE = f"{MODEL}/0"
POOL = 4096
KEY, SECRET = "the engine's key", "the secret of proxy and engine"
OPTIONS = StackOptions(model=MODEL, pool_tokens=POOL)


def table_of(options: StackOptions = OPTIONS) -> RecallOfCut:
    """One session of six turns, with a question for a value that is cut and others."""
    return RecallOfCut([ComposedModel(MODEL, options)], sessions=1, turns=6)


def replies(record: dict[str, Any], arm: RecallArm) -> list[str]:
    """The reactions to the questions, in order."""
    places = [key.partition("|")[2] for key in record if key.startswith("shown|")]
    return [record[f"{arm}|{place}"] for place in places]


class Exchanges:
    """Requests and answers of the client, in order."""

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []
        self.got: list[dict[str, Any]] = []

    def answer_of(self, client: Any, session: str, body: dict[str, Any], **named: Any) -> Any:
        """Send a request as the table does."""
        self.sent.append(body)
        self.got.append(answer_of(client, session, body, **named))
        return self.got[-1]


@pytest.fixture(scope="module")
def exchanges() -> Exchanges:
    """The requests and answers of :func:`record`."""
    return Exchanges()


@pytest.fixture(scope="module")
def record(exchanges: Exchanges) -> dict[str, Any]:
    """The measurements of the session."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recalled, "answer_of", exchanges.answer_of)
        return dict(table_of().measure(CASE))


def test_a_cut_value_is_given_after_its_recall_alone(record: dict[str, Any]) -> None:
    """With the output cut, the model looks its setting up; with the output put back it reads the
    value from there, and no token of the output is prefilled."""
    assert [value for key, value in record.items() if key.startswith("shown|")] == [1, 0, 1]
    assert replies(record, RecallArm.KEEP_ALL) == [Reply.RIGHT] * 3
    assert replies(record, RecallArm.TRUNCATE) == [Reply.RIGHT, Reply.LOOKS_UP, Reply.RIGHT]
    assert replies(record, RecallArm.RECALL) == [Reply.RIGHT] * 3
    counts = {name: record[f"{RecallArm.RECALL}|{name}"] for name in ("hit", "fault", "not")}
    assert counts == {"hit": 2, "fault": 0, "not": 0}, "the output put back evicts the newest"
    tokens, price = (record[f"{RecallArm.RECALL}|{name}"] for name in ("tokens", "price"))
    assert tokens > 200 and price == 0
    requests = [record[f"{arm}|requests"] for arm in RecallArm]
    assert requests == [7, 7, 11], "twice the look-up's answer, and the question again"


def test_the_client_s_history_keeps_the_recall(
    record: dict[str, Any], exchanges: Exchanges
) -> None:
    """A later request has the look-up, the reference, the remark and the question again in front of
    the answer; the tokens of all answers are counted."""
    *_, last = exchanges.sent
    found = [str(each["content"]).startswith("leyline://sha256/") for each in last["messages"]]
    place = found.index(True)
    before, after = last["messages"][place - 2 : place], last["messages"][place + 1 : place + 4]
    assert [each["role"] for each in before] == ["user", "assistant"]
    assert before[1]["tool_calls"][0]["function"]["name"] == "lookup"
    assert [each["role"] for each in after] == ["assistant", "user", "assistant"]
    assert after[1] == before[0]
    for kind in ("prompt", "prefilled"):
        total = sum(each["leyline"]["tokens"][kind] for each in exchanges.got)
        assert total == sum(record[f"{arm}|{kind}"] for arm in RecallArm)


def test_the_table_has_the_shares_of_each_arm(record: dict[str, Any]) -> None:
    """Every arm has a row with its shares, intervals and tokens, and the finding names them."""
    table = table_of().table({CASE: record})
    assert [row[:2] for row in table.rows] == [(MODEL, arm.value) for arm in RecallArm]
    shown = [dict(zip(table.columns, row, strict=True)) for row in table.rows]
    assert [each["right"] for each in shown] == [1.0, 0.666667, 1.0]
    assert [each["looked up"] for each in shown] == [0.0, 0.333333, 0.0]
    assert {each["score"] for each in shown} == {1.0} and {each["wrong"] for each in shown} == {0}
    assert [each["of cut values: right"] for each in shown] == [1.0, 0.0, 1.0]
    assert all(each["right low"] < each["right"] or not each["right"] for each in shown)
    assert [each["recalled: hit"] for each in shown] == [0, 0, 2]
    assert [each["of recalled tokens: from KV"] for each in shown] == [None, None, 1.0]
    for each in shown:
        share = each["prefilled tokens"] / each["prompt tokens"]
        assert each["prefilled share"] == pytest.approx(share, abs=1e-6)
    assert "2 recalls with 100% of their tokens from KV" in table.finding
    assert table.chart is not None and set(table.chart.series) == set(RecallArm)


def test_without_recall_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy that keeps no texts ends the run with the model and the arm, in one line."""
    own = StackOptions.settings

    def off(options: StackOptions, **named: Any) -> Any:
        return own(options, **named).model_copy(update={"recall": "off"})

    monkeypatch.setattr(StackOptions, "settings", off)
    with pytest.raises(SubjectError, match=rf"{MODEL}, truncate \+ recall: HTTP 403"):
        table_of().measure(CASE)


def test_quick_cases_are_also_full_ones() -> None:
    """An interrupted run of either scale continues with cases of the same names."""
    table = table_of()
    quick, full = table.cases(Scale.QUICK), table.cases(Scale.FULL)
    assert quick == [CASE] and set(quick) < set(full)


def test_outputs_are_worth_a_stub_with_an_address() -> None:
    """Outputs of long sessions have 640 characters or more, those of others as few as before."""
    long, short = (recall_steps("recall-0-0", 6, long=each) for each in (True, False))
    outputs = [
        [each["content"] for each in steps[-1].messages if each["role"] == "tool"]
        for steps in (long, short)
    ]
    assert all(len(text) > 640 for text in outputs[0]) and min(map(len, outputs[1])) < 320
    assert any(step.answer and step.key for step in long)


def test_a_call_in_the_text_is_read_as_one_of_the_parser() -> None:
    """Engines without a parser of tool calls leave them in the text; other text is no call."""
    function = {"name": "lookup", "arguments": '{"line": "cache="}'}
    parsed = {
        "content": None,
        "tool_calls": [{"id": "a", "type": "function", "function": function}],
    }
    call = '<tool_call>\n{"name": "lookup", "arguments": {"line": "cache="}}\n</tool_call>'
    for message in (parsed, {"content": call}):
        found = looked_up(message, "lookup", "a")
        assert found is not None and found.arguments == {"line": "cache="}
        assert found.message == {"role": "assistant", **parsed}
        assert judged(message, "copper") is Reply.LOOKS_UP
    for text in ("cache=", call.replace("lookup", "run"), call.replace('"}}', "")):
        assert looked_up({"content": text}, "lookup", "a") is None


@pytest.fixture(scope="module")
def served() -> Iterator[ServedEngine]:
    """A replay engine over HTTP, with a key and a secret."""
    options = ServingOptions(api_secret=KEY, hints_secret=SECRET)
    app = serve_model(load_model(MODEL, device="cpu"), pool_tokens=POOL, options=options)
    with serving(app) as server:
        yield ServedEngine(server.url, KEY, SECRET)
    app.state.shutdown()


def test_an_engine_at_an_address_has_the_same_figures(
    served: ServedEngine, record: dict[str, Any]
) -> None:
    """Every reply, verdict and count of tokens is that of an engine in this process."""
    assert table_of(StackOptions(served=served)).measure(CASE) == record


@pytest.mark.nightly
def test_the_quick_table_of_the_shipped_model() -> None:
    """Over three sessions, recall gives nearly all cut values, and most of their KV is found."""
    table = RecallOfCut([ComposedModel(MODEL, StackOptions(model=MODEL, pool_tokens=16_384))])
    (case,) = table.cases(Scale.QUICK)
    found = table.table({case: table.measure(case)})
    _, cut, recalled = (dict(zip(found.columns, row, strict=True)) for row in found.rows)
    assert cut["of cut values"] == recalled["of cut values"] >= 8
    assert cut["of cut values: right"] < 0.2
    assert recalled["of cut values: right"] > 0.9
    assert recalled["of recalled tokens: from KV"] > 0.6
    assert recalled["prefilled share"] < cut["prefilled share"]
