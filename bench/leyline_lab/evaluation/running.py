"""An evaluation from the first case to the report; what is measured survives an interruption."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import orjson

from leyline_engine.contract import FidelityProfile
from leyline_lab.fidelity.experiment import Experiment, Scale
from leyline_lab.fidelity.journal import Journal, count_left, measure_all

from ..engines.stack import StackOptions
from ..errors import UnknownTableError
from ..files import write_all
from .composed import Composed, ComposedModel
from .engines import Evaluation
from .recalled import RecallOfCut
from .report import render_report

_RECOMMENDS = "boundary_recompute"
"""Name of the experiment that recommends profiles."""


POOL_TOKENS = 16_384
"""KV slots of the ablation's engines; its sessions need a few thousand."""


def journal_of(out: Path) -> Path:
    """Return the file with the measured cases of an unfinished report."""
    return out.with_name(f"{out.name}.journal")


def evaluate(
    evaluation: Evaluation,
    scale: Scale,
    out: Path,
    html: Path | None,
    begin: Callable[[int], Callable[[str], None]],
    *,
    tables: Collection[str] = (),
    stack: StackOptions = StackOptions(pool_tokens=POOL_TOKENS),  # noqa: B008 - immutable
) -> dict[str, Any]:
    """Measure what the journal lacks, and write the report.

    Args:
        out: the report as JSON. The journal lies beside it until it is there.
        html: the report for readers.
        begin: called with the number of cases that are left; what it returns is called with an
            experiment's title after each.
        tables: names of the tables to measure; empty for all.
        stack: proxy and engine of the composed ablation, but for the model.

    Raises:
        UnknownTableError: there is no such table for this engine.
        JournalError: the journal is another run's, or can't be written.
        OSError: the report can't be written. The journal stays.
        SubjectError: a case can't be measured. The journal stays.
    """
    identity = {"version": version("leyline-kv"), **evaluation.identity}
    with Journal(journal_of(out), identity) as journal:
        experiments = _chosen(_with_composed(evaluation, journal, scale, stack), tables)
        advance = begin(count_left(experiments, journal, scale))
        measured = measure_all(experiments, journal, scale, advance)
        document = {
            "version": identity["version"],
            "engine": evaluation.engine,
            "model": evaluation.model,
            "model_fingerprint": evaluation.fingerprint,
            "scale": scale.value,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "notes": list(evaluation.notes),
            "left_out": dict(evaluation.left_out),
            "tables": measured,
            "profiles": [each for table in measured.values() for each in table["profiles"]],
        }
        files = {out: orjson.dumps(document, option=orjson.OPT_INDENT_2) + b"\n"}
        if html is not None:
            files[html] = render_report(document).encode()
        write_all(files)
        journal.remove()
    return document


def _chosen(experiments: Sequence[Experiment], tables: Collection[str]) -> Sequence[Experiment]:
    known = [each.name for each in experiments]
    for name in tables:
        if name not in known:
            raise UnknownTableError(
                f"--tables: there is no table {name} for this engine; there are {', '.join(known)}"
            )
    return [each for each in experiments if not tables or each.name in tables]


def _with_composed(
    evaluation: Evaluation, journal: Journal, scale: Scale, stack: StackOptions
) -> Sequence[Experiment]:
    """Return the experiments, and after that which recommends profiles those with a proxy."""
    experiments: list[Experiment] = []
    for each in evaluation.experiments():
        experiments.append(each)
        if each.name == _RECOMMENDS and evaluation.served:
            models = [
                ComposedModel(name, replace(stack, model=model))
                for name, model in evaluation.served.items()
            ]
            recommended = partial(_recommended, each, journal, scale)
            experiments += [Composed(models, recommended), RecallOfCut(models)]
    return experiments


def _recommended(
    experiment: Experiment, journal: Journal, scale: Scale
) -> Sequence[FidelityProfile]:
    known = journal.of(experiment.name)
    cases = experiment.cases(scale)
    return experiment.table({case: known[case] for case in cases if case in known}).profiles
