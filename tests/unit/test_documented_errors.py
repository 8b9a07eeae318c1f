"""docs/errors.md has every error code of the proxy, with its status."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import leyline_proxy
from leyline_proxy.errors import ProxyError

SOURCE = Path(leyline_proxy.__file__).parent
PAGE = Path(__file__).parents[2] / "docs" / "errors.md"
ROW = re.compile(r"^\| (\d{3}) \| (.+?) \| (.+) \|$")


def documented() -> set[tuple[int, str]]:
    """The status and code of each error on the page."""
    rows = filter(None, map(ROW.match, PAGE.read_text().splitlines()))
    return {(int(row[1]), code) for row in rows for code in re.findall(r"`(\w+)`", row[2])}


def raised() -> Iterator[tuple[str, str]]:
    """The class and code of each error of the source; ``ClassName`` alone for its own code."""
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            for keyword in node.keywords:
                if keyword.arg == "code" and isinstance(keyword.value, ast.Constant):
                    assert isinstance(node.func, ast.Name)
                    if isinstance(keyword.value.value, str):
                        yield node.func.id, keyword.value.value


def errors() -> dict[str, type[ProxyError]]:
    """All errors by the name of their class."""
    for path in SOURCE.rglob("*.py"):
        if "class " in (text := path.read_text()) and "Error(" in text:
            relative = path.relative_to(SOURCE.parent).with_suffix("")
            import_module(".".join(relative.parts).removesuffix(".__init__"))
    found: dict[str, type[ProxyError]] = {}
    kinds = [ProxyError]
    while kinds:
        kind = kinds.pop()
        found[kind.__name__] = kind
        kinds += kind.__subclasses__()
    return found


def test_every_code_is_documented_with_its_status() -> None:
    """A code that is raised, or that a class has, has a row; one that nothing raises has none."""
    page, kinds = documented(), errors()
    expected = {(kind.status, kind.code) for kind in kinds.values()}
    mapped = set()
    for name, code in raised():
        if name in kinds and name not in NO_STATUS:
            expected.add((kinds[name].status, code))
        else:
            mapped.add(code)
    assert not expected - page - GENERAL
    assert mapped <= {code for _, code in page}
    known = mapped | {code for _, code in expected} | ENGINES | OTHER
    assert {code for _, code in page} <= known


NO_STATUS = {"UpstreamRefusalError"}
"""Errors that get their status from an answer; errors of an API get it from their module."""
GENERAL = {(500, "upstream_error"), (503, "internal_error")}
"""Own codes of classes that always get another code, or another status."""
ENGINES = {"claim_limit", "stale_revision"}
"""Codes of the engine's contract that reach callers."""
OTHER = {"tls_required"}
"""Written below HTTP, before there is a request."""
