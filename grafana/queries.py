"""PromQL that several boards use, and the selectors of the boards' variables."""

from __future__ import annotations

BY_TENANT = 'tenant=~"$tenant"'
BY_MODEL = 'model=~"$model"'
BY_UPSTREAM = 'upstream=~"$upstream"'
BY_INSTANCE = 'instance=~"$instance"'
BY_BOTH = f"{BY_TENANT},{BY_MODEL}"

NOTHING_TO_SPLICE = "not_worth_it|nothing_to_reuse|nothing_cached"
"""Reasons of edits after which there was nothing that a splice could have saved."""

RATE = "$__rate_interval"
RANGE = "$__range"


def grouped(by: str) -> str:
    """Return ``sum``, keeping the labels ``by`` apart."""
    return f"sum by ({by})" if by else "sum"


def total(metric: str, labels: str = "", by: str = "") -> str:
    """Return the sum of a gauge."""
    return f"{grouped(by)} ({metric}{{{labels}}})"


def per_second(metric: str, labels: str, by: str) -> str:
    """Return a counter's increase per second."""
    return f"{grouped(by)} (rate({metric}{{{labels}}}[{RATE}]))"


def per_minute(metric: str, labels: str, by: str) -> str:
    """Return a counter's increase per minute."""
    return f"60 * {per_second(metric, labels, by)}"


def over_range(metric: str, labels: str, by: str = "") -> str:
    """Return a counter's increase over the board's time range."""
    return f"{grouped(by)} (increase({metric}{{{labels}}}[{RANGE}]))"


def or_zero(expr: str) -> str:
    """Return ``expr``, or 0 if nothing was counted yet; for single values.

    In parentheses, because ``or`` binds less than any arithmetic that this may become a part of.
    """
    return f"({expr} or vector(0))"


def of_proxies(expr: str) -> str:
    """Return the series of proxies alone: other programs have processes, too."""
    return f"({expr}) and on (job, instance) leyline_build_info"


def share(part: str, whole: str, metric: str, window: str = RATE, by: str = "") -> str:
    """Return the share that the selector ``part`` has of the increase of ``whole``.

    If ``whole`` grew and ``part`` isn't there yet, the share is 0; groups without traffic give no
    sample instead of NaN.
    """
    all_of = f"{grouped(by)} (rate({metric}{{{whole}}}[{window}]))"
    some = f"{grouped(by)} (rate({metric}{{{part}}}[{window}]))"
    return f"({some} or (0 * {all_of})) / ({all_of} > 0)"


def needed(fate: str, labels: str, window: str) -> str:
    """Return the share of each policy's evicted tokens that were needed again.

    Args:
        fate: ``recalled`` or ``quoted``.
    """
    some, evicted = (
        f"sum by (policy) (increase(leyline_evicted_{kind}tokens_total{{{labels}}}[{window}]))"
        for kind in (f"{fate}_", "")
    )
    return f"{some} / ({evicted} > 0)"


def hit_ratio(by: str = "", window: str = RATE, extra: str = "") -> str:
    """Return the share of prompt tokens that were not prefilled.

    Written as 1 - prefilled / all because every prompt prefills at least its last token: the
    prefilled series always exists, those of the other sources may not yet. Groups without traffic
    give no sample instead of NaN.
    """

    def tokens(*labels: str) -> str:
        selector = ",".join(part for part in (BY_BOTH, extra, *labels) if part)
        return f"{grouped(by)} (rate(leyline_prompt_tokens_total{{{selector}}}[{window}]))"

    prefilled = tokens('source="prefilled"')
    return f"1 - {prefilled} / ({tokens()} > 0)"


def quantile(q: float, metric: str, labels: str = "", by: str = "") -> str:
    """Return a quantile of a histogram."""
    groups = ", ".join(label for label in ("le", by) if label)
    return f"histogram_quantile({q}, sum by ({groups}) (rate({metric}_bucket{{{labels}}}[{RATE}])))"
