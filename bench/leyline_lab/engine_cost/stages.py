"""Stages of edited turns in recorded sessions, by the price of one more forward.

Each gap between copies that an engine on SGLang makes takes a forward of its own, a stage. Where
the run of copies after a gap is shorter than the price, it is prefilled with its neighbours. The
sessions are played to caches without a model, as ``leyline roi`` does, and each edited turn is
planned once for each price. The last columns are the work in tokens if the price is the true one:
what is prefilled, and the price of each forward. They compare plans that join gaps by this price
with plans that join none.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from leyline_policies import load_pipeline
from leyline_proxy.model.undeclared import UndeclaredRules

from ..anchors.recorded import Turn, sessions
from ..console import write_json
from ..harness.arguments import Arguments, numbers
from ..harness.report import show
from ..roi.playing import Player
from ..traces.recordings import read_trace
from ..traces.renderer import load_renderer


@dataclass(frozen=True, slots=True)
class Figures:
    """The edited turns of one file under one price."""

    file: str
    page: int
    price: int
    turns: int
    stages: float
    """Mean per turn."""
    most: int
    copied: int
    prefilled: int


def priced(file: str, turns: list[Turn], price: int, page: int) -> Figures:
    """Plan all turns under a price, in tokens."""
    found = [turn.plan(turn.prefix, price, page=page) for turn in turns]
    stages = [plan.stages for plan in found]
    return Figures(
        file,
        page,
        price,
        len(found),
        round(sum(stages) / max(1, len(stages)), 2),
        max(stages, default=0),
        sum(plan.copied for plan in found),
        sum(plan.prefilled for plan in found),
    )


def work(plans: Figures, price: int) -> int:
    """Return tokens and forwards together, in tokens, at a price that the plans needn't know."""
    return plans.prefilled + round(price * (1 + plans.stages) * plans.turns)


def play(path: Path, policy: str, undeclared: list[str], page: int) -> list[Turn]:
    """Return a file's edited turns."""
    rules = UndeclaredRules.parse(undeclared)
    player = Player(load_renderer("shipped"), load_pipeline(policy), rules, page_tokens=page)
    played = sessions(read_trace(path), player)
    return [turn for session in played for turn in session if turn.plan(turn.prefix, 0).spliced]


def rows(found: list[Figures]) -> Iterator[list[str] | None]:
    """Yield a row for each price, file by file."""
    unjoined = {each.file: each for each in found if each.price == 0}
    for each in found:
        if each.price == 0:
            yield None
        yield [
            each.file,
            str(each.price),
            f"{each.turns:,}",
            f"{each.stages:.2f}",
            str(each.most),
            f"{each.copied:,}",
            f"{each.prefilled:,}",
            f"{work(each, each.price):,}",
            f"{work(unjoined[each.file], each.price):,}",
        ]


def main() -> None:
    """Play, plan, print, write."""
    parser = Arguments(__doc__)
    parser.add_argument("traces", nargs="+", type=Path, help="recorded sessions")
    parser.add_argument("--policy", default="keep_all", help="policy pipeline, as for serve")
    parser.add_argument(
        "--undeclared",
        nargs="*",
        default=["tool=amortize"],
        metavar="ROLE=amortize",
        help="the harness's own edits that are spliced",
    )
    parser.add_argument("--prices", type=numbers, default="0,64,128,256,512,1024", help="in tokens")
    parser.add_argument("--page", type=int, default=1, help="tokens per page")
    given = parser.parse_args()
    found: list[Figures] = []
    for path in given.traces:
        turns = play(path, given.policy, given.undeclared, given.page)
        name = path.name.removesuffix(".jsonl.gz")
        found += [priced(name, turns, price, given.page) for price in sorted({0, *given.prices})]
    counts = ("turns", "stages", "most", "copied", "prefilled")
    show(("file", "price", *counts, "work", "unjoined"), rows(found))
    write_json(given.json, [asdict(each) for each in found])
