"""``leyline eval`` of a real engine over HTTP: figures, an engine that dies, keys, and faults."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import Result
from starlette.applications import Starlette
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from support.http_thread import ThreadServer, serving
from typer.testing import CliRunner

from leyline_lab.evaluation import endpoint, remote, sessions
from leyline_lab.evaluation.remote import Access, endpoint_evaluation
from leyline_lab.fidelity import tables
from leyline_lab.fidelity.experiment import EvaluationSessions, Record, Scale
from leyline_lab.fidelity.recall_prompts import long_session
from leyline_lab.fidelity.replay_subject import ReplaySubject
from leyline_lab.fidelity.single_prompt import SinglePrompt
from leyline_lab.fidelity.subject import Answer
from leyline_lab.fidelity.tables import RECALL_MODELS, answer_tables
from leyline_lab.stand_ins.random_models import RandomKind, build_random
from leyline_policies import load_pipeline
from leyline_proxy.cli.main import build_app
from leyline_replay.factory import serve_model
from leyline_replay.http.app import ServingOptions
from leyline_replay.models.loader import LoadedModel, load_model
from leyline_replay.models.trained import TRAINED_MODEL_NAMES

POOL = 16_384
Serve = Callable[..., ThreadServer]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model's folder."""
    return build_random(RandomKind.LLAMA, tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def loaded(model: Path) -> LoadedModel:
    """The tiny model."""
    return load_model(str(model), device="cpu")


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short sessions and short pauses."""
    policies = load_pipeline("truncate_older_than:n=2,max_chars=40")
    steps = tuple(sessions._step(policies, messages, ()) for messages in long_session(13))
    found = EvaluationSessions(steps, steps)
    monkeypatch.setattr(sessions, "evaluation_sessions", lambda: found)
    monkeypatch.setattr(endpoint, "PAUSES_S", (0.01, 0.01))
    monkeypatch.setattr(tables, "answer_tables", lambda *given: answer_tables(*given)[:1])
    monkeypatch.setattr(remote, "LENGTHS", {Scale.QUICK: 4})
    monkeypatch.delenv("LEYLINE_HINTS_SECRET", raising=False)


@pytest.fixture
def serve(loaded: LoadedModel) -> Iterator[Serve]:
    """Serves the tiny model, behind a fault if one is given."""
    running: list[tuple[ThreadServer, Starlette]] = []

    def start(
        fault: Callable[[ASGIApp], ASGIApp] = lambda app: app, port: int = 0, **options: Any
    ) -> ThreadServer:
        app = serve_model(loaded, pool_tokens=POOL, options=ServingOptions(**options))
        running.append((ThreadServer(fault(app), port), app))
        return running[-1][0]

    yield start
    for server, app in running:
        server.kill()
        server.join()
        app.state.shutdown()


def invoke(*arguments: object) -> Result:
    """The command's result."""
    return CliRunner().invoke(build_app(), ["eval", "--quick", *map(str, arguments)])


def said(result: Result) -> str:
    """The one line of an error."""
    assert result.exit_code == 2, result.output
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1, result.stderr
    return str(lines[0])


class Faulty:
    """The engine's application, one kind of whose requests go wrong.

    Args:
        path: beginning of the path of these requests.
        after: number of them that go well.
    """

    def __init__(self, app: ASGIApp, path: str, after: int = 0) -> None:
        self._app = app
        self._path = path
        self.left = after

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] == "http" and scope["path"].startswith(self._path):
            self.left -= 1
            if self.left < 0:
                await self.fail(scope, receive, send)
                return
        await self._app(scope, receive, send)

    async def fail(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request that goes wrong."""
        raise NotImplementedError


class Answers(Faulty):
    """Answers with a status and a body."""

    def __init__(self, app: ASGIApp, path: str, status: int, body: bytes, after: int = 0) -> None:
        super().__init__(app, path, after)
        self._status, self._body = status, body

    async def fail(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer."""
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": self._status, "headers": headers})
        await send({"type": "http.response.body", "body": self._body})


class Rewrites(Faulty):
    """Answers as the engine does, with something else in the text."""

    def __init__(self, app: ASGIApp, path: str, old: bytes, new: bytes, after: int = 0) -> None:
        super().__init__(app, path, after)
        self._old, self._new = old, new

    async def fail(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer."""

        async def rewritten(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [
                    (name, value) for name, value in message["headers"] if name != b"content-length"
                ]
            elif message["type"] == "http.response.body":
                message["body"] = message["body"].replace(self._old, self._new)
            await send(message)

        await self._app(scope, receive, rewritten)


class Dies(Faulty):
    """Ends the server in the middle of a request."""

    server: ThreadServer | None = None

    async def fail(self, scope: Scope, receive: Receive, send: Send) -> None:
        """End it, and answer nothing."""
        assert self.server is not None
        self.server.kill()
        cycle: Any = send.__self__  # type: ignore[attr-defined]
        cycle.transport.abort()


def as_log_probabilities(answer: Answer) -> Answer:
    """An answer as an endpoint gives it."""
    values = answer.first.astype("float64")
    values -= values.max()
    first = (values - _log_sum(values)).astype("float32")
    return Answer(first, answer.tokens, answer.text, answer.receipt)


def _log_sum(values: Any) -> Any:
    import numpy as np

    return np.log(np.exp(values).sum())


class AsEndpoint(ReplaySubject):
    """A model in this process whose answers have log probabilities, and no control."""

    has_control = False

    def prefilled(self, prompt: Any) -> Answer:
        """The answer as an endpoint gives it."""
        return as_log_probabilities(super().prefilled(prompt))

    def spliced(self, *arguments: Any, **options: Any) -> Answer:
        """The answer as an endpoint gives it."""
        return as_log_probabilities(super().spliced(*arguments, **options))


class Unrotated(AsEndpoint):
    """The same with wrong splices: the control of the comparison."""

    def spliced(self, source: Any, edits: Any, then: Any = (), *, rotated: bool = True) -> Answer:
        """Without rotation."""
        return super().spliced(source, edits, then, rotated=False)


def close(one: Record, other: Record) -> bool:
    """True if all measures are equal but for rounding."""
    return one.keys() == other.keys() and all(
        value == (pytest.approx(other[key], rel=1e-3, abs=1e-3) if value is not None else None)
        for key, value in one.items()
    )


def test_figures_are_those_of_the_engine_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers, divergences and distances of the shipped model are equal but for rounding; those of
    a splice without rotation aren't."""
    monkeypatch.setattr(remote, "LENGTHS", {Scale.QUICK: 16})
    found = sessions.evaluation_sessions()
    loaded = load_model("leyline-recall", device="cpu")
    local, wrong = (
        SinglePrompt([kind(loaded, 16)], RECALL_MODELS, found.recorded[11])
        for kind in (AsEndpoint, Unrotated)
    )
    app = serve_model(loaded, pool_tokens=POOL)
    with (
        serving(app) as server,
        endpoint_evaluation(Access(server.url), None, found, Scale.QUICK) as evaluation,
    ):
        asked = evaluation.experiments()[0]
        assert asked.cases(Scale.QUICK) == local.cases(Scale.QUICK)
        for case in ("leyline-recall/silent/0", "leyline-recall/restated/1"):
            measured = asked.measure(case)
            assert close(local.measure(case), measured), case
            assert not close(wrong.measure(case), measured), case
    app.state.shutdown()


@pytest.mark.nightly
def test_an_engine_that_dies_half_way_is_measured_to_the_end(serve: Serve, tmp_path: Path) -> None:
    """The journal stays, the same command continues, and the figures are those of one run."""
    whole = serve()
    assert invoke("--engine", whole.url, "--json", tmp_path / "whole.json").exit_code == 0
    dying: list[Dies] = []

    def fault(app: ASGIApp) -> ASGIApp:
        dying.append(Dies(app, "/generate", after=9))
        return dying[0]

    server = serve(fault)
    dying[0].server = server
    out = tmp_path / "r.json"
    line = said(invoke("--engine", server.url, "--json", out))
    assert "can't be reached" in line and "same command again" in line
    server.join()
    journal = tmp_path / "r.json.journal"
    before = journal.read_text().splitlines()
    assert len(before) == 3 and not out.exists()
    serve(port=server.port)
    html = tmp_path / "r.html"
    again = invoke("--engine", server.url, "--json", out, "--html", html)
    assert again.exit_code == 0, again.output
    documents = [json.loads((tmp_path / name).read_text()) for name in ("whole.json", "r.json")]
    assert documents[0]["tables"] == documents[1]["tables"]
    assert not journal.exists()
    found = documents[1]
    assert set(found["tables"]) == {"single_prompt"}
    assert set(found["left_out"]) == {
        "removal",
        "rotary_sweep",
        "chained_rotations",
        "storage_floor",
    }
    for table in found["tables"].values():
        at = table["columns"].index("arm")
        assert "no rotation" not in {row[at] for row in table["rows"]}
        assert all("No control" in text for text in table["finding"].splitlines()[:1])
        assert "no rotation to the nearer" not in table["chart"]["series"]
    assert "log probabilities" in again.stdout and "no control" in again.stdout
    page = html.read_text()
    assert all(text in page for text in (*found["notes"][:1], "Left out", "storage_floor"))


@pytest.mark.nightly
def test_a_tokenizer_comes_from_the_folder_or_from_the_engine(
    serve: Serve, model: Path, tmp_path: Path
) -> None:
    """Both give the same figures; without either, the error names the flag."""
    server = serve()
    fault = serve(lambda app: Answers(app, "/leyline/renderer", 404, b"{}"))
    one, other = tmp_path / "one.json", tmp_path / "other.json"
    assert invoke("--engine", server.url, "--json", one).exit_code == 0
    assert invoke("--engine", fault.url, "--model", model, "--json", other).exit_code == 0
    assert json.loads(one.read_text())["tables"] == json.loads(other.read_text())["tables"]
    line = said(invoke("--engine", fault.url, "--json", tmp_path / "third.json"))
    assert "--model PATH" in line


def test_an_engine_with_secrets_is_measured_with_them(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each missing secret is named; no error shows one."""
    server = serve(api_secret="sesame", hints_secret="parsley")
    to = ["--engine", server.url, "--json", tmp_path / "r.json"]
    assert "--api-key" in said(invoke(*to))
    line = said(invoke(*to, "--api-key", "salt"))
    assert "--api-key" in line and "salt" not in line
    assert "LEYLINE_HINTS_SECRET" in said(invoke(*to, "--api-key", "sesame"))
    monkeypatch.setenv("LEYLINE_HINTS_SECRET", "thyme")
    line = said(invoke(*to, "--api-key", "sesame"))
    assert "LEYLINE_HINTS_SECRET" in line and "thyme" not in line
    monkeypatch.setenv("LEYLINE_HINTS_SECRET", "parsley")
    monkeypatch.setenv("LEYLINE_UPSTREAM_API_KEY", "sesame")
    assert invoke(*to).exit_code == 0
    open_to_all = ["--engine", serve().url, "--json", tmp_path / "other.json"]
    assert "LEYLINE_HINTS_SECRET" in said(invoke(*open_to_all))


GENERATED = b'{"output_ids": [5], "meta_info": {"finish_reason": {}, "output_top_logprobs": %b}}'


@pytest.mark.parametrize(
    ("fault", "names"),
    [
        (lambda app: Answers(app, "/leyline/capability", 404, b"{}"), "no engine with Leyline"),
        (lambda app: Answers(app, "/leyline/capability", 503, b"{}"), "isn't ready"),
        (lambda app: Answers(app, "/leyline/capability", 200, b"[]"), "another form"),
        (lambda app: Answers(app, "/leyline/renderer", 200, b"\xff"), "another form"),
        (lambda app: Answers(app, "/flush_cache", 404, b"{}"), "can't empty its cache"),
        (
            lambda app: Answers(app, "/generate", 500, b'{"error": {"message": "no room"}}', 9),
            "no room",
        ),
        (lambda app: Answers(app, "/generate", 400, b'{"error": 7}', 9), "answers 400"),
        (lambda app: Answers(app, "/generate", 200, b"{}", 9), "another form"),
        (lambda app: Answers(app, "/generate", 200, GENERATED % b"[]", 9), "log probabilities"),
        (lambda app: Answers(app, "/generate", 200, GENERATED % b"[[[0.5, 5, null]]]"), "log prob"),
        (lambda app: Answers(app, "/generate", 200, GENERATED % b"[[[null, 5, 1]]]"), "log prob"),
        (lambda app: Answers(app, "/leyline/receipts", 200, b'{"receipt": 1}', 9), "another form"),
        (lambda app: Answers(app, "/leyline/receipts", 404, b"{}", 9), "no receipt"),
        (lambda app: Answers(app, "/flush_cache", 200, b"{}", 1), "in its cache"),
        (lambda app: Rewrites(app, "/leyline/receipts", b'"prompt":', b'"prompt":1'), "receipt"),
        (
            lambda app: Rewrites(app, "/leyline/capability", b'"splices":true', b'"splices":false'),
            "can't be spliced",
        ),
        (
            lambda app: Rewrites(
                app, "/leyline/capability", b'_fingerprint":"', b'_fingerprint":"x', 4
            ),
            "another model now",
        ),
        (
            lambda app: Rewrites(
                app,
                "/leyline/receipts",
                b'"spliced","reason":"spliced"',
                b'"reprefilled","reason":"source_evicted"',
            ),
            "source_evicted",
        ),
    ],
)  # fmt: skip
def test_what_goes_wrong_is_named(
    fault: Callable[[ASGIApp], ASGIApp],
    names: str,
    serve: Serve,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One line, status 2, no report; and the cases that were measured stay."""
    monkeypatch.setattr(endpoint, "_RECEIPT_S", 0.1)
    server = serve(fault)
    line = said(invoke("--engine", server.url, "--json", tmp_path / "r.json"))
    assert names in line
    assert not (tmp_path / "r.json").exists()


def test_an_engine_that_keeps_silent_is_named(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that isn't answered ends the run after its time, and isn't repeated."""
    monkeypatch.setattr(endpoint, "ANSWER_S", 0.5)
    asked: list[Faulty] = []

    class Silent(Faulty):
        async def fail(self, scope: Scope, receive: Receive, send: Send) -> None:
            while (await receive())["type"] != "http.disconnect":
                pass

    def fault(app: ASGIApp) -> ASGIApp:
        asked.append(Silent(app, "/generate"))
        return asked[0]

    server = serve(fault)
    line = said(invoke("--engine", server.url, "--json", tmp_path / "r.json"))
    assert "no answer within 0.5 s" in line and "same command again" in line
    assert asked[0].left == -1


def test_a_connection_that_fails_is_tried_again(serve: Serve, tmp_path: Path) -> None:
    """An engine that is back within the pauses costs nothing; one that stays away is named."""
    server = serve()
    port = server.port
    server.kill()
    server.join()
    to = ["--engine", f"http://127.0.0.1:{port}", "--json", tmp_path / "r.json"]
    assert "can't be reached (ConnectError)" in said(invoke(*to))
    back: list[ThreadServer] = []

    def pause(_: float) -> None:
        if not back:
            back.append(serve(port=port))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(endpoint, "time", SimpleNamespace(monotonic=time.monotonic, sleep=pause))
        result = invoke(*to)
    assert back
    assert result.exit_code == 0, result.output


def test_recall_models_are_those_that_ship() -> None:
    """Experiments know them by name, without the replay engine."""
    assert RECALL_MODELS == TRAINED_MODEL_NAMES
