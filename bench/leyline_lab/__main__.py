"""``python -m leyline_lab NAME``: the measurements beside those of ``leyline``, by name."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Final

import typer

COMMANDS: Final[Mapping[str, tuple[str, str]]] = {
    "anchors": ("anchors.command", "The cost of anchors in recorded sessions, by what is kept."),
    "backend-cost": ("engine_cost.backend", "The cost of Leyline in SGLang to plain requests."),
    "cells": ("engine_cost.cells", "Run `leyline bench three-arm` by page size and KV dtype."),
    "claims-check": ("engine_cost.claims_check", "The cost of admission while claims are live."),
    "claims-load": ("soaks.claims", "Claims that come and go near the pool's limit."),
    "clients": ("clients.table", "Sessions of real clients against the proxy."),
    "compaction": ("compaction", "The first turn after a compaction, against a cached prompt."),
    "detectors": ("policy_tables.detectors", "Recall and precision of the detectors of keys."),
    "edit-timing": ("policy_tables.edit_timing", "The scheduler of edits against fixed rules."),
    "gpu-splices": ("engine_cost.gpu_splices", "Splices on a GPU, against copy bandwidth."),
    "hostile-bodies": ("proxy_cost.hostile_bodies", "Stall and memory under hostile requests."),
    "levels": ("engine_cost.levels", "The cost to an engine of the levels that it reports."),
    "live-page": ("live_page", "Draw the pictures of the live page."),
    "models": ("sglang_models.verdicts", "Verdicts on models for SGLang, from small ones."),
    "newcomers": ("proxy_cost.newcomers", "The wait of a new connection at a busy proxy."),
    "policies": ("proxy_cost.policies", "The cost of policies per turn."),
    "policy-quotes": ("policy_tables.quotes", "The share of evicted text that agents quote later."),
    "policy-table": ("policy_tables.reclaimed", "The tokens that each built-in policy reclaims."),
    "proxy-overhead": ("proxy_cost.overhead", "The cost of a proxy to a request, by system."),
    "proxy-soak": ("soaks.proxy", "Half an hour of agents, as a test for flat memory."),
    "proxy-turn": ("proxy_cost.turn", "The CPU time of a chat turn, by stage and prompt size."),
    "reuse-index": ("reuse.index", "The cost of an index that only recalls use."),
    "reuse-margin": ("reuse.margin", "The turns that a small margin marks, and the wrong ones."),
    "reuse-matching": ("reuse.matching", "The CPU time of content reuse per turn."),
    "reuse-named": ("reuse.named", "The reuse by the search, by names, and by both."),
    "reuse-offline": ("reuse.offline", "The share of prompts that reuse could find, by method."),
    "reuse-tenants": ("reuse.tenants", "The content that tenants of a group share."),
    "routers": ("routers", "The reuse of sessions behind SGLang's router, by routing policy."),
    "scheduler-time": ("engine_cost.scheduler_time", "The time of planning on SGLang's scheduler."),
    "session-memory": ("proxy_cost.session_memory", "The memory of an idle session."),
    "soak": ("soaks.sglang", "Random sessions against SGLang, as a test for leaks and hangs."),
    "stage-cost": ("engine_cost.stage_cost", "The price of one more forward, in tokens."),
    "stages": ("engine_cost.stages", "Stages of edited turns in recorded sessions, by price."),
    "tracing-cost": ("proxy_cost.tracing", "The cost of tracing to a turn."),
    "workers": ("proxy_cost.workers", "The throughput of a proxy by its number of workers."),
}
"""Module and sentence by name. A module is imported only when it runs: some need an engine."""


def _runner(name: str, module: str) -> Callable[[typer.Context], None]:
    def run(context: typer.Context) -> None:
        sys.argv = [f"python -m leyline_lab {name}", *context.args]
        raise typer.Exit(import_module(f"leyline_lab.{module}").main() or 0)

    return run


def group() -> typer.Typer:
    """Return the command with all measurements; each parses its own flags."""
    app = typer.Typer(no_args_is_help=True, add_completion=False, help="Measure a part of Leyline.")
    own = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
    for name, (module, sentence) in COMMANDS.items():
        app.command(name, help=sentence, context_settings=own)(_runner(name, module))
    return app


if __name__ == "__main__":
    group()(prog_name="python -m leyline_lab")
