"""The documentation's examples run: commands, requests, programs, files of settings."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
from _pytest.mark import ParameterSet
from support.doc_examples import MODEL, NOT_RUN, Done, Examples
from support.redis_server import redis_server
from sybil import Document
from sybil.parsers.markdown import SkipParser

from leyline_lab.stand_ins.serving import serving
from leyline_proxy.http.app import create_app
from leyline_proxy.settings import Settings
from leyline_proxy.upstream.embedded import create_embedded_engine

REPOSITORY = Path(__file__).parents[2]
DEMO = REPOSITORY / "bench" / "leyline_lab" / "demo" / "session.jsonl.gz"
VALUES = REPOSITORY / "deploy" / "helm" / "leyline" / "values.schema.json"
GENERATED = {"docs/metrics.md", "docs/api/cli.md", "docs/api/http.md", "docs/api/settings.md"}
SKIPPED = {
    ("docs/concepts/proof.md", "needs a session"),
    ("docs/concepts/recall.md", "needs a session"),
    ("docs/evaluation.md", "takes minutes"),
    ("docs/outside-benchmarks.md", "needs a model that can do the tasks"),
    ("docs/policies.md", "needs recorded sessions"),
    ("docs/models.md", "needs SGLang, which tests/sglang runs"),
    ("docs/sglang.md", "needs SGLang, which tests/sglang runs"),
}
"""Blocks that say in a comment why they aren't run."""


PRINTED = "```python\nprint({!r})\n```\n\n<!-- prints -->\n```text\n{}\n```\n"


def _pages() -> list[str]:
    """Pages but for those that are written, and results, whose commands take minutes to hours."""
    docs = (str(path.relative_to(REPOSITORY)) for path in (REPOSITORY / "docs").rglob("*.md"))
    kept = {page for page in docs if not page.startswith("docs/results/")}
    return sorted({"README.md", *kept} - GENERATED)


def _blocks() -> Iterator[tuple[str, str, str]]:
    """Page, language and text of every fenced block."""
    for page in _pages():
        text = (REPOSITORY / page).read_text(encoding="utf-8")
        for found in re.finditer(r"^( *)```(.*)\n((?:.*\n)*?)\1```$", text, re.MULTILINE):
            yield page, found[2], found[3]


