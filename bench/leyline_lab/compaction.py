"""The first turn after a compaction against the same prompt fully cached, in the same run.

A model writes a summary of a history of several thousand tokens: a scripted one in the embedded
engine, or with `--engine sglang` the recall model in a real SGLang on this machine's CPU, which
writes words without sense. The harness's next list quotes it, and keeps the end of the history.
That list is sent twice: the first time its parts are spliced, the second time all of it is cached.
With `compaction_edits: exact` the summary and the kept messages are prefilled. `summarize` is the
policy: it has the summary written beside the requests, and the client sends its whole history.
"""

from __future__ import annotations

import json
import random
import re
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median
from typing import Any

import httpx

from leyline_proxy.telemetry.logging import configure_logging

from .console import write_json
from .engines.process import SHIPPED_NAME, shipped_model
from .engines.sglang import sglang_server
from .harness.arguments import Arguments
from .harness.report import show
from .proxy_cost.systems import leyline
from .stand_ins.scripted_model import SCRIPTED, Prompt, Reply, build_scripted, scripted_model
from .stand_ins.serving import serving

ASK = "Summarize the work so far."
MODES = ("amortize", "exact", "summarize")
POLICY = "summarize:trigger_tokens=1000,keep_messages=2,summary_tokens={tokens}"
WRITTEN = 'leyline_policy_completions_total{result="written"}'


def words(seed: object, lines: int) -> str:
    """Return a text that no other has a passage of."""
    rng = random.Random(str(seed))
    made = [["".join(rng.choices("aeilmnorst", k=5)) for _ in range(8)] for _ in range(lines)]
    return "\n".join(f"{' '.join(line)}." for line in made)


SUMMARY = words(1, 40)
GO_ON = {"role": "user", "content": "Go on."}


@dataclass(frozen=True)
class Served:
    """A running engine, and how its model answers at length."""

    url: str
    model: str
    members: dict[str, Any] = field(default_factory=dict)
    """Of each request."""
    answer_tokens: int = 1600
    summary_tokens: int = 1600


def script(prompt: Prompt) -> tuple[Reply, bool]:
    """Answer a request for a summary with it, and others with a text of their own."""
    asked = prompt.messages[-1][1]
    task = asked.splitlines()[0]
    answer = SUMMARY if asked.startswith("Summarize") else f"Done: {task}\n{words(task, 8)}"
    return Reply(answer), True


@contextmanager
def replay_engine() -> Iterator[Served]:
    """Serve a scripted model in this process."""
    with (
        tempfile.TemporaryDirectory() as folder,
        scripted_model(build_scripted(Path(folder) / "model"), script) as model,
        serving(model.app) as upstream,
    ):
        yield Served(upstream, SCRIPTED)


