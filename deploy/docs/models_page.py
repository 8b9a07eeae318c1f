"""Writes docs/models.md: the models and recipes of SGLang's cookbook, and which of them splice.

The models' verdicts are measured (``python -m leyline_lab models``); a recipe's is that of the
plugin's own rule for a server's settings.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Any

from leyline_engine.sglang.facts.allow_list import Setup, refusals

REPOSITORY = Path(__file__).resolve().parents[2]
PAGE = REPOSITORY / "docs" / "models.md"
INTRODUCTION = Path(__file__).resolve().parent / "models_introduction.txt"
VERDICTS = REPOSITORY / "docs" / "results" / "models.json"
COOKBOOK = REPOSITORY / "tests" / "fixtures" / "cookbook.json"
_SITE = "https://docs.sglang.io/cookbook/autoregressive"
_BY_KIND = {
    "chunked": "chunked attention",
    "dsa": "sparse attention with an index key",
    "compressed": "compressed attention",
    "diffusion": "diffusion language model",
}
"""The reason for a page whose model was not measured, by the kind of its attention."""
_FAMILIES = "server/test_server_families.py"
_STATES = "splices/test_state_splices.py"
SERVERS = {
    "Cohere2ForCausalLM": _FAMILIES,
    "CohereForCausalLM": _FAMILIES,
    "Ernie4_5_ForCausalLM": _FAMILIES,
    "Glm4MoeForCausalLM": _FAMILIES,
    "Glm4MoeLiteForCausalLM": _FAMILIES,
    "GraniteForCausalLM": _FAMILIES,
    "HYV3ForCausalLM": _FAMILIES,
    "MiniMaxM2ForCausalLM": _FAMILIES,
    "Olmo2ForCausalLM": _FAMILIES,
    "Phi3ForCausalLM": _FAMILIES,
    "Qwen3MoeForCausalLM": _FAMILIES,
    "LlamaForCausalLM": "splices/test_splice_equality.py",
    "Qwen3ForCausalLM": "splices/test_splice_equality.py",
    "GptOssForCausalLM": _STATES,
    "GraniteMoeHybridForCausalLM": _STATES,
    "KimiLinearForCausalLM": _STATES,
    "Lfm2ForCausalLM": _STATES,
    "MellumForCausalLM": _STATES,
    "MiMoV2FlashForCausalLM": _STATES,
    "NemotronHForCausalLM": _STATES,
    "Qwen3NextForCausalLM": _STATES,
}
"""Tests, below ``tests/sglang``, in which a real server of a class answers as the contract says."""


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
    Setting("EAGLE3", Setup(speculative="EAGLE3"), "server", "test_server_draft_mixes.py"),
    Setting("trees of drafts", Setup(speculative="EAGLE"), "server", "test_server_draft_mixes.py"),
    Setting(
        "trees of drafts in pages of several tokens",
        Setup(speculative="EAGLE", page_size=64, paged_trees=True),
        "",
        "",
    ),
    Setting("NGRAM", Setup(speculative="NGRAM"), "server", "test_server_drafts.py"),
    Setting("DFLASH", Setup(speculative="DFLASH"), "", ""),
    Setting("tensor parallel", Setup(), "server", "test_server_tensor_parallel.py"),
    Setting("data parallel", Setup(), "server", "test_server_data_parallel.py"),
    Setting("data-parallel attention", Setup(), "server", "test_server_data_parallel.py"),
    Setting("expert parallel", Setup(), "server", "test_server_draft_mixes.py"),
    Setting("mixed chunks", Setup(), "server", "test_server_mixed_chunk.py"),
    Setting("HiCache", Setup(host_layout="page_first"), "server", "test_server_hosted.py"),
    Setting("HiCache with a storage back end", Setup(host_storage=True), "", ""),
    Setting("LoRA", Setup(), "server", "test_server_adapters.py"),
    Setting("windows in pages of 16", Setup(hybrid_window=True), "server", "test_state_splices.py"),
    Setting("states, `no_buffer`", Setup(recurrent=True), "server", "test_state_splices.py"),
    Setting("states, `extra_buffer`", Setup(recurrent=True), "server", "test_state_splices.py"),
    Setting("states in 8 bits", Setup(recurrent=True, packed_states=True), "", ""),
    Setting("EAGLE beside windows", Setup(hybrid_window=True, speculative="EAGLE"), "", ""),
    Setting("EAGLE beside states", Setup(recurrent=True, speculative="EAGLE"), "", ""),
    Setting("HiCache beside states", Setup(recurrent=True, host_layout="page_first"), "", ""),
    Setting("pipeline parallel", Setup(pipeline_parallel=2), "", ""),
    Setting("context parallel", Setup(context_parallel=2), "", ""),
    Setting("disaggregated prefill", Setup(disaggregation="prefill"), "", ""),
)
PAGES, FP8, DRAFTS, NGRAM = "larger pages", "FP8 KV", "draft model", "NGRAM"
REPLICAS, ATTENTION, EXPERTS = "data parallel", "data-parallel attention", "expert parallel"
HOSTED = "HiCache"
TOGETHER: tuple[tuple[frozenset[str], str], ...] = (
    (frozenset({PAGES, DRAFTS}), "sglang/test_server_drafts.py"),
    (frozenset({PAGES, NGRAM}), "sglang/test_server_drafts.py"),
    (frozenset({DRAFTS, FP8}), "sglang/test_server_draft_mixes.py"),
    (frozenset({DRAFTS, ATTENTION}), "sglang/test_server_draft_mixes.py"),
    (
        frozenset({PAGES, DRAFTS, ATTENTION, EXPERTS}),
        "sglang/test_server_draft_mixes.py",
    ),
    (
        frozenset({PAGES, FP8, DRAFTS, ATTENTION, EXPERTS}),
        "sglang/test_server_draft_mixes.py",
    ),
    (frozenset({PAGES, FP8}), "e2e/sglang/test_three_arm_bench.py"),
    (frozenset({PAGES, HOSTED}), "sglang/test_server_hosted.py"),
)
"""Settings that one real server on a CPU has in a test, below ``tests``."""
_ORDER = (PAGES, FP8, DRAFTS, NGRAM, REPLICAS, ATTENTION, EXPERTS, HOSTED)
_TESTED = {
    "server": "server",
    "parts": "parts",
    "": "not tested here",
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
    windowed: bool
    """True if some layers keep a sliding window's rows alone."""
    recurrent: bool
    """True if some layers keep a recurrent state: edits keep it."""
    recipes: tuple[Mapping[str, Any], ...]

    @property
    def state(self) -> str:
        """The kinds of state that its model keeps per sequence."""
        kinds = ((self.windowed, "windows"), (self.recurrent, "recurrent"))
        return ", ".join(kind for present, kind in kinds if present)

    @property
    def shown(self) -> str:
        """Way in which its splices were compared."""
        return "server" if self.architecture in SERVERS else "model"

    def refusal(self, recipe: Mapping[str, Any]) -> str:
        """Return why its model doesn't splice under a recipe; empty if it does."""
        return recipe_refusal(recipe, windowed=self.windowed, recurrent=self.recurrent)

    @property
    def spliced_recipes(self) -> int:
        """The number of its recipes under which the model splices."""
        return len(self._spliced)

    @property
    def untested(self) -> list[str]:
        """Settings that its spliced recipes combine and no test does, one entry per recipe."""
        return [name for recipe in self._spliced if (name := untested_together(recipe))]

    @property
    def _spliced(self) -> list[Mapping[str, Any]]:
        if not self.splices:
            return []
        return [recipe for recipe in self.recipes if not self.refusal(recipe)]


