"""The recall of cut outputs: sessions of the recall task through a proxy, with and without recall.

Where the model looks up a setting of an output that a policy cut, a client that recalls answers
with the output's address, and asks again::

    user       What is `format=`?
    assistant  <tool_call> lookup {"line": "format="}
    tool       leyline://sha256/6ae8a75555209fd6c44157c0aed8016e      the proxy fills it in
    assistant  Noted: `cache=`, `format=`.
    user       What is `format=`?
    assistant  falcon
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import product
from typing import Any

import httpx

from leyline_lab.errors import SubjectError
from leyline_lab.fidelity.agreement import percent
from leyline_lab.fidelity.experiment import (
    Cell,
    Chart,
    Record,
    ResultTable,
    Scale,
)
from leyline_lab.fidelity.recall_prompts import RecallStep, recall_steps
from leyline_lab.fidelity.recall_task import TOOLS
from leyline_lab.fidelity.statistics import share
from leyline_policies import load_pipeline
from leyline_proxy.edits.prepare import prepare

from ..engines.stack import Stack, running_stack
from ..errors import StackError
from .composed import ComposedModel
from .replies import TIMEOUT_S, Reply, answer_of, judged, looked_up

_TRUNCATE = "truncate_older_than:n=1,max_chars=0"
_BATCHES = 6
_ANSWER_TOKENS = 24
_VERDICTS = ("hit", "recompute", "fault")
"""Verdicts of texts that came into a prompt: from KV; prefilled, of the client's own list; and
prefilled, of the store."""


class RecallArm(StrEnum):
    """A way to serve the sessions."""

    KEEP_ALL = "keep_all"
    TRUNCATE = "truncate"
    RECALL = "truncate + recall"

    @property
    def policy(self) -> str:
        """The proxy's policy."""
        if self is RecallArm.KEEP_ALL:
            return "keep_all"
        return f"{_TRUNCATE},recallable=true" if self is RecallArm.RECALL else _TRUNCATE


class RecallOfCut:
    """Plays sessions whose outputs are cut, and counts who gets their settings back at what price.

    After a question, the session continues with the right answer. Where the client recalled a text,
    its history also has the exchange in front of that answer, so later prompts differ by arm.

    Args:
        sessions: number of sessions of a case, which starts its own proxies and engines.
        turns: number of turns of each.
    """

    name = "recall"
    title = "Recall of cut outputs"

    def __init__(
        self, models: Sequence[ComposedModel], *, sessions: int = 3, turns: int = 14
    ) -> None:
        self._models = {model.name: model for model in models}
        self._sessions = sessions
        self._turns = turns

    def cases(self, scale: Scale) -> Sequence[str]:
        """Return ``MODEL/BATCH``."""
        batches = range(1 if scale is Scale.QUICK else _BATCHES)
        return [f"{name}/{batch}" for name, batch in product(self._models, batches)]

    def measure(self, case: str) -> Record:
        """Play a batch of sessions in every arm.

        Raises:
            SubjectError: a stack doesn't start, or a request fails.
        """
        name, batch = case.rsplit("/", maxsplit=1)
        sessions = {
            f"{batch}-{number}": recall_steps(f"recall-{batch}-{number}", self._turns, long=True)
            for number in range(self._sessions)
        }
        record = _shown(sessions)
        for arm in RecallArm:
            recalls = arm is RecallArm.RECALL
            options = replace(self._models[name].options, policy=arm.policy, recall=recalls)
            try:
                with running_stack(options, splice=True) as stack:
                    record |= _played(stack, sessions, name, arm)
            except (StackError, httpx.HTTPError) as error:
                raise SubjectError(f"{name}, {arm}: {error}") from error
            gc.collect()  # engines hold themselves in cycles, and with them their KV pools
        return record

    def table(self, records: Mapping[str, Record]) -> ResultTable:
        """Return a row for each model and arm."""
        groups = {
            name: [each for case, each in records.items() if case.rpartition("/")[0] == name]
            for name in self._models
        }
        played = {
            (name, arm): _Totals.of(found, arm)
            for name, found in groups.items()
            if found
            for arm in RecallArm
        }
        return ResultTable(
            title=self.title,
            question=(
                "Sessions of the recall task run through a proxy whose policy cuts old outputs. "
                "How often does the model give a setting's value, how often does it look it up, "
                "and how many tokens are prefilled: with all outputs, with the cut ones, and if "
                "the client answers a look-up with the evicted output's address?"
            ),
            columns=_COLUMNS,
            rows=tuple((name, arm.value, *total.cells) for (name, arm), total in played.items()),
            finding=_finding(played),
            chart=_chart(played),
        )


