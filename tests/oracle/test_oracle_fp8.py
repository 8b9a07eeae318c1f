"""The engine's splices of FP8 KV against the contract computed the long way round in FP8.

Both sides round keys and values where they are computed, and moved keys once more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from oracle_cases import ci_seeds, draw_case, single_edit_case
from oracle_check import check_receipt, play
from oracle_models import MODEL_NAMES, OracleModel

def test_dbg(oracle_model):
    for name in MODEL_NAMES:
        subject = replace(oracle_model(name), kv_dtype=torch.float8_e4m3fn)
        try:
            for seed in ci_seeds(name):
                print(name, seed, ["%.1e" % c.error for c in play(subject, draw_case(seed))])
            for how in ("none", "no_rotation", "off_by_one"):
                print(how, ["%.1e" % play(subject, single_edit_case(seed, delta), how)[1].error for seed, delta in ((1, -64), (2, 17), (3, -5))])
        except Exception as e: print(name, repr(e)[:300])
