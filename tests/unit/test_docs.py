"""The documentation holds together: links, anchors, navigation, references made from code."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest
import yaml
from markdown_it import MarkdownIt
from markdown_it.token import Token

REPOSITORY = Path(__file__).parents[2]
DOCS = REPOSITORY / "docs"
ALERTS = REPOSITORY / "deploy" / "alerts"
CARDS = "engine_patch/leyline_replay/models/trained"

_PARSER = MarkdownIt("commonmark").enable("table")


def _pages() -> list[Path]:
    """Every Markdown file that people read."""
    found = {*REPOSITORY.glob("*.md"), *DOCS.rglob("*.md"), *(REPOSITORY / CARDS).rglob("*.md")}
    for folder in ("bench", "deploy", "grafana"):
        found |= {*(REPOSITORY / folder).rglob("*.md")}
    return sorted(found)


def _tool(name: str) -> ModuleType:
    """A script of deploy/docs, which is no package."""
    path = REPOSITORY / "deploy" / "docs" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"docs_{name}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _tokens(text: str) -> Iterator[Token]:
    for token in _PARSER.parse(text):
        yield token
        yield from token.children or ()


@cache
def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    tokens = _PARSER.parse(text)
    seen: Counter[str] = Counter()
    found = set()
    for at, token in enumerate(tokens):
        if token.type == "heading_open":
            inner = tokens[at + 1].children or ()
            title = "".join(one.content for one in inner if one.type in ("text", "code_inline"))
            slug = re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
            found.add(f"{slug}-{seen[slug]}" if seen[slug] else slug)
            seen[slug] += 1
    return found


def broken_links(page: Path, text: str) -> list[str]:
    """Links of a page that lead to no file, or to no heading of it."""
    broken = []
    for token in _tokens(text):
        target = str(token.attrs.get("href") or token.attrs.get("src") or "")
        path, _, anchor = target.partition("#")
        if not target or "://" in target or target.startswith("mailto:"):
            continue
        goal = page if not path else page.parent / path
        if not (goal == page or goal.exists()):
            broken.append(target)
        elif anchor and goal.suffix == ".md":
            other = text if goal == page else goal.read_text(encoding="utf-8")
            broken += [] if anchor in anchors(other) else [target]
    return broken


@pytest.mark.parametrize("page", _pages(), ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_links_lead_somewhere(page: Path) -> None:
    """Each link inside the repository leads to a file that exists, and to a heading of it."""
    assert broken_links(page, page.read_text(encoding="utf-8")) == []


def test_broken_links_are_noticed() -> None:
    """A link to no file, to no heading, or out of a table cell is reported; links in code
    aren't."""
    text = (
        "# A title, `code` & more\n\n[a](nope.md) [b](#no) [c](index.md#promises)\n"
        "[d](#a-title-code--more) `[e](x.md)`\n\n| t |\n|---|\n| [f](y.md) |\n\n"
        "```\n[g](z.md)\n```\n"
    )
    assert broken_links(DOCS / "here.md", text) == ["nope.md", "#no", "y.md"]