_COLUMNS = (
    "model",
    "arm",
    "questions",
    "right",
    "right low",
    "right high",
    "looked up",
    "wrong",
    "score",
    "score low",
    "score high",
    "of cut values",
    "of cut values: right",
    "of cut values: right low",
    "of cut values: right high",
    "requests",
    "prompt tokens",
    "prefilled tokens",
    "prefilled share",
    "recalled",
    "recalled: hit",
    "recalled: recompute",
    "recalled: fault",
    "not recalled",
    "recalled tokens",
    "of recalled tokens: from KV",
)


def _shown(sessions: Mapping[str, Sequence[RecallStep]]) -> dict[str, Cell]:
    """Return for each question if the prompt that the policy cut shows its value."""
    policies = load_pipeline(_TRUNCATE)
    found: dict[str, Cell] = {}
    for session, steps in sessions.items():
        answered: set[str] = set()
        for index, step in enumerate(steps):
            if step.answer is None or step.key is None:
                continue
            plain = [dict(message) for message in step.messages]
            sent = prepare(plain, policies, (), turn_index=index).messages
            lines = "\n".join(str(message.get("content")) for message in sent).splitlines()
            shown = step.key in answered or f"{step.key}={step.answer}" in lines
            found[f"shown|{session}|{index}"] = int(shown)
            answered.add(step.key)
    return found


def _played(
    stack: Stack, sessions: Mapping[str, Sequence[RecallStep]], model: str, arm: RecallArm
) -> dict[str, Cell]:
    """Send all requests in order; return the replies to questions, and what they cost."""
    counted: Counter[str] = Counter()
    record: dict[str, Cell] = {}
    with httpx.Client(base_url=stack.origin, headers=stack.headers, timeout=TIMEOUT_S) as client:
        for session, steps in sessions.items():
            player = _Player(client, session, model, arm, counted)
            for index, step in enumerate(steps):
                reply = player.play(step)
                if reply is not None:
                    record[f"{arm}|{session}|{index}"] = reply.value
    names = ("requests", "prompt", "prefilled", "tokens", "price", "not", *_VERDICTS)
    return record | {f"{arm}|{name}": counted[name] for name in names}


