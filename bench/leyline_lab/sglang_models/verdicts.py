"""Verdicts on models for SGLang, measured on small ones made from published configurations.

Each configuration of ``tests/fixtures/models`` is made small, loaded by SGLang on the CPU with
random weights, and measured as a server measures its model at the start. It runs in the environment
of SGLang.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

from leyline_engine.contract import StateFacts

from ..console import write_json
from ..harness.arguments import Arguments
from ..harness.machine import CHECKOUT
from .shrunken import names, write_small

_QUIET = {"TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1"}
"""Compiling a small model takes longer than running it."""
_VERDICT: dict[str, Any] = {
    "measured": False,
    "splices": False,
    "rotary": None,
    "pool": "",
    "dtype": "",
    "state": None,
    "errors": None,
    "free": True,
}


def main() -> int:
    """Measure the models and write the verdicts; the exit status is 1 if one couldn't be read."""
    parser = Arguments(__doc__)
    parser.add_argument("names", nargs="*", help="configurations; all by default")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--page-size", type=int, default=1)
    parser.add_argument("--show-log", action="store_true", help="show what SGLang logs")
    given = parser.parse_args()
    os.environ.update(_QUIET)
    # What SGLang imports and a CPU doesn't have.
    sys.path.insert(0, str(CHECKOUT / "deploy" / "sglang" / "stubs"))
    verdicts: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in given.names or names():
            model = write_small(name, Path(folder) / name, given.dtype)
            verdicts[name] = _in_a_child(model, given)
            print(f"{name:24} {_line(verdicts[name])}", flush=True)
            write_json(given.json, {name: verdicts[name] for name in sorted(verdicts)})
    spliced = sum(verdict["splices"] for verdict in verdicts.values())
    print(f"{spliced} of {len(verdicts)} splice")
    return int(any("architecture" not in verdict for verdict in verdicts.values()))


def _line(verdict: dict[str, Any]) -> str:
    if verdict["splices"]:
        rotary = verdict["rotary"]
        return (
            f"splices: {verdict['pool']}, {rotary['rope_type']}, {rotary['pairing']}, "
            f"{rotary['rotary_dim']} dimensions"
        )
    return f"{'refused' if verdict['measured'] else 'not loaded here'}: {verdict['reason']}"


def _in_a_child(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Measure a model in a process of its own: SGLang keeps one server's settings per process."""
    import sglang.srt.managers.tp_worker
    import sglang.srt.models.registry  # noqa: F401 - both once, for all children

    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        try:
            with os.fdopen(writing, "w") as pipe:
                json.dump(_measure(folder, options), pipe)
        except BaseException:
            traceback.print_exc()
        finally:
            # Not the parent's clean-up.
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        written = pipe.read()
    _, status = os.waitpid(child, 0)
    if not written:
        return _VERDICT | {"reason": f"the process ended with status {status}"}
    verdict: dict[str, Any] = json.loads(written)
    return verdict


def _measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    import msgspec

    from leyline_engine.sglang.facts.setup import read_facts

    from .loaded_model import load_model
    from .splice_errors import splice_errors

    log = os.open(os.devnull, os.O_WRONLY)
    os.dup2(log, 1)
    if not options.show_log:
        os.dup2(log, 2)
    try:
        context, tree = load_model(folder, dtype=options.dtype, page_size=options.page_size)
    except BaseException as error:
        traceback.print_exc()
        return _by_configuration(folder, error)
    facts = read_facts(context, tree)
    capability = facts.capability
    errors = splice_errors(context, tree, facts) if capability.splices else None
    free = int(context.params.token_to_kv_pool_allocator.available_size())
    return {
        "architecture": capability.architecture,
        "measured": True,
        "splices": capability.splices,
        "reason": capability.unsupported_reason,
        "rotary": msgspec.to_builtins(capability.rotary),
        "pool": capability.kv.pool_class if capability.kv else "",
        "dtype": str(context.model_config.dtype).removeprefix("torch."),
        "state": _state(capability.state),
        "errors": errors,
        "free": free == int(context.params.token_to_kv_pool_allocator.size),
    }


def _state(facts: StateFacts | None) -> dict[str, Any] | None:
    """Return what a verdict says of the state that a model keeps per sequence."""
    if facts is None:
        return None
    return {"window": facts.window, "recurrent": bool(facts.recurrent_layers), "edits": facts.edits}


def _by_configuration(folder: Path, error: BaseException) -> dict[str, Any]:
    """Return why a model wasn't measured, and the state that SGLang would keep of it."""
    from sglang.srt.configs.model_config import ModelConfig, is_deepseek_dsa
    from sglang.srt.mem_cache.kv_cache_builder import uses_ssm_state

    from leyline_engine.sglang.facts.allow_list import Setup, refusals

    verdict = _VERDICT | {"reason": f"not loaded on a CPU ({type(error).__name__})"}
    try:
        config = ModelConfig(str(folder))
        setup = Setup(sparse_attention=bool(is_deepseek_dsa(config.hf_config)))
        recurrent = bool(uses_ssm_state(config))
    except Exception:
        traceback.print_exc()
        architectures = json.loads((folder / "config.json").read_text())["architectures"]
        return verdict | {"architecture": architectures[0]}
    window = int(config.sliding_window_size or 0) if config.is_hybrid_swa else 0
    refused = "; ".join(refused.what for refused in refusals(setup))
    return verdict | {
        "architecture": config.hf_config.architectures[0],
        "reason": refused or verdict["reason"],
        "state": {"window": window, "recurrent": recurrent, "edits": ""}
        if window or recurrent
        else None,
    }