def test_nav_lists_every_page() -> None:
    """Each page of docs/ is in the navigation once, and each entry of it is a page."""
    build = _tool("build")
    text = (REPOSITORY / "deploy" / "docs" / "mkdocs.yml").read_text(encoding="utf-8")
    listed = re.findall(r"[\w/.-]+\.md", text.split("\nnav:\n")[1])
    pages = [str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")]
    elsewhere = {place for place in build.ELSEWHERE.values() if place.endswith(".md")}
    assert sorted(listed) == sorted({*pages, *elsewhere})


def test_site_builds_without_a_warning(tmp_path: Path) -> None:
    """The strict build makes every page, and none of them loads anything from elsewhere."""
    build = _tool("build")
    build.stage(tmp_path / "staged")
    said = build.build(tmp_path / "staged", tmp_path / "site")
    assert "Warning" not in said, said
    made = sorted((tmp_path / "site").rglob("*.html"))
    assert len(made) >= len([*DOCS.rglob("*.md")])
    policies = (tmp_path / "site" / "api" / "python.html").read_text(encoding="utf-8")
    assert 'id="leyline_policies.Policy.transform"' in policies
    for name in ("search.js", "assets/iframe-worker.js"):  # without them, no search from a folder
        assert (tmp_path / "site" / name).stat().st_size > 0
    assert "../assets/iframe-worker.js" in policies
    for page in made:
        text = page.read_text(encoding="utf-8")
        loaded = re.findall(r'<(?:script|img|iframe)[^>]* src="(?:https?:)?//[^"]*"', text)
        loaded += re.findall(r'<link[^>]* href="(?:https?:)?//[^"]*"', text)
        assert not loaded, (page, loaded)


def test_broken_link_fails_the_build(tmp_path: Path) -> None:
    """A page that links to an anchor that isn't there makes the strict build fail."""
    build = _tool("build")
    build.stage(tmp_path)
    page = tmp_path / "docs" / "concepts" / "modes.md"
    page.write_text(page.read_text(encoding="utf-8") + "\n[x](lineage.md#no-such-heading)\n")
    with pytest.raises(RuntimeError, match="anchor does not exist"):
        build.build(tmp_path, tmp_path / "out")


def test_link_out_of_the_site_is_refused() -> None:
    """A page that links to a file which the site doesn't have can't be staged."""
    build = _tool("build")
    with pytest.raises(build.BrokenLinkError, match="isn't on the site"):
        build._relinked("[x](../pyproject.toml)", "docs/a.md", "a.md")
    with pytest.raises(build.BrokenLinkError, match="doesn't exist"):
        build._relinked("[x](nowhere.md)", "docs/a.md", "a.md")


def test_links_between_moved_pages_are_set_right() -> None:
    """A link to a page that lies elsewhere in the repository leads to where the site has it."""
    relinked = _tool("build")._relinked
    text = "[x](../../bench/README.md#reading-the-results)\n```\n[x](../../bench/README.md)\n```\n"
    there = text.replace("../../bench/README.md#", "../project/benchmarks.md#")
    assert relinked(text, "docs/concepts/modes.md", "concepts/modes.md") == there
    back = relinked("![x](../docs/overhead.png)", "bench/README.md", "project/benchmarks.md")
    assert back == "![x](../overhead.png)"


def test_references_are_what_the_code_says() -> None:
    """Settings, routes and commands are listed as they are now; `make docs` rewrites them."""
    # In a process of its own: typing gives equal unions in the order of whoever named them first.
    command = [sys.executable, str(REPOSITORY / "deploy" / "docs" / "reference.py"), "--check"]
    told = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert (told.stdout, told.returncode) == ("", 0), told.stderr


def test_every_setting_says_what_it_is_for() -> None:
    """No row of the settings' tables lacks its text."""
    rows = (DOCS / "api" / "settings.md").read_text(encoding="utf-8").splitlines()
    assert [row for row in rows if row.startswith("| `") and row.endswith("|  |")] == []


def test_every_route_is_in_the_guide() -> None:
    """The page on the HTTP API, which says what the routes mean, has each of the generated ones."""
    listed = (DOCS / "api" / "http.md").read_text(encoding="utf-8")
    routes = re.findall(r"^## `[A-Z]+ (\S+)`$", listed, re.MULTILINE)
    guide = (DOCS / "http-api.md").read_text(encoding="utf-8")
    assert len(routes) > 20
    assert [one for one in routes if re.sub(r"\{\w+\}", "{id}", one) not in guide] == []


def test_every_alert_has_its_section() -> None:
    """Each alert's heading says what to do about it, where its runbook link leads."""
    text = (DOCS / "operations.md").read_text(encoding="utf-8")
    described = re.findall(r"^### (Leyline .*)$", text.split("\n## Alerts\n")[1], re.MULTILINE)
    names = []
    for file in ALERTS.glob("*.yml"):
        for group in yaml.safe_load(file.read_text(encoding="utf-8"))["groups"]:
            for rule in group["rules"]:
                words = re.findall(r"[A-Z][a-z]*", rule["alert"])
                names.append(" ".join([words[0], *map(str.lower, words[1:])]))
                link = rule["annotations"]["runbook_url"]
                assert link.endswith(f"/operations.html#{'-'.join(words).lower()}"), link
    assert sorted(described) == sorted(names)


def test_every_reason_is_explained() -> None:
    """The page on receipts has each reason that an engine may give, and no other."""
    from leyline_engine.contract import Reason

    text = (DOCS / "concepts" / "receipt.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`.*?) \|", text.split("| reason | meaning |")[1], re.MULTILINE)
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row)} == {*Reason}


def test_a_promise_names_a_test_that_is_there() -> None:
    """Tables of promises name the test that breaks with each, by the name that it has."""
    defined = {
        name
        for path in (REPOSITORY / "tests").rglob("test_*.py")
        for name in re.findall(r"def (test_\w+)", path.read_text(encoding="utf-8"))
    }
    named = {
        name
        for page in _pages()
        for name in re.findall(r"`(test_\w+)`", page.read_text(encoding="utf-8"))
    }
    assert len(named) > 20
    assert not named - defined