@dataclass(slots=True)
class _Player:
    """The client of one session."""

    client: httpx.Client
    session: str
    model: str
    arm: RecallArm
    counted: Counter[str]
    exchanges: dict[int, list[Mapping[str, Any]]] = field(default_factory=dict)
    """Messages of recalls, by the number of the session's own messages in front of them."""

    def play(self, step: RecallStep) -> Reply | None:
        """Send a request; return the reaction, if it has a question."""
        if step.answer is None:
            self._say(step, 1)
            return None
        said = self._say(step, _ANSWER_TOKENS)
        reply = judged(said, step.answer)
        if reply is not Reply.LOOKS_UP or self.arm is not RecallArm.RECALL:
            return reply
        call = looked_up(said, "lookup", f"call-recalled-{len(step.messages)}")
        address = self._address(call.arguments.get("line")) if call is not None else None
        if call is None or address is None:
            return reply
        exchange = self.exchanges.setdefault(len(step.messages), [])
        reference = f"leyline://{address.replace(':', '/')}"
        exchange += [call.message, {"role": "tool", "tool_call_id": call.id, "content": reference}]
        said = self._say(step, _ANSWER_TOKENS)
        if judged(said, step.answer) is not Reply.RIGHT:
            # The model remarks on an output, as it does after every one.
            remark = {"role": "assistant", "content": said.get("content") or ""}
            exchange += [remark, step.messages[-1]]
            said = self._say(step, _ANSWER_TOKENS)
        return judged(said, step.answer)

    def _say(self, step: RecallStep, most: int) -> Mapping[str, Any]:
        """Send the history up to a request, and return the model's message."""
        body = {
            "model": self.model,
            "messages": self._history(step.messages),
            "tools": TOOLS,
            "temperature": 0,
            "max_tokens": most,
        }
        document = answer_of(self.client, self.session, body, splices=True)
        self._count(document["leyline"])
        message: Mapping[str, Any] = document["choices"][0]["message"]
        return message

    def _history(self, own: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        sent: list[Mapping[str, Any]] = []
        for place, message in enumerate(own):
            sent += [*self.exchanges.get(place, ()), message]
        return [*sent, *self.exchanges.get(len(own), ())]

    def _address(self, line: str | None) -> str | None:
        """Return the address of the session's evicted text with a line that begins so."""
        if not line:
            return None
        path = f"/v1/leyline/sessions/{self.session}"
        listed = self._decoded(self.client.get(f"{path}/parts"))["parts"]
        addresses = [each["address"] for each in listed]
        if not addresses:
            return None
        found = self._decoded(self.client.post(f"{path}/recall", json={"addresses": addresses}))
        for piece in found["pieces"]:
            if any(each.startswith(line) for each in piece.get("text", "").splitlines()):
                return str(piece["address"])
        return None

    def _decoded(self, answer: httpx.Response) -> dict[str, Any]:
        if answer.status_code != httpx.codes.OK:
            raise StackError(f"HTTP {answer.status_code}: {answer.text[:200]}")
        document: dict[str, Any] = answer.json()
        return document

    def _count(self, account: Mapping[str, Any]) -> None:
        recall = account.get("recall") or {"turns": (), "calls": (), "references": ()}
        for tokens in (account["tokens"], *(each["tokens"] for each in recall["turns"])):
            self.counted["requests"] += 1
            self.counted["prompt"] += tokens["prompt"]
            self.counted["prefilled"] += tokens["prefilled"]
        for piece in (*recall["calls"], *recall["references"]):
            if piece["verdict"] in _VERDICTS:
                self.counted[piece["verdict"]] += 1
                self.counted["tokens"] += piece["tokens"]
                self.counted["price"] += piece["price_tokens"]
            else:
                self.counted["not"] += 1


@dataclass(frozen=True, slots=True)
class _Totals:
    """The replies of one arm, and what they cost."""

    kept: Sequence[Reply]
    """To questions whose value the cut prompt shows."""
    cut: Sequence[Reply]
    counted: Mapping[str, int]

    @classmethod
    def of(cls, records: Sequence[Record], arm: RecallArm) -> _Totals:
        """Return the totals of several cases."""
        replies: dict[bool, list[Reply]] = {True: [], False: []}
        counted: Counter[str] = Counter()
        for record in records:
            for key, value in record.items():
                kind, _, rest = key.partition("|")
                if kind == "shown":
                    replies[bool(value)].append(Reply(str(record[f"{arm}|{rest}"])))
                elif kind == arm.value and "|" not in rest:
                    counted[rest] += int(value or 0)
        return cls(replies[True], replies[False], counted)

    @property
    def all(self) -> Sequence[Reply]:
        """All replies."""
        return (*self.kept, *self.cut)

    def share(self, *wanted: Reply) -> float:
        """Return a share of all replies."""
        return sum(map(self.all.count, wanted)) / len(self.all)

    @property
    def recalled(self) -> int:
        """Number of texts that came back."""
        return sum(self.counted[verdict] for verdict in _VERDICTS)

    @property
    def from_kv(self) -> float | None:
        """Share of the recalled texts' tokens that weren't prefilled."""
        tokens = self.counted["tokens"]
        return 1 - self.counted["price"] / tokens if tokens else None

    @property
    def cells(self) -> tuple[Cell, ...]:
        """The row, without model and arm."""
        right = share(self.all.count(Reply.RIGHT), len(self.all))
        score = share(len(self.all) - self.all.count(Reply.WRONG), len(self.all))
        cut = share(self.cut.count(Reply.RIGHT), len(self.cut)) if self.cut else None
        prompt, prefilled = self.counted["prompt"], self.counted["prefilled"]
        return tuple(
            round(cell, 6) if isinstance(cell, float) else cell
            for cell in (
                *(len(self.all), right.value, right.low, right.high),
                *(self.share(Reply.LOOKS_UP), self.share(Reply.WRONG)),
                *(score.value, score.low, score.high, len(self.cut)),
                *((cut.value, cut.low, cut.high) if cut is not None else (None, None, None)),
                *(self.counted["requests"], prompt, prefilled, prefilled / prompt),
                *(self.recalled, *(self.counted[verdict] for verdict in _VERDICTS)),
                *(self.counted["not"], self.counted["tokens"], self.from_kv),
            )
        )


_Played = Mapping[tuple[str, RecallArm], _Totals]


def _finding(played: _Played) -> str:
    lines = []
    for name in dict.fromkeys(name for name, _ in played):
        said = [_described(arm, total) for (model, arm), total in played.items() if model == name]
        lines.append(f"{name}: {'; '.join(said)}.")
    return "\n".join(lines) or "No session was played."


def _described(arm: RecallArm, total: _Totals) -> str:
    right = share(total.all.count(Reply.RIGHT), len(total.all))
    counted = total.counted
    said = (
        f"{arm} answers {percent(right)} of {right.count} questions with the value, looks up "
        f"{total.share(Reply.LOOKS_UP):.0%}, and prefills {counted['prefilled']:,} of "
        f"{counted['prompt']:,} prompt tokens"
    )
    if total.cut and arm is not RecallArm.KEEP_ALL:
        cut = share(total.cut.count(Reply.RIGHT), len(total.cut))
        said += f"; of {cut.count} cut values it gives {percent(cut)}"
    if total.recalled:
        said += f", after {total.recalled} recalls with {total.from_kv:.0%} of their tokens from KV"
    return said


def _chart(played: _Played) -> Chart:
    names = tuple(dict.fromkeys(name for name, _ in played))
    return Chart(
        kind="bar",
        x_label="",
        y_label="share of questions answered with the value",
        x=names,
        series={
            arm.value: tuple(round(played[name, arm].share(Reply.RIGHT), 6) for name in names)
            for arm in RecallArm
        },
    )
