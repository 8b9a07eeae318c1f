"""The composed ablation: whole sessions of the recall task through a real proxy, by policy and arm.

The other experiments splice once. Here a session's splices add up, as they do in use.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import msgspec

from leyline_engine.contract import FidelityProfile
from leyline_lab.errors import SubjectError
from leyline_lab.fidelity.agreement import percent
from leyline_lab.fidelity.experiment import (
    Cell,
    Chart,
    Record,
    ResultTable,
    Scale,
)
from leyline_lab.fidelity.judges import says
from leyline_lab.fidelity.recall_prompts import RecallStep, recall_steps
from leyline_lab.fidelity.recall_task import TOOLS
from leyline_lab.fidelity.statistics import difference, share
from leyline_policies import load_pipeline
from leyline_proxy.edits.prepare import prepare

from ..engines.stack import Stack, StackOptions, running_stack
from ..errors import StackError
from .replies import TIMEOUT_S, Reply, answer_of, judged

POLICIES = (
    "keep_all",
    "truncate_older_than:n=1,max_chars=0",
    "observation_masking:attention_window=12",
    "clear_tool_uses:trigger_tokens=300,keep=2",
)
DEFAULT_PROFILE = FidelityProfile(model="", boundary=1, quotes=3)
"""Settings of the third arm where nothing is recommended, as in a quick run."""

_CONTROL = POLICIES[0]
"""Cuts nothing: the arms must be equal."""
_QUICK = POLICIES[1:2]
_BATCHES = 4
_ANSWER_TOKENS = 24


class ComposedArm(StrEnum):
    """A way to serve the edited sessions."""

    REPREFILL = "re-prefill"
    SPLICE = "splice"
    PROFILE = "splice + profile"


@dataclass(frozen=True, slots=True)
class ComposedModel:
    """A model, and how a stack serves it."""

    name: str
    options: StackOptions


class Composed:
    """Plays sessions that read settings and ask for them, and judges each answer.

    The history is the same in every arm: after an answer was judged, the session continues with
    the right one.

    Args:
        profiles: returns the profiles that the run recommends; called when the first case is
            measured.
        sessions: number of sessions of a case, which starts its own proxies and engines.
        turns: number of turns of each.
    """

    name = "composed"
    title = "Composed ablation"

    def __init__(
        self,
        models: Sequence[ComposedModel],
        profiles: Callable[[], Sequence[FidelityProfile]],
        *,
        sessions: int = 2,
        turns: int = 14,
    ) -> None:
        self._models = {model.name: model for model in models}
        self._profiles = profiles
        self._sessions = sessions
        self._turns = turns

    def cases(self, scale: Scale) -> Sequence[str]:
        """Return ``MODEL/POLICY/BATCH``."""
        quick = scale is Scale.QUICK
        policies, batches = (_QUICK, 1) if quick else (POLICIES, _BATCHES)
        found = product(self._models, policies, range(batches))
        return [f"{name}/{policy}/{batch}" for name, policy, batch in found]

    def measure(self, case: str) -> Record:
        """Play a batch of sessions in every arm.

        Raises:
            SubjectError: a stack doesn't start, or a request fails.
        """
        name, policy, batch = case.rsplit("/", maxsplit=2)
        profile = _for_model(self._recommended.get(name, DEFAULT_PROFILE), name)
        sessions = {
            f"{batch}-{number}": recall_steps(f"{batch}-{number}", self._turns)
            for number in range(self._sessions)
        }
        record: dict[str, Cell] = {
            "boundary": profile.boundary,
            "quotes": profile.quotes,
            **_questions(sessions, policy),
        }
        options = replace(self._models[name].options, policy=policy)
        for arm in ComposedArm:
            try:
                with _stack(options, arm, profile) as stack:
                    record |= _played(stack, sessions, name, arm)
            except (StackError, httpx.HTTPError) as error:
                raise SubjectError(f"{name}, {policy}, {arm}: {error}") from error
        return record

    @cached_property
    def _recommended(self) -> Mapping[str, FidelityProfile]:
        """The recommended profiles, by model."""
        return {each.model: each for each in self._profiles()}

    def table(self, records: Mapping[str, Record]) -> ResultTable:
        """Return a row for each model, policy and arm."""
        groups = {
            (name, policy): [
                each
                for case, each in records.items()
                if case.rsplit("/", maxsplit=1)[0] == f"{name}/{policy}"
            ]
            for name, policy in product(self._models, POLICIES)
        }
        rows = [
            (*group, *_cells(found, arm))
            for group, found in groups.items()
            if found
            for arm in ComposedArm
        ]
        return ResultTable(
            title=self.title,
            question=(
                "Sessions of the recall task run through a proxy with a policy. How often does "
                "the model answer rightly or look up what it can't see, how often does it answer "
                "with a value that the policy cut, and how many tokens are prefilled?"
            ),
            columns=_COLUMNS,
            rows=tuple(rows),
            finding=_finding(groups),
            paper=(
                "The paper's ablation is on debug-gym (its abstract: +14.3 points of solved tasks "
                "with policy and splice); this task and these models are others."
            ),
            chart=_chart(groups),
        )


_COLUMNS = (
    "model",
    "policy",
    "arm",
    "questions",
    "score",
    "score low",
    "score high",
    "score, from re-prefill",
    "score, from re-prefill low",
    "score, from re-prefill high",
    "of kept values: right",
    "of cut values: answered",
    "of cut values: looked up",
    "prompt tokens",
    "prefilled tokens",
    "prefilled share",
)


def _for_model(profile: FidelityProfile, model: str) -> FidelityProfile:
    """Return the profile for a model, whatever its fingerprint."""
    return msgspec.structs.replace(profile, model=model, model_fingerprint="")


@contextmanager
def _stack(options: StackOptions, arm: ComposedArm, profile: FidelityProfile) -> Any:
    """Run the proxy and the engine of an arm.

    Raises:
        StackError: it doesn't start.
    """
    with TemporaryDirectory() as folder:
        if arm is ComposedArm.PROFILE:
            path = Path(folder) / "profile.json"
            path.write_bytes(msgspec.json.encode({"profiles": [profile]}))
            options = replace(options, fidelity_profile=path)
        with running_stack(options, splice=arm is not ComposedArm.REPREFILL) as stack:
            yield stack
    gc.collect()  # engines hold themselves in cycles, and with them their KV pools


def _questions(sessions: Mapping[str, Sequence[RecallStep]], policy: str) -> dict[str, Cell]:
    """Return for each question if the edited prompt shows its value."""
    policies = load_pipeline(policy)
    found: dict[str, Cell] = {}
    for session, steps in sessions.items():
        for index, step in enumerate(steps):
            if step.answer is not None:
                plain = [dict(message) for message in step.messages]
                sent = prepare(plain, policies, (), turn_index=index).messages
                text = "\n".join(str(message.get("content")) for message in sent)
                found[f"shown|{session}|{index}"] = int(says(text, step.answer))
    return found


def _played(
    stack: Stack, sessions: Mapping[str, Sequence[RecallStep]], model: str, arm: ComposedArm
) -> dict[str, Cell]:
    """Send all requests in order; return the replies to questions, and the tokens."""
    record: dict[str, Cell] = {}
    prompt = prefilled = 0
    with httpx.Client(base_url=stack.origin, headers=stack.headers, timeout=TIMEOUT_S) as client:
        for session, steps in sessions.items():
            for index, step in enumerate(steps):
                body = {
                    "model": model,
                    "messages": step.messages,
                    "tools": TOOLS,
                    "temperature": 0,
                    "max_tokens": _ANSWER_TOKENS if step.answer is not None else 1,
                }
                splices = arm is not ComposedArm.REPREFILL
                document = answer_of(client, session, body, splices=splices)
                tokens = document["leyline"]["tokens"]
                prompt += tokens["prompt"]
                prefilled += tokens["prefilled"]
                if step.answer is not None:
                    message = document["choices"][0]["message"]
                    record[f"{arm}|{session}|{index}"] = judged(message, step.answer).value
    return {**record, f"{arm}|prompt": prompt, f"{arm}|prefilled": prefilled}


@dataclass(frozen=True, slots=True)
class _Answered:
    """The replies of one arm."""

    shown: tuple[Reply, ...]
    """To questions whose value the edited prompt shows."""
    cut: tuple[Reply, ...]
    prompt: int
    prefilled: int

    @property
    def good(self) -> list[bool]:
        """For each question, if the reply leads to the right value."""
        return [reply is not Reply.WRONG for reply in (*self.shown, *self.cut)]


def _answered(records: Sequence[Record], arm: ComposedArm) -> _Answered:
    replies: dict[bool, list[Reply]] = {True: [], False: []}
    for record in records:
        for key, shown in record.items():
            kind, _, place = key.partition("|")
            if kind == "shown":
                replies[bool(shown)].append(Reply(str(record[f"{arm}|{place}"])))
    totals = (
        sum(int(record[f"{arm}|{name}"] or 0) for record in records)
        for name in ("prompt", "prefilled")
    )
    return _Answered(tuple(replies[True]), tuple(replies[False]), *totals)


def _cells(records: Sequence[Record], arm: ComposedArm) -> tuple[Cell, ...]:
    own, again = _answered(records, arm), _answered(records, ComposedArm.REPREFILL)
    score = share(sum(own.good), len(own.good))
    gained = difference(own.good, again.good)
    figures = (score.value, score.low, score.high, gained.value, gained.low, gained.high)
    return (
        arm.value,
        score.count,
        *(round(figure, 6) for figure in figures),
        _part(own.shown, Reply.RIGHT),
        _part(own.cut, Reply.RIGHT),
        _part(own.cut, Reply.LOOKS_UP),
        own.prompt,
        own.prefilled,
        round(own.prefilled / own.prompt, 6),
    )


def _part(replies: Sequence[Reply], wanted: Reply) -> float | None:
    return round(replies.count(wanted) / len(replies), 6) if replies else None


def _finding(groups: Mapping[tuple[str, str], Sequence[Record]]) -> str:
    lines = []
    for name in dict.fromkeys(name for name, _ in groups):
        records = [
            record
            for (model, policy), found in groups.items()
            if model == name and policy != _CONTROL
            for record in found
        ]
        if records:
            lines.append(f"{name}: {_described(records)}")
    return "\n".join(lines) or "No session was played."


def _described(records: Sequence[Record]) -> str:
    said = []
    for arm in ComposedArm:
        own = _answered(records, arm)
        score = share(sum(own.good), len(own.good))
        cut = share(own.cut.count(Reply.RIGHT), len(own.cut)) if own.cut else None
        still = f", answers cut values in {percent(cut)}" if cut is not None else ""
        said.append(
            f"{arm} scores {percent(score)} of {score.count} questions{still}, and prefills "
            f"{own.prefilled / own.prompt:.0%} of {own.prompt:,} tokens"
        )
    return "under the policies that cut, " + "; ".join(said) + "."


def _chart(groups: Mapping[tuple[str, str], Sequence[Record]]) -> Chart:
    shown = {group: found for group, found in groups.items() if found}
    return Chart(
        kind="bar",
        x_label="",
        y_label="share of prompt tokens that are prefilled",
        x=tuple(f"{name}\n{policy.partition(':')[0]}" for name, policy in shown),
        series={
            arm.value: tuple(
                round(own.prefilled / own.prompt, 6)
                for own in (_answered(found, arm) for found in shown.values())
            )
            for arm in ComposedArm
        },
    )
