"""Writes docs/api/{settings,http,cli}.md from the code; ``--check`` lists outdated pages."""

from __future__ import annotations

import argparse
import html
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from inspect import cleandoc
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "api"

Schema = Mapping[str, Any]

_ORIGIN = "<!-- Written from the code by `make docs`. Don't edit. -->"
_MIB = 1024 * 1024


# ── settings ─────────────────────────────────────────────────────────────────


def _listed_plainly() -> str:
    """Return the variables of lists and maps that aren't read as JSON."""
    from pydantic_settings import NoDecode

    from leyline_proxy.settings import Settings

    fields = Settings.model_fields
    names = [name for name, field in fields.items() if NoDecode in field.metadata]
    *some, last = [f"`LEYLINE_{name.upper()}`" for name in sorted(names)]
    return f"{', '.join(some)} and {last}"


def settings_page() -> str:
    """Return every setting of the proxy with its default, its bounds and its purpose."""
    from pydantic import BaseModel

    from leyline_proxy.settings import Settings, TenantSettings, UpstreamSettings

    parts = [
        "# Settings",
        _ORIGIN,
        "Flags of [`leyline serve`](cli.md#leyline-serve) override the environment, the "
        "environment overrides the YAML file of `--config`, and the file overrides the defaults. "
        "The variable of a setting is `LEYLINE_` and its name in capitals: `max_sessions` is "
        "`LEYLINE_MAX_SESSIONS`. In variables, maps and lists are JSON, except that the items of "
        f"{_listed_plainly()} are separated by commas. An empty variable counts as unset. "
        "An unknown setting in the file is an error, and so is a wrong value "
        "anywhere; `leyline serve` names it and exits with 2.",
    ]
    own = [one for one in Settings.__mro__ if one is not BaseModel and _defines_fields(one)]
    for model in own:
        parts += [f"## {_SECTIONS.get(model.__name__, model.__name__)}", _settings_table(model)]
    for title, model in (("upstreams.NAME", UpstreamSettings), ("tenants.NAME", TenantSettings)):
        parts += [f"## `{title}`", cleandoc(model.__doc__ or "")]
        defining = (one for one in model.__mro__ if _defines_fields(one))
        parts += [_settings_table(*defining, untold="As the proxy's.")]
    return "\n\n".join(parts) + "\n"


_SECTIONS = {
    "Settings": "The proxy",
    "AuditSettings": "The audit log",
    "BudgetSettings": "Budgets",
    "IdentitySettings": "Identity provider",
    "LimitSettings": "Limits, shutdown and the admin port",
    "PriceSettings": "Prices",
    "ProcessSettings": "Processes",
    "RecallSettings": "Recall",
    "RouterSettings": "Routers",
    "SessionSettings": "Where sessions are kept",
    "SocketSettings": "WebSockets",
    "TlsSettings": "TLS",
    "TraceSettings": "Tracing",
    "WarmStartSettings": "Warm start",
}


def _defines_fields(model: type) -> bool:
    return model.__module__.startswith("leyline_proxy.") and bool(
        vars(model).get("__annotations__")
    )


def _settings_table(*models: Any, untold: str = "") -> str:
    rows = ["| setting | default | values | |", "|---|---|---|---|"]
    for model in models:
        schema = model.model_json_schema()
        defined = vars(model)["__annotations__"]
        texts = _attribute_docs(model)
        for name, member in schema["properties"].items():
            if name in defined:
                default = (
                    "**required**" if name in schema.get("required", ()) else _default(name, member)
                )
                values = _values(name, _resolve(member, schema))
                rows.append(f"| `{name}` | {default} | {values} | {texts.get(name, untold)} |")
    return "\n".join(rows)


def _attribute_docs(model: type) -> dict[str, str]:
    import griffe

    path = Path(str(sys.modules[model.__module__].__file__))
    module = griffe.visit(model.__module__, path, path.read_text(encoding="utf-8"))
    found = module[model.__name__]
    return {
        name: " ".join(member.docstring.value.replace("``", "`").split()).replace("|", "\\|")
        for name, member in found.members.items()
        if member.docstring is not None
    }


def _default(name: str, member: Schema) -> str:
    value = member.get("default")
    if member.get("format") == "password":
        return "`memory`" if value else "none"  # a default secret would be none
    if value is None or value in ({}, []):
        return "none"
    if value == "":
        return "empty"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"`{value}`" + (f" ({_size(name, value)})" if name.endswith("_bytes") else "")


def _size(name: str, value: float) -> str:
    """Return bytes as people write them, other numbers as they are."""
    if name.endswith("_bytes"):
        return f"{value // _MIB} MiB" if value >= _MIB else f"{value // 1024} KiB"
    return f"{int(value) if value == int(value) else value}"


def _resolve(member: Schema, root: Schema) -> Schema:
    """Return the schema itself if a definition is meant, without the part for 'unset'."""
    if "$ref" in member:
        return _resolve(root["$defs"][member["$ref"].rpartition("/")[2]], root)
    ways = [way for way in member.get("anyOf", ()) if way.get("type") != "null"]
    return _resolve(ways[0], root) if len(ways) == 1 else member