def entries() -> list[Entry]:
    """Return all pages in order."""
    verdicts = json.loads(VERDICTS.read_text(encoding="utf-8"))
    pages = json.loads(COOKBOOK.read_text(encoding="utf-8"))
    return [_entry(page, verdicts.get(page["config"])) for page in pages]


def _entry(page: Mapping[str, Any], verdict: Mapping[str, Any] | None) -> Entry:
    splices = bool(verdict and verdict["splices"])
    reason = "" if splices else _BY_KIND.get(page["attention"], "")
    if not splices and verdict:
        reason = verdict["reason"] if verdict["measured"] or not reason else reason
    state = (verdict and verdict["state"]) or {}
    return Entry(
        page["page"],
        tuple(page["models"]),
        page["architecture"],
        splices,
        bool(verdict and verdict["measured"]),
        reason or ("" if splices else "no published configuration at hand"),
        bool(state.get("window")),
        bool(state.get("recurrent")) or page["attention"] == "recurrent hybrid",
        tuple(page["recipes"]),
    )


def recipe_refusal(
    recipe: Mapping[str, Any], *, windowed: bool = False, recurrent: bool = False
) -> str:
    """Return why a server with a recipe's settings can't splice a supported model; empty if it can.

    A recipe that gets other pages on other hardware counts by its largest. NGRAM drafts trees
    unless it is told not to.
    """
    hosted = bool(recipe.get("hicache"))
    speculative, page = str(recipe.get("speculative", "")), max(recipe.get("pages", [1]))
    return _refused(
        Setup(
            kv_dtype=_kv_dtype(str(recipe.get("kv_cache_dtype", "bfloat16"))),
            page_size=page,
            hybrid_window=windowed,
            recurrent=recurrent,
            radix_cache=not recipe.get("radix_off", False),
            speculative=speculative,
            paged_trees=speculative == "NGRAM" and page > 1,
            host_layout="page_first" if hosted else "",
            host_drafts=hosted and bool(speculative),
            host_attention_dp=hosted and "dp_attention" in recipe,
            disaggregation="prefill" if recipe.get("disaggregation") else "null",
            pipeline_parallel=2 if recipe.get("pp") else 1,
            context_parallel=2 if recipe.get("context_parallel") else 1,
        )
    )


