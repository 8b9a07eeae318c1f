"""The flags of ``leyline serve``, and the settings that they are."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from .output import usage_error

if TYPE_CHECKING:
    from ..settings import Settings
    from ..settings.faults import Sources


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag. Without a setting of its name, :data:`SETTINGS` has it."""

    name: str
    help: str
    kind: Any = str
    """Type of its value; ``list[str]`` if it is repeatable."""


FLAGS: Mapping[str, tuple[Flag, ...]] = MappingProxyType(
    {
        "Address": (
            Flag("host", "Address to listen on [127.0.0.1]."),
            Flag("port", "Port to listen on; 0 takes a free port [8790].", int),
            Flag(
                "allowed_host",
                "NAME or NAME:PORT that clients may use for a proxy without keys; repeatable.",
                list[str],
            ),
            Flag("admin_port", "Port of the admin API; needs LEYLINE_ADMIN_KEY \\[off].", int),
            Flag("tls_cert", "Certificate chain, for HTTPS.", Path),
            Flag("tls_key", "Key of --tls-cert.", Path),
        ),
        "Engines": (
            Flag(
                "upstream",
                "URL or NAME=URL of an engine; repeatable. Without it, an engine runs here.",
                list[str],
            ),
            Flag("router", "URL of a router in front of the engines of --upstream."),
            Flag("affinity_header", "A further header with the session's id, for a router."),
            Flag("engine", "Embedded engine to run \\[replay]."),
            Flag("engine_option", "NAME=VALUE for the embedded engine; repeatable.", list[str]),
            Flag("model", "A bundled model, a folder or a hub id \\[leyline-recall]."),
        ),
        "Policies": (
            Flag("policy", "Policies, such as truncate_older_than:n=2,max_chars=200."),
            Flag(
                "policies_file",
                "YAML file of policies by tenant and model; reloaded when it changes.",
                Path,
            ),
            Flag(
                "fidelity_profile",
                "JSON file of settings by model, such as a report of `leyline eval`.",
                Path,
            ),
            Flag("on_fault", "If a policy that forgets fails: refuse or skip \\[refuse]."),
            Flag("edit_timing", "When edits are sent: now, auto or wait \\[auto]."),
            Flag("request_policy", "Let requests choose their policy \\[yes].", bool),
        ),
        "Cache": (
            Flag("splice", "Splice edited turns \\[yes].", bool),
            Flag("undeclared", "ROLE=MODE for undeclared edits; repeatable \\[exact].", list[str]),
            Flag(
                "reasoning_edits",
                "Thinking that the chat template strips: amortize or exact \\[amortize].",
            ),
            Flag(
                "compaction_edits",
                "A history that gives way to a summary: amortize or exact \\[amortize].",
            ),
            Flag(
                "recurrent_edits",
                "Edits on models with recurrent layers: kept or exact \\[kept].",
            ),
            Flag("reuse", "Content cached elsewhere: off, observe (count) or live (copy) \\[off]."),
            Flag(
                "reuse_margin",
                "Lead of a first token, in logits, at which reuse is trusted \\[0].",
                float,
            ),
            Flag("retained_turns", "Turns of a session that later turns can splice from [4].", int),
            Flag(
                "warm_start_path",
                "Folder of prompts for a new engine; needs LEYLINE_WARM_START_KEY.",
                Path,
            ),
        ),
        "Tenants": (
            Flag("api_key", "TENANT:KEY; repeatable \\[no keys, one tenant].", list[str]),
            Flag("api_keys_file", "File of TENANT:KEY lines.", Path),
        ),
        "Audit log": (
            Flag("audit_file", "Log edits, forgets and claims in this file.", Path),
            Flag("audit_key_file", "File with the key that seals the audit log.", Path),
            Flag("audit_turns", "Turns in the audit log: edited or all \\[edited]."),
            Flag("audit_redis", "URL of a Redis whose stream also gets the audit log."),
        ),
        "Operation": (
            Flag("config", "YAML file of settings.", Path),
            Flag("workers", "Processes that serve the port; share everything [1].", int),
            Flag("session_store", "memory, or the URL of a Redis that proxies share \\[memory]."),
            Flag("trace", "Traces: otlp (to a collector), console or off \\[off]."),
            Flag("log_level", "debug, info, warning, error."),
            Flag("log_format", "auto, json or console."),
        ),
    }
)
"""Flags by the title of their panel in the help."""

