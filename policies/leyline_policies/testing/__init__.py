"""A test kit for policies.

::

    from leyline_policies.testing import check_policy

    def test_short_pastes_keeps_the_rules():
        report = check_policy(ShortPastes(limit=100))
        assert report.reclaimed_tokens > 0

`check_policy` plays sessions to the policy, turn by turn as the proxy does, and raises a
`RuleBrokenError` at the first rule that it breaks. It needs the standard library only.
"""

from __future__ import annotations

from leyline_policies.testing.check import Report, check_policy
from leyline_policies.testing.rules import RULES, NothingEditedWarning, RuleBrokenError
from leyline_policies.testing.sessions import Session, requests_of, synthetic_sessions

__all__ = [
    "RULES",
    "NothingEditedWarning",
    "Report",
    "RuleBrokenError",
    "Session",
    "check_policy",
    "requests_of",
    "synthetic_sessions",
]