def untested_together(recipe: Mapping[str, Any]) -> str:
    """Return the settings of a recipe if no test has all of them on one server; else nothing.

    Tensor parallelism is left out: its ranks decide alike, whatever the other settings.
    """
    speculative = recipe.get("speculative", "")
    attention = bool(recipe.get("dp_attention"))
    has = {
        PAGES: max(recipe.get("pages", [1])) > 1,
        FP8: _kv_dtype(str(recipe.get("kv_cache_dtype", ""))) == "float8_e4m3fn",
        DRAFTS: speculative in {"EAGLE", "EAGLE3"},
        NGRAM: speculative == "NGRAM",
        REPLICAS: bool(recipe.get("dp")) and not attention,
        ATTENTION: attention,
        EXPERTS: bool(recipe.get("ep")),
        HOSTED: bool(recipe.get("hicache")),
    }
    settings = [name for name, applies in has.items() if applies]
    tested = len(settings) < 2 or any(together.issuperset(settings) for together, _ in TOGETHER)
    return "" if tested else " with ".join(settings)


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
    figures = {
        "pages": len(found),
        "spliced": len(spliced),
        "kept": sum(entry.recurrent for entry in spliced),
        "windowed": sum(entry.windowed and not entry.recurrent for entry in spliced),
        "servers": sum(entry.shown == "server" for entry in spliced),
        "classes": sum(entry.shown == "model" for entry in spliced),
        "recipes": recipes,
        "served": served,
        "together": served - sum(len(entry.untested) for entry in spliced),
        "share": f"{100 * served / recipes:.0f}",
    }
    introduction = INTRODUCTION.read_text(encoding="utf-8").rstrip()
    yield Template(introduction).substitute(figures)
    yield from _settings()
    yield from _together()
    yield "\n## Models that splice\n"
    yield "| page of the cookbook | class | state | shown by | recipes that splice |"
    yield "|---|---|---|---|---|"
    for entry in spliced:
        contract = entry.state.replace("recurrent", "recurrent: kept")
        yield (
            f"| [{entry.page}]({_SITE}/{entry.page}) | `{entry.architecture}` | {contract} | "
            f"{entry.shown} | {entry.spliced_recipes} of {len(entry.recipes)}{_others(entry)} |"
        )
    yield "\n## Models that are served without splicing\n"
    yield "| page of the cookbook | class | state | reason |"
    yield "|---|---|---|---|"
    for entry in found:
        if not entry.splices:
            how = "measured: " if entry.measured else ""
            yield (
                f"| [{entry.page}]({_SITE}/{entry.page}) | `{entry.architecture}` | "
                f"{entry.state} | {how}{entry.reason} |"
            )
    yield from _configurations()


def _settings() -> Iterator[str]:
    yield "\n| setting | | test |"
    yield "|---|---|---|"
    for setting in SETTINGS:
        reason = _refused(setting.setup)
        result = f"refused: {reason}" if reason else _TESTED[setting.tested]
        test = f"`{setting.where}`" if setting.where and not reason else ""
        yield f"| {setting.name} | {result} | {test} |"


def _together() -> Iterator[str]:
    yield "\n| settings together on one server | test |"
    yield "|---|---|"
    for settings, test in TOGETHER:
        ordered = [name for name in _ORDER if name in settings]
        yield f"| {', '.join(ordered)} | `{test}` |"


def _others(entry: Entry) -> str:
    refused = {entry.refusal(recipe) for recipe in entry.recipes}
    reasons = sorted({reason for each in refused - {""} for reason in each.split("; ")})
    said = f"; others: {', '.join(reasons)}" if reasons else ""
    if entry.untested:
        mixes = ", ".join(sorted(set(entry.untested)))
        said += f"; {len(entry.untested)} not tested together: {mixes}"
    return said


def _configurations() -> Iterable[str]:
    verdicts = json.loads(VERDICTS.read_text(encoding="utf-8"))
    yield "\n## Measured configurations\n"
    yield (
        "Error: root of the mean square over a layer's keys, spliced rows against rows that the "
        "model computes at the new place, as a share of the keys'. Control: the least error of "
        "wrong splices: no turn, the other pairing, one position off, half the band; where keys "
        "stand still, another token's row. State: the same for a copied recurrent state, and its "
        "control, another token's.\n"
    )
    yield "| configuration | rotation | error | control | state |"
    yield "|---|---|---|---|---|"
    for name, verdict in sorted(verdicts.items()):
        if verdict["splices"]:
            rotary, errors = verdict["rotary"], dict(verdict["errors"])
            error, state = errors.pop("spliced"), errors.pop("state", None)
            other = errors.pop("another state", 0.0)
            dtype = "" if verdict["dtype"] == "float32" else f" ({verdict['dtype']})"
            yield (
                f"| {name}{dtype} | {_rotation(rotary)} | {error:.0e} | "
                f"{min(errors.values()):.0e} | "
                f"{'' if state is None else f'{state:.0e}, {other:.0e}'} |"
            )


def _rotation(rotary: Mapping[str, Any]) -> str:
    if not rotary["rotary_dim"]:
        return "none"
    pairing = rotary["pairing"].replace("_", "-")
    return f"{rotary['rotary_dim']}, {pairing}, {rotary['rope_type']}"


def main() -> None:
    """Write the page."""
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