SETTINGS = {
    "allowed_host": "allowed_hosts",
    "api_key": "api_keys",
    "engine_option": "engine_options",
    "request_policy": "allow_request_policy",
}
"""Settings of flags with another name."""


def with_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command that takes each flag as an option of its own, in place of ``flags``: all of
    them by name, with None for those that aren't given."""
    names = [flag.name for flags in FLAGS.values() for flag in flags]

    @wraps(command)
    def separate(**values: Any) -> None:
        flags = {name: values.pop(name) for name in names}
        command(**values, flags=flags)

    hints = get_type_hints(command, include_extras=True)
    own = (
        each.replace(annotation=hints[name])
        for name, each in inspect.signature(command).parameters.items()
        if name != "flags"
    )
    options = (
        inspect.Parameter(
            flag.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[
                flag.kind | None, typer.Option(help=flag.help, rich_help_panel=panel)
            ],
        )
        for panel, flags in FLAGS.items()
        for flag in flags
    )
    parameters = [*own, *options]
    separate.__annotations__ = {each.name: each.annotation for each in parameters}
    separate.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return separate


def read_settings(
    flags: Mapping[str, Any],
    without: Collection[str] = (),
    stand_ins: Mapping[str, Any] | None = None,
) -> Settings:
    """Return the settings from flags, environment and file.

    Args:
        flags: all flags; None means not given.
        without: settings that no source may set.
        stand_ins: values in their places.

    Raises:
        OSError, ValueError: see :func:`~leyline_proxy.settings.load_settings`.
    """
    from ..settings import load_settings

    own = {
        "upstream": None,
        **_engines(flags["upstream"]),
        "engine_options": _engine_options(flags["engine_option"]),
    }
    given = {SETTINGS.get(name, name): value for name, value in flags.items()}
    named = {name: value for name, value in {**given, **own}.items() if name not in without}
    return load_settings(**named, **(stand_ins or {}), without=without)


def sources_of(flags: Mapping[str, Any]) -> Sources:
    """Return the sources of the settings, for reports of errors."""
    from ..settings.faults import Sources

    given = [name for name, value in flags.items() if value is not None and name != "config"]
    named = {SETTINGS.get(name, name): f"--{name.replace('_', '-')}" for name in given}
    if "upstream" in named:  # one of two settings
        flag = named.pop("upstream")
        named |= dict.fromkeys(_engines(flags["upstream"]), flag)
    return Sources(flags["config"], named, os.environ)


def _engines(items: list[str] | None) -> dict[str, Any]:
    """Return the settings of ``--upstream``: one URL, or several by name."""
    named: dict[str, str] = {}
    for item in items or ():
        name, sign, url = item.partition("=")
        if not sign or "/" in name:
            place = item.partition("://")[2].partition("/")[0]
            name, url = place.rpartition("@")[2], item  # without credentials
        if name in named:
            raise usage_error(
                "serve",
                f"--upstream {name} is given twice; give each engine its own name with NAME=URL",
            )
        named[name] = url
    if len(named) == 1 and items == list(named.values()):
        return {"upstream": items[0]}
    return {"upstreams": named or None}


def _engine_options(items: list[str] | None) -> dict[str, Any] | None:
    import yaml

    if not items:
        return None
    options: dict[str, Any] = {}
    for item in items:
        name, sign, value = item.partition("=")
        if not sign:
            # Not quoted: it may be a secret whose name was forgotten.
            raise usage_error("serve", "--engine-option must be NAME=VALUE")
        try:
            options[name.replace("-", "_")] = yaml.safe_load(value)
        except (yaml.YAMLError, ValueError) as error:
            raise usage_error(
                "serve", f"the value of --engine-option {name} isn't YAML; quote it"
            ) from error
    return options
