"""The proxy's account of a run, read from its metrics. Pure."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, fields

from prometheus_client.parser import text_string_to_metric_families

from ..errors import EndpointError
from ..sums import Sums

_MODEL_ROUTES = re.compile(r"/(chat/completions|completions|messages|responses)$")


@dataclass(frozen=True, slots=True)
class Account(Sums):
    """Counts over a time; tokens of prompts by the source of their KV."""

    cached: int = 0
    spliced: int = 0
    reused: int = 0
    prefilled: int = 0
    generated: int = 0
    requests: int = 0
    """Requests to the model."""
    failed_requests: int = 0
    """Those of them that weren't answered with 2xx."""
    edits: int = 0
    without_receipt: int = 0
    """Turns whose sources the engine didn't report."""

    @property
    def prompt(self) -> int:
        """Prompt tokens."""
        return self.cached + self.spliced + self.reused + self.prefilled

    @property
    def served_share(self) -> float | None:
        """Share of the prompt tokens that weren't prefilled; None without any."""
        return 1 - self.prefilled / self.prompt if self.prompt else None


def account_of(metrics: str) -> Account:
    """Return the counts in a Prometheus text, over all tenants, models and turns.

    Raises:
        EndpointError: it isn't one.
    """
    counts: Counter[str] = Counter()
    try:
        for family in text_string_to_metric_families(metrics):
            for sample in family.samples:
                for name in _counted(sample.name, sample.labels):
                    counts[name] += round(sample.value)
    except ValueError as error:
        raise EndpointError("the proxy's metrics can't be read") from error
    unknown = counts.keys() - {each.name for each in fields(Account)}
    if unknown:
        raise EndpointError(f"the proxy counts tokens of a source unknown here: {min(unknown)}")
    return Account(**counts)


def _counted(name: str, labels: dict[str, str]) -> tuple[str, ...]:
    match name:
        case "leyline_prompt_tokens_total":
            return (labels["source"],)
        case "leyline_completion_tokens_total":
            return ("generated",)
        case "leyline_edits_total":
            return ("edits",)
        case "leyline_receipts_missing_total":
            return ("without_receipt",)
        case "leyline_requests_total" if _MODEL_ROUTES.search(labels["route"]):
            answered = labels["status"].startswith("2")
            return ("requests",) if answered else ("requests", "failed_requests")
    return ()
