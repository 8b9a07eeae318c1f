"""Writes docs/metrics.md from the catalogues of the proxy and the engine: ``make metrics-docs``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from string import Template

from leyline_engine.contract.metrics import ENGINE_METRICS, MetricSpec
from leyline_proxy.telemetry.bounded import CAPS, LONGEST_VALUE, MOST_VALUES
from leyline_proxy.telemetry.catalogue import GROUPS, PROCESS_METRICS

HERE = Path(__file__).resolve().parent
PAGE = HERE.parents[1] / "docs" / "metrics.md"
INTRODUCTION = HERE / "metrics-introduction.md"
ABOUT_PROCESSES = (
    "The system's counts for each process of the proxy. `process` is `proxy` if there is one; "
    "with several workers it is `supervisor`, `worker 0` and so on, and `engine` for the embedded "
    "engine. A process that was started again takes its predecessor's name. Other programs "
    "expose series of these names, too: select yours by the job, or by "
    "`and on (job, instance) leyline_build_info`."
)


def page() -> str:
    """Return the whole page."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    caps = (f"{name} {cap}" for name, cap in CAPS.items() if cap is not None)
    yield (
        Template(INTRODUCTION.read_text(encoding="utf-8"))
        .substitute(
            most_values=MOST_VALUES, other_caps=", ".join(caps), longest_value=LONGEST_VALUE
        )
        .rstrip()
    )
    for group in GROUPS:
        yield f"\n## {group.title}\n\n{group.about}\n"
        yield from _table(entry.spec for entry in group.entries)
    yield f"\n## Processes\n\n{ABOUT_PROCESSES}\n"
    yield from _table(PROCESS_METRICS)
    yield "\n## The engine\n"
    yield (
        "Of both engines: the embedded one's are on the proxy's `/metrics`, SGLang's with the "
        "plugin on SGLang's own (`--enable-metrics`).\n"
    )
    yield from _table(ENGINE_METRICS)


def _table(specs: Iterable[MetricSpec]) -> Iterator[str]:
    yield "| metric | type | labels | meaning | meaning of a bad value |"
    yield "|---|---|---|---|---|"
    for spec in specs:
        labels = ", ".join(f"`{label}`" for label in spec.labels)
        name = f"`{exposed_name(spec)}`"
        yield f"| {name} | {spec.kind} | {labels} | {_cell(spec.help)} | {_cell(spec.bad)} |"


def exposed_name(spec: MetricSpec) -> str:
    """Return the name for queries; a histogram's without its suffixes."""
    return f"{spec.name}_total" if spec.kind == "counter" else spec.name


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