def _values(name: str, member: Schema) -> str:
    if "enum" in member:
        return ", ".join(f"`{one}`" for one in member["enum"])
    if member.get("format") == "password":
        return "a secret"
    if member.get("format") == "path":
        return "a path"
    kinds = {
        "string": "text",
        "integer": "a whole number",
        "number": "a number",
        "boolean": "`true`, `false`",
        "array": "a list",
        "object": "a map",
    }
    kind = kinds.get(str(member.get("type")), "")
    bounds = [
        f"{sign} {_size(name, member[key])}"
        for key, sign in (("minimum", "≥"), ("exclusiveMinimum", ">"), ("maximum", "≤"))
        if key in member
    ]
    return ", ".join(part for part in (kind, *bounds) if part)


# ── HTTP ─────────────────────────────────────────────────────────────────────


def http_page() -> str:
    """Return every route of the OpenAPI document with its parameters."""
    from leyline_proxy.http.app import create_app
    from leyline_proxy.settings import Settings

    document = create_app(Settings(upstream="http://127.0.0.1:9")).openapi()
    parts = [
        "# HTTP routes",
        _ORIGIN,
        "These are the routes of the proxy's OpenAPI document, which has their schemas; a running "
        "proxy serves it at `/openapi.json`. [HTTP API](../http-api.md) explains the fields. With "
        "API keys, each route below `/v1` needs one, such as `Authorization: Bearer KEY`.",
    ]
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            parts += list(_operation(method.upper(), path, operation))
    return "\n\n".join(parts) + "\n"


def _operation(method: str, path: str, operation: Schema) -> Iterator[str]:
    yield f"## `{method} {path}`"
    yield cleandoc(operation.get("description") or operation.get("summary", "")).replace("``", "`")
    query = [
        f"`{one['name']}` ({_kind(one['schema'])})"
        for one in operation.get("parameters", ())
        if one["in"] == "query"
    ]
    if query:
        yield f"Query: {', '.join(query)}."


def _kind(schema: Schema) -> str:
    """Return the type of a parameter."""
    return " or ".join(map(_kind, schema["anyOf"])) if "anyOf" in schema else str(schema["type"])


# ── command line ─────────────────────────────────────────────────────────────


_BENCHES = ("bench", "claims")
"""Groups of commands that measure the engine, for those who work on it."""


def cli_page() -> str:
    """Return every command with its options as ``--help`` prints them; of benches, the names."""
    import typer
    from typer.cli import get_docs_for_click

    from leyline_proxy.cli import build_app

    command = typer.main.get_command(build_app())
    context = typer.Context(command, info_name="leyline")
    text = get_docs_for_click(obj=command, ctx=context, name="leyline", title="Command line")
    text = text.replace("# Command line\n", f"# Command line\n\n{_ORIGIN}\n", 1)
    # The help's own markup, of which Typer makes HTML in some places and nothing in others.
    text = re.sub(r'<span style="[^"]*">(.*?)</span>', r"**\1**", text)
    text = re.sub(r"\[(bold|dim|green|red|cyan)\](.*?)\[/\1\]", r"**\2**", text)
    text = html.unescape(text).replace("\\[", "[")
    text = re.sub(r"\*\*Usage\*\*:\n\n```console\n.*?```\n", "", text, flags=re.DOTALL)
    text = re.sub(r"\* `--(install-comp|show-comp|help\b).*\n", "", text)
    text = re.sub(r"\*\*Options\*\*:\n\n(?!\*)", "", text)
    for name in _BENCHES:
        inside = rf"(\n## `leyline {name}`\n.*?)\n### .*?(?=\n## |\Z)"
        named = rf"\1\n`leyline {name} COMMAND --help` prints the options.\n"
        text = re.sub(inside, named, text, flags=re.DOTALL)
    lines = _without_repetition(text.splitlines())
    return re.sub(r"\n{3,}", "\n\n", "\n".join(_escaped(line) for line in lines)).strip() + "\n"


def _without_repetition(lines: list[str]) -> Iterator[str]:
    """Yield lines; of options that `leyline doctor` shares with `leyline serve`, one line."""
    section, served, told = "", set[str](), False
    for line in lines:
        section = line if line.startswith("## ") else section
        if section == "## `leyline serve`":
            served.add(line)
        elif section == "## `leyline doctor`" and line.startswith("* `--") and line in served:
            if not told:
                yield "* The options of `leyline serve`."
            told = True
            continue
        yield line


def _escaped(line: str) -> str:
    """Escape a line: words in brackets aren't links, names in angles aren't HTML; code stays."""
    parts = re.split(r"(`[^`]*`)", line)
    return (
        "".join(
            part if n % 2 else part.replace("[", "\\[").replace("]", "\\]").replace("<", "&lt;")
            for n, part in enumerate(parts)
        )
        if not line.startswith(("<!--", "$"))
        else line
    )


PAGES: Mapping[str, Callable[[], str]] = {
    "settings.md": settings_page,
    "http.md": http_page,
    "cli.md": cli_page,
}


def stale() -> dict[str, str]:
    """Return pages that differ from the code's, with their new text."""
    return {
        name: text
        for name, text in ((name, page()) for name, page in PAGES.items())
        if not (FOLDER / name).is_file() or (FOLDER / name).read_text(encoding="utf-8") != text
    }


def main() -> int:
    """Write the pages, or with ``--check`` report those that are out of date."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    for name in [name for name in os.environ if name.startswith("LEYLINE_")]:
        del os.environ[name]  # else they would be defaults
    wrong = stale()
    for name, text in wrong.items():
        print(f"docs/api/{name}: {'out of date, run make docs' if check else 'written'}")
        if not check:
            (FOLDER / name).write_text(text, encoding="utf-8")
    return 1 if check and wrong else 0


if __name__ == "__main__":
    sys.exit(main())