@contextmanager
def sglang_engine() -> Iterator[Served]:
    """Serve the recall model in SGLang. Its answers are whole words, seldom twice the same: made
    into tokens again they are the same ones, as a trained model's nearly always are. They end by
    themselves, also like a trained model's: of an answer that its length cuts, the last token has
    no KV, and is a gap of its own."""
    tokenizer = json.loads((shipped_model() / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    whole = (token for text, token in vocabulary.items() if re.fullmatch("Ġ[a-z]{3,}", text))
    end = (each["id"] for each in tokenizer["added_tokens"] if each["content"] == "<|im_end|>")
    bias = dict.fromkeys(map(str, [*whole, *end]), 100)
    members = {"logit_bias": bias, "frequency_penalty": 1}
    with sglang_server(None, Path("out/compaction_sglang.log")) as server:
        yield Served(server.url, SHIPPED_NAME, members, answer_tokens=24, summary_tokens=400)


ENGINES = {"replay": replay_engine, "sglang": sglang_engine}


class Agent:
    """A client of one proxy."""

    def __init__(self, client: httpx.Client, served: Served, session: str) -> None:
        self._client = client
        self._served = served
        self._session = session

    def ask(
        self, chat: list[dict[str, str]], tokens: int, policy: str = ""
    ) -> tuple[str, float, Any]:
        """Return a streamed answer's text, its TTFT in ms, and its account."""
        body = {"model": self._served.model, "messages": chat, "temperature": 0, "stream": True}
        body |= {"max_tokens": tokens + 16, "min_tokens": tokens, **self._served.members}
        return self._streamed(body | ({"leyline": {"policy": policy}} if policy else {}))

    def compacted(self, rounds: int) -> tuple[Any, Any]:
        """Return TTFT and tokens of the turn after a compaction, and of the same list again."""
        served, chat = self._served, self._worked(rounds)
        asking = [*chat, {"role": "user", "content": ASK}]
        summary, _, _ = self.ask(asking, served.summary_tokens)
        quoting = {"role": "user", "content": f"So far:\n{summary}"}
        return self._twice([chat[0], quoting, *chat[-2:], GO_ON])

    def summarized(self, rounds: int) -> tuple[Any, Any]:
        """Return the same of the first turn with a policy's summary."""
        served, chat, before = self._served, self._worked(rounds), self._summaries()
        policy = POLICY.format(tokens=served.summary_tokens)
        self.ask(chat[:-1], served.answer_tokens, policy)
        deadline = time.monotonic() + 60
        while self._summaries() == before:
            if time.monotonic() > deadline:
                raise TimeoutError("no summary came")
            time.sleep(0.02)
        return self._twice([*chat, GO_ON], policy)

    def _worked(self, rounds: int) -> list[dict[str, str]]:
        """Return the history of the session."""
        served, session = self._served, self._session
        chat = [{"role": "system", "content": f"You repair {session}.\n{words(session, 60)}"}]
        for number in range(rounds):
            text = f"Task {session}.{number}\n{words(f'{session}.{number}', 40)}"
            chat.append({"role": "user", "content": text})
            said, _, _ = self.ask(chat, served.answer_tokens)
            chat.append({"role": "assistant", "content": said})
        return chat

    def _twice(self, chat: list[dict[str, str]], policy: str = "") -> tuple[Any, Any]:
        first, again = (self.ask(chat, self._served.answer_tokens, policy) for _ in range(2))
        return (first[1], first[2]["tokens"]), (again[1], again[2]["tokens"])

    def _summaries(self) -> str:
        lines = self._client.get("/metrics").text.splitlines()
        return next((line for line in lines if line.startswith(WRITTEN)), "")

    def _streamed(self, body: dict[str, Any]) -> tuple[str, float, Any]:
        begun, first, text, account = time.perf_counter(), 0.0, "", None
        headers = {"x-leyline-session": self._session}
        with self._client.stream(
            "POST", "/v1/chat/completions", json=body, headers=headers
        ) as answer:
            for line in answer.iter_lines():
                if not line.startswith("data: {"):
                    continue
                chunk = json.loads(line.removeprefix("data: "))
                said = (chunk.get("choices") or [{}])[0].get("delta", {}).get("content") or ""
                if said and not first:
                    first = time.perf_counter() - begun
                text, account = text + said, chunk.get("leyline") or account
        return text, 1e3 * first, account


def measure(mode: str, served: Served, samples: int, rounds: int) -> dict[str, Any]:
    """Return the figures of one mode."""
    summarizes = mode == "summarize"
    edits = {"LEYLINE_EDIT_TIMING": "now"} if summarizes else {"LEYLINE_COMPACTION_EDITS": mode}
    with (
        tempfile.TemporaryDirectory() as logs,
        leyline("proxy", served.url, Path(logs), LEYLINE_LOG_LEVEL="error", **edits) as proxy,
        httpx.Client(base_url=proxy.origin, timeout=120) as client,
    ):
        found = []
        for at in range(samples + 1):
            agent = Agent(client, served, f"{mode}-{at}")
            run = agent.summarized if mode == "summarize" else agent.compacted
            found.append(run(rounds if at else 2))
    del found[0]  # warms up
    first, again = zip(*found, strict=True)
    ttft = median(ms for ms, _ in first)
    floor = median(ms for ms, _ in again)
    return {
        "prompt_tokens": mean(tokens["prompt"] for _, tokens in first),
        "prefilled_tokens": mean(tokens["prefilled"] for _, tokens in first),
        "ttft_ms": ttft,
        "cached_ttft_ms": floor,
        "ratio": ttft / floor,
    }


def main() -> None:
    """Measure all modes, print, write."""
    parser = Arguments(__doc__)
    parser.add_argument("--engine", choices=ENGINES, default="replay")
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=6, help="turns of the history")
    given = parser.parse_args()
    configure_logging("error", "console")
    with ENGINES[given.engine]() as served:
        figures = {mode: measure(mode, served, given.samples, given.rounds) for mode in MODES}
    rows = [
        (
            mode,
            *(f"{each[name]:.0f}" for name in ("prompt_tokens", "prefilled_tokens")),
            *(f"{each[name]:.0f}" for name in ("ttft_ms", "cached_ttft_ms")),
            f"{each['ratio']:.2f}",
        )
        for mode, each in figures.items()
    ]
    show(("mode", "prompt", "prefilled", "TTFT, ms", "cached, ms", "ratio"), rows)
    write_json(given.json, figures)
