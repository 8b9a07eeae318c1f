"""The house stays small enough to be known: distributions, files and functions have limits."""

from __future__ import annotations

from support.house import distributions, functions, loose_modules, pages, product_files

MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 60
MAX_LOOSE_MODULES = 4
MAX_LINES = {"serving": 110_000, "replay engine": 7_450, "laboratory": 37_800}
MAX_WORDS = 90_000

_OPTIONS = "its parameters are the command's options"
LONG_FUNCTIONS = {
    "bench/leyline_lab/three_arm/command.py command": _OPTIONS,
    "bench/leyline_lab/outside/command.py command": _OPTIONS,
    "bench/leyline_lab/reuse/command.py command": _OPTIONS,
    "bench/leyline_lab/user_turn/command.py command": _OPTIONS,
    "bench/leyline_lab/commands/demo.py demo": _OPTIONS,
    "bench/leyline_lab/commands/policies_try.py try_policies": _OPTIONS,
    "bench/leyline_lab/commands/replay.py replay": _OPTIONS,
    "bench/leyline_lab/commands/roi.py roi": _OPTIONS,
    "engine_patch/leyline_replay/factory.py create_engine_app": "its parameters are the engine's",
    "proxy/leyline_proxy/wiring/services.py build_services": "the one place that wires services",
    "engine_patch/leyline_engine/rows/kernel.py _move_rows": "one Triton kernel",
}


def test_distributions_are_no_larger_than_they_need_to_be() -> None:
    """Each distribution keeps to its lines; who needs more deletes first."""
    lines = {name: count.size for name, count in distributions().items()}
    assert lines.keys() == MAX_LINES.keys()
    assert {name for name, count in lines.items() if count > MAX_LINES[name]} == set()
    assert min(lines.values()) > 1000


def test_the_engine_has_rooms() -> None:
    """Few modules lie at the engine's root."""
    assert 0 < len(loose_modules()) <= MAX_LOOSE_MODULES


def test_the_documentation_can_be_read() -> None:
    """All pages have no more words than a reader has time for."""
    assert 10_000 < pages().size <= MAX_WORDS


def test_files_are_short() -> None:
    """No file has more lines than the limit."""
    lengths = {name: len(text.splitlines()) for name, text in product_files()}
    assert len(lengths) > 300
    assert {name for name, lines in lengths.items() if lines > MAX_FILE_LINES} == set()


def test_functions_are_short() -> None:
    """No function has more lines than the limit but those listed, and none is listed in vain."""
    long = {
        f"{file} {name}"
        for file, text in product_files()
        for name, lines in functions(text)
        if lines > MAX_FUNCTION_LINES
    }
    assert long == set(LONG_FUNCTIONS)
