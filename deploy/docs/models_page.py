"""Writes docs/models.md: the models and recipes of SGLang's cookbook, and which of them splice.

The models' verdicts are measured (``bench/models.py``); a recipe's is that of the plugin's own rule
for a server's settings.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from leyline_engine.sglang.facts.allow_list import Setup, refusals

REPOSITORY = Path(__file__).resolve().parents[2]
PAGE = REPOSITORY / "docs" / "models.md"
INTRODUCTION = Path(__file__).resolve().parent / "models-introduction.md"
VERDICTS = REPOSITORY / "docs" / "results" / "models.json"
COOKBOOK = REPOSITORY / "tests" / "fixtures" / "cookbook.json"
_SITE = "https://docs.sglang.io/cookbook/autoregressive"
_BY_KIND = {
    "sliding window": "layers with a sliding window",
    "chunked": "chunked attention",
    "recurrent hybrid": "recurrent layers",
    "dsa": "sparse attention with an index key",
    "compressed": "compressed attention",
    "diffusion": "diffusion language model",
}
"""The reason for a page whose model was not measured, by the kind of its attention."""


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting of a server, and how it is tested with each kind of KV pool."""

    name: str
    setup: Setup
    tested: str
    """``server``: a real server on a CPU; ``parts``: SGLang's own tree, scheduler and pools,
    without a model; empty: not tested."""
    where: str
    """The test, below ``tests/sglang``."""


SETTINGS = (
    Setting("pages of 1 token", Setup(), "server", "test_splice_equality.py"),
    Setting("pages of 16 tokens", Setup(page_size=16), "server", "test_server_pages.py"),
    Setting("pages of 32 tokens", Setup(page_size=32), "parts", "test_scheduler_pages.py"),
    Setting("pages of 64 tokens", Setup(page_size=64), "server", "test_server_pages.py"),
    Setting("pages of 128 tokens", Setup(page_size=128), "server", "test_server_pages.py"),
    Setting("KV in bf16", Setup(), "parts", "test_pool_splice.py"),
    Setting("KV in fp8 (e4m3)", Setup(kv_dtype="float8_e4m3fn"), "server", "test_server_fp8.py"),
    Setting("KV in fp8 (e5m2)", Setup(kv_dtype="float8_e5m2"), "", ""),
    Setting("EAGLE, MTP (NEXTN)", Setup(speculative="EAGLE"), "server", "test_server_drafts.py"),
    Setting("EAGLE3", Setup(speculative="EAGLE3"), "", ""),
    Setting("NGRAM", Setup(speculative="NGRAM"), "server", "test_server_drafts.py"),
    Setting("DFLASH", Setup(speculative="DFLASH"), "", ""),
    Setting("tensor parallel", Setup(), "server", "test_server_tensor_parallel.py"),
    Setting("data parallel", Setup(), "server", "test_server_data_parallel.py"),
    Setting("data-parallel attention", Setup(), "server", "test_server_data_parallel.py"),
    Setting("expert parallel", Setup(), "", ""),
    Setting("mixed chunks", Setup(), "server", "test_server_mixed_chunk.py"),
    Setting("HiCache", Setup(host_layout="page_first"), "server", "test_server_hosted.py"),
    Setting("HiCache with a storage back end", Setup(host_storage=True), "", ""),
    Setting("LoRA", Setup(), "server", "test_server_adapters.py"),
    Setting("pipeline parallel", Setup(pipeline_parallel=2), "", ""),
    Setting("context parallel", Setup(context_parallel=2), "", ""),
    Setting("disaggregated prefill", Setup(disaggregation="prefill"), "", ""),
)
_TESTED = {
    "server": "spliced, tested on a real server on a CPU",
    "parts": "spliced, tested on SGLang's tree, scheduler and pools without a model",
    "": "spliced, not tested here",
}


@dataclass(frozen=True, slots=True)
class Entry:
    """A page of the cookbook, with its verdict."""

    page: str
    models: tuple[str, ...]
    architecture: str
    splices: bool
    measured: bool
    reason: str
    recipes: tuple[Mapping[str, Any], ...]

    @property
    def spliced_recipes(self) -> int:
        """The number of its recipes under which the model splices."""
        return sum(not recipe_refusal(recipe) for recipe in self.recipes) if self.splices else 0


def entries() -> list[Entry]:
    """Return all pages in order."""
    verdicts = json.loads(VERDICTS.read_text(encoding="utf-8"))
    pages = json.loads(COOKBOOK.read_text(encoding="utf-8"))
    return [_entry(page, verdicts.get(page["config"])) for page in pages]


