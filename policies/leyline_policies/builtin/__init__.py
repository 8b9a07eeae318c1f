"""The policies that come with Leyline, by name."""

from __future__ import annotations

from leyline_policies.builtin.drop_failed_calls import DropFailedCalls
from leyline_policies.builtin.keep_all import KeepAll
from leyline_policies.builtin.redact import Redact
from leyline_policies.builtin.truncate_older_than import TruncateOlderThan
from leyline_policies.policy import Policy

BUILTINS: dict[str, type[Policy]] = {
    KeepAll.name: KeepAll,
    TruncateOlderThan.name: TruncateOlderThan,
    DropFailedCalls.name: DropFailedCalls,
    Redact.name: Redact,
}

__all__ = ["BUILTINS", "DropFailedCalls", "KeepAll", "Redact", "TruncateOlderThan"]