@dataclass(frozen=True, slots=True)
class Stack:
    """The addresses of proxy, engine and Redis."""

    proxy: str
    engine: str
    redis: str
    served: dict[str, Done] = field(default_factory=dict)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A proxy before the engine that ships, with a session to claim from."""
    engine = create_embedded_engine("replay", {"default_max_tokens": 512})
    with (
        redis_server(tmp_path_factory.mktemp("redis")) as redis,
        serving(engine) as behind,
        serving(create_app(Settings(upstream=behind))) as origin,
    ):
        body = {
            "model": MODEL,
            "max_tokens": 8,
            "messages": [
                {"role": "user", "content": f"Part {n}: {'word ' * 30}"} for n in range(4)
            ],
        }
        headers = {"x-leyline-session": "build-42"}
        answer = httpx.post(f"{origin}/v1/chat/completions", json=body, headers=headers, timeout=60)
        assert answer.status_code == 200, answer.text
        yield Stack(origin, behind, redis.url)


@pytest.fixture
def examples(stack: Stack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Examples:
    """A folder with what examples name, and the addresses that replace those they name."""
    for place in ("etc", "lib", "log", "out"):
        (tmp_path / place).mkdir()
    (tmp_path / "etc" / "audit.key").write_text("a key of the tests, long enough\n")
    (tmp_path / "key").write_text("KEY-THAT-YOU-HAVE\n")
    (tmp_path / "text").write_text("a text\n")
    shutil.copyfile(DEMO, tmp_path / "sessions.jsonl.gz")
    monkeypatch.setattr("leyline_proxy.telemetry.logging.configure_logging", lambda *_: None)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    places = {
        "http://127.0.0.1:8790": stack.proxy,
        "localhost:8790": stack.proxy.removeprefix("http://"),
        **{f"http://gpu{number}:30000": stack.engine for number in (1, 2, 3)},
        "http://router:8000": stack.engine,
        "redis://127.0.0.1:6379/0": stack.redis,
        "/etc/leyline": str(tmp_path / "etc"),
        "/var/lib/leyline": str(tmp_path / "lib"),
        "/var/log/leyline": str(tmp_path / "log"),
    }
    return Examples(tmp_path, places, stack.proxy, monkeypatch, stack.served, VALUES, stack.engine)


def _by_cost() -> list[str | ParameterSet]:
    """Pages; the one whose libraries take seconds to import is left to the night."""
    return [
        pytest.param(page, marks=pytest.mark.nightly) if page == "docs/clients.md" else page
        for page in _pages()
    ]


def _loading() -> list[str]:
    """Pages with a server that loads its engine itself, which takes seconds."""
    serve = re.compile(r"^\s*leyline serve (?!.*--upstream)", re.MULTILINE)
    blocks = [(page, text) for page, kind, text in _blocks() if kind in ("sh", "bash")]
    return sorted({page for page, text in blocks if serve.search(text.replace("\\\n", " "))})


@pytest.mark.parametrize("page", _by_cost())
def test_examples_run(page: str, examples: Examples) -> None:
    """Each block of a page does what it shows, one after the other."""
    examples.run(REPOSITORY / page)
    assert {(page, reason) for reason in examples.skipped} <= SKIPPED


@pytest.mark.nightly
@pytest.mark.parametrize("page", _loading())
def test_examples_run_as_they_are_written(page: str, examples: Examples) -> None:
    """Servers that a page starts without an engine come up with their own."""
    examples.engine = None
    examples.served.clear()
    examples.run(REPOSITORY / page)


def test_every_block_has_a_language() -> None:
    """A block is either of a language that is run, or says that it is a text or a picture."""
    run = {"python", "sh", "bash", "json", "yaml", "toml"}
    others = {(page, kind) for page, kind, _ in _blocks() if kind not in run | {"text", "mermaid"}}
    assert not others


def test_what_is_not_run_is_known() -> None:
    """No program is passed over that no example names, and no block without a reason."""
    shell = "\n".join(text for _, kind, text in _blocks() if kind in ("sh", "bash"))
    for name in NOT_RUN:
        assert re.search(rf"^\s*(?:\w+=\S* )*{name}\b", shell, re.MULTILINE), name
    found = set()
    for page in _pages():
        for example in Document.parse(str(REPOSITORY / page), SkipParser()):
            found.add((page, str(example.parsed[1]).strip('"')))
    assert found == SKIPPED


def test_example_that_fails_is_told(examples: Examples, tmp_path: Path) -> None:
    """Page and line are named where a command fails, a program raises, or a text isn't printed."""
    page = tmp_path / "page.md"
    for block in (
        "```sh\nleyline serve --upstream nowhere\n```\n",
        "```sh\nleyline policies show no_such_policy\n```\n",
        "```sh\nno-such-program\n```\n",
        "```sh\ncurl http://127.0.0.1:8790/v1/nothing\n```\n",
        "```python\nraise ValueError\n```\n",
        '```json\n{"model": "MODEL", "messages": []}\n```\n',
        "```yaml\nno_such_setting: 1\n```\n",
        "<!-- prints -->\n```text\nnot printed\n```\n",
    ):
        page.write_text(f"\n\n{block}")
        with pytest.raises(AssertionError, match=r"^page\.md:3: "):
            examples.run(page)


def test_what_is_printed_is_compared_without_its_numbers(
    examples: Examples, tmp_path: Path
) -> None:
    """A text marked as printed may differ from what is printed in numbers other than 0, and in
    nothing else."""
    page = tmp_path / "page.md"
    page.write_text(PRINTED.format("12 of 34, 0 left\nend", "1 of 2, 0 left\nend"))
    examples.run(page)
    assert examples.ran == 2
    for shown in ("end\n1 of 2, 0 left", "1 of 2, 5 left", "1 of 2", "1 of 2, 0 left\nend\nend"):
        page.write_text(PRINTED.format("12 of 34, 0 left\nend", shown))
        with pytest.raises(AssertionError, match="or not in its place"):
            examples.run(page)


def test_a_line_added_to_a_script_runs_it_again(examples: Examples, tmp_path: Path) -> None:
    """With a comment that says so, a block runs after all blocks of Python above it; else alone."""
    page, again = tmp_path / "page.md", "<!-- run with all above -->\n"
    page.write_text(
        "```python\nprint('first')\n```\n\n```python\nprint('second')\n```\n\n"
        f"{again}```python\nprint('third')\n```\n\n"
        "<!-- prints -->\n```text\nfirst\nsecond\nthird\n```\n"
    )
    examples.run(page)
    page.write_text(page.read_text().replace(again, ""))
    with pytest.raises(AssertionError, match="'first' isn't in"):
        examples.run(page)
