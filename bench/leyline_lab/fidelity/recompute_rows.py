"""Settings of boundary recompute, and their figures from measured cases. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from leyline_lab.fidelity.comparison import NAIVE, REPREFILL
from leyline_lab.fidelity.experiment import Cell, Estimate, Record
from leyline_lab.fidelity.statistics import mean, share

BOUNDARIES = (0, 1, 2, 4, 8, 16, 32, 64)
QUOTE = 3
"""Tokens of the shortest quote that is computed again."""
MARGINS = (0.5, 1.0, 2.0, 4.0)
"""Logits by which the first token must lead; below, the prompt is prefilled again."""
MOST_RESIDUAL, MOST_RECOMPUTED = 0.02, 0.01
"""The goal: share of residual answers, and of the prompt's tokens that are recomputed."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One way to splice."""

    boundary: int
    quotes: int = 0
    erratum: bool = False
    rotated: bool = True

    def __str__(self) -> str:
        if not self.rotated:
            return NAIVE
        quotes = ", quotes" if self.quotes else ""
        return f"k = {self.boundary}{quotes}" + (", erratum" if self.erratum else "")


CONTROL = Setting(0, rotated=False)
SETTINGS = (
    *(Setting(boundary) for boundary in BOUNDARIES),
    *(Setting(boundary, QUOTE) for boundary in (0, 1, 2, 4)),
    *(Setting(boundary, erratum=True) for boundary in (0, 1)),
    Setting(1, QUOTE, erratum=True),
    CONTROL,
)


COLUMNS = (
    "setting",
    "cut values asked",
    "residual",
    "residual low",
    "residual high",
    "first = re-prefill",
    "kept values asked",
    "kept right",
    "kept right, re-prefill",
    "difference",
    "difference low",
    "difference high",
    "extra tokens",
    "extra share",
    "extra share, most",
)
"""Columns after the model's. *Extra* tokens are computed in addition to a plain splice's."""


@dataclass(frozen=True, slots=True)
class SettingRow:
    """The figures of one setting."""

    name: str
    setting: Setting | None
    """None for a margin."""
    residual: Estimate
    alike: float
    """Share of first tokens that are as re-prefill's."""
    kept: float
    again: float
    """Share of kept values that re-prefill answers."""
    difference: Estimate
    """Of right answers on kept values, from re-prefill's."""
    extra: float
    """Mean number of tokens that are computed in addition to a plain splice's."""
    extra_share: float
    """The same as a share of the prompt."""
    extra_most: float
    """The largest such share of a prompt."""

    @property
    def reaches(self) -> bool:
        """True if the setting reaches the goal."""
        return (
            self.residual.value <= MOST_RESIDUAL
            and self.extra_share <= MOST_RECOMPUTED
            and self.difference.high >= 0
        )

    def cells(self) -> tuple[Cell, ...]:
        """Return the row after the model's name."""
        residual, difference = self.residual, self.difference
        left = residual.value, residual.low, residual.high, self.alike
        right = self.kept, self.again, difference.value, difference.low, difference.high
        cost = self.extra, self.extra_share, self.extra_most
        return (
            self.name,
            residual.count,
            *(round(number, 6) for number in left),
            difference.count,
            *(round(number, 6) for number in (*right, *cost)),
        )


def rows_of(records: Sequence[Record]) -> list[SettingRow]:
    """Return a row for each setting and margin, of one model's cases."""
    measured = (each for each in SETTINGS if all(f"{each}|says" in record for record in records))
    rows = [_row(records, setting) for setting in measured]
    return rows + [_margin_row(records, margin) for margin in MARGINS]


def _row(records: Sequence[Record], setting: Setting) -> SettingRow:
    measured = [
        _Outcome(
            bool(record[f"{setting}|says"]),
            bool(record[f"{setting}|first"]),
            float(record[f"{setting}|extra"] or 0),
        )
        for record in records
    ]
    return _figures(str(setting), setting, records, measured)


def _margin_row(records: Sequence[Record], margin: float) -> SettingRow:
    """Return the figures of prefilling again where the plain splice's first token leads by less."""
    plain = SETTINGS[0]
    measured = [
        _Outcome(bool(record[f"{REPREFILL}|says"]), True, float(record["after"] or 0))
        if float(record["margin"] or 0) < margin
        else _Outcome(bool(record[f"{plain}|says"]), bool(record[f"{plain}|first"]), 0.0)
        for record in records
    ]
    return _figures(f"margin {margin:g}", None, records, measured)


@dataclass(frozen=True, slots=True)
class _Outcome:
    """One answer of a setting."""

    says: bool
    """True if it has the value that was asked for."""
    alike: bool
    """True if it begins as re-prefill's."""
    extra: float


def _figures(
    name: str, setting: Setting | None, records: Sequence[Record], measured: Sequence[_Outcome]
) -> SettingRow:
    pairs = list(zip(records, measured, strict=True))
    cut = [found for record, found in pairs if not record["kept"]]
    kept = [(record, found) for record, found in pairs if record["kept"]]
    again = [bool(record[f"{REPREFILL}|says"]) for record, _ in kept]
    right = [found.says for _, found in kept]
    extra = [found.extra for found in measured]
    shares = [found.extra / float(record["prompt"] or 1) for record, found in pairs]
    return SettingRow(
        name,
        setting,
        share(sum(found.says for found in cut), len(cut)),
        sum(found.alike for found in measured) / len(measured),
        sum(right) / len(right),
        sum(again) / len(again),
        mean([float(one) - float(other) for one, other in zip(right, again, strict=True)]),
        mean(extra).value,
        mean(shares).value,
        max(shares),
    )