def _entry(page: Mapping[str, Any], verdict: Mapping[str, Any] | None) -> Entry:
    splices = bool(verdict and verdict["splices"])
    reason = "" if splices else _BY_KIND.get(page["attention"], "not tested here")
    if verdict and verdict["measured"] and not splices:
        reason = verdict["reason"]
    return Entry(
        page["page"],
        tuple(page["models"]),
        page["architecture"],
        splices,
        bool(verdict and verdict["measured"]),
        reason,
        tuple(page["recipes"]),
    )


def recipe_refusal(recipe: Mapping[str, Any]) -> str:
    """Return why a server with a recipe's settings can't splice a supported model; empty if it can.

    A recipe that gets other pages on other hardware counts by its largest.
    """
    hosted = bool(recipe.get("hicache"))
    return _refused(
        Setup(
            kv_dtype=_kv_dtype(str(recipe.get("kv_cache_dtype", "bfloat16"))),
            page_size=max(recipe.get("pages", [1])),
            radix_cache=not recipe.get("radix_off", False),
            speculative=str(recipe.get("speculative", "")),
            host_layout="page_first" if hosted else "",
            host_drafts=hosted and "speculative" in recipe,
            host_attention_dp=hosted and "dp_attention" in recipe,
            disaggregation="prefill" if recipe.get("disaggregation") else "null",
            pipeline_parallel=2 if recipe.get("pp") else 1,
            context_parallel=2 if recipe.get("context_parallel") else 1,
        )
    )


def _refused(setup: Setup) -> str:
    return "; ".join(refused.what for refused in refusals(setup))


def _kv_dtype(name: str) -> str:
    return {"bf16": "bfloat16", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}.get(
        name, name
    )


def page() -> str:
    """Return the whole page."""
    return "\n".join(_lines(entries())) + "\n"


def _lines(found: list[Entry]) -> Iterator[str]:
    spliced = [entry for entry in found if entry.splices]
    recipes = sum(len(entry.recipes) for entry in spliced)
    served = sum(entry.spliced_recipes for entry in spliced)
    introduction = INTRODUCTION.read_text(encoding="utf-8").rstrip()
    yield (
        introduction.replace("$pages", str(len(found)))
        .replace("$spliced", str(len(spliced)))
        .replace("$recipes", str(recipes))
        .replace("$served", str(served))
        .replace("$share", f"{100 * served / recipes:.0f}")
    )
    yield from _settings()
    yield "\n## Models that splice\n"
    yield "| page of the cookbook | class | recipes that splice |"
    yield "|---|---|---|"
    for entry in spliced:
        yield (
            f"| [{entry.page}]({_SITE}/{entry.page}) | `{entry.architecture}` | "
            f"{entry.spliced_recipes} of {len(entry.recipes)}{_others(entry)} |"
        )
    yield "\n## Models that are served without splicing\n"
    yield "| page of the cookbook | class | reason | |"
    yield "|---|---|---|---|"
    for entry in found:
        if not entry.splices:
            how = "measured" if entry.measured else "by its configuration"
            how = "" if entry.reason == "not tested here" else how
            yield (
                f"| [{entry.page}]({_SITE}/{entry.page}) | `{entry.architecture}` | "
                f"{entry.reason} | {how} |"
            )
    yield from _configurations()


def _settings() -> Iterator[str]:
    yield "\n| setting | | test |"
    yield "|---|---|---|"
    for setting in SETTINGS:
        reason = _refused(setting.setup)
        result = f"served without: {reason}" if reason else _TESTED[setting.tested]
        test = f"`{setting.where}`" if setting.where and not reason else ""
        yield f"| {setting.name} | {result} | {test} |"


def _others(entry: Entry) -> str:
    reasons = sorted({reason for recipe in entry.recipes if (reason := recipe_refusal(recipe))})
    return f"; others: {', '.join(reasons)}" if reasons else ""


def _configurations() -> Iterable[str]:
    verdicts = json.loads(VERDICTS.read_text(encoding="utf-8"))
    yield "\n## Measured configurations\n"
    yield (
        "Error: root of the mean square over a layer's keys, spliced rows against rows that the "
        "model computes at the new place, as a share of the keys'. Control: the least error of "
        "four wrong splices (no turn, the other pairing, one position off, half the band).\n"
    )
    yield "| configuration | class | rotation | error | control |"
    yield "|---|---|---|---|---|"
    for name, verdict in sorted(verdicts.items()):
        if not verdict["splices"]:
            continue
        rotary, errors = verdict["rotary"], dict(verdict["errors"])
        error = errors.pop("spliced")
        yield (
            f"| {name} ({verdict['dtype']}) | `{verdict['architecture']}` | "
            f"{rotary['rotary_dim']} dimensions, {rotary['pairing'].replace('_', '-')}, "
            f"{rotary['rope_type']} | {error:.0e} | {min(errors.values()):.0e} |"
        )


def main() -> None:
    """Write the page."""
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
