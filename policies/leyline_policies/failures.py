"""Signs of failed calls in tool results.

There is no standard; these are the signs that coding and tool-calling harnesses use:

- the message has ``"is_error": true``;
- the text is a JSON object with ``"is_error"`` or ``"isError"`` true, a non-zero ``"exit_code"``,
  ``"returncode"`` (also inside ``"metadata"``), or an ``"error"`` that is not empty;
- one of its first or last lines is a status, such as ``<returncode>1</returncode>``,
  ``exit code: 1`` or ``[Command finished with exit code 1]``; zero says that it succeeded;
- otherwise, it begins with ``Error``, ``Traceback`` or the name of an exception and a colon.

Words like "error" in the middle of an output mean nothing: a result that quotes a failure is not
one.
"""

from __future__ import annotations

import json
import re
from typing import Any

from leyline_policies.conversation import RESULT_ROLES, text_of
from leyline_policies.policy import Message

_EDGE_LINES = 5
_LINE = 200
_STATUS = re.compile(
    r"\s*(?:<returncode>\s*(?P<tag>-?\d+)\s*</returncode>"
    r"|\W*(?:[\w ]{0,60}\b)?(?:exit(?:ed with)?[ _](?:code|status)|return ?code)\b\W{0,3}?"
    r"(?P<words>-?\d+)\W*$)",
    re.IGNORECASE,
)
_LEADING = re.compile(r"\s*(?:error\b|traceback\b|[\w.]+(?:Error|Exception):)", re.IGNORECASE)
_CODE = re.compile(r'"(?:exit_?code|return_?code)"\s*:\s*-?[1-9]', re.IGNORECASE)
_FLAG = re.compile(r'"is_?error"\s*:\s*true', re.IGNORECASE)
_CODE_KEYS = ("exit_code", "exitCode", "returncode", "return_code")
_FLAG_KEYS = ("is_error", "isError")


def is_failure(message: Message) -> bool:
    """Return True if a tool result reports a failed call (see the module's text for the signs)."""
    return message.get("is_error") is True or is_failure_text(text_of(message))


def is_failed_result(message: Message) -> bool:
    """Return True if a message is a tool result that reports a failed call."""
    return message.get("role") in RESULT_ROLES and is_failure(message)


def is_failure_text(text: str) -> bool:
    """Return True if the text of a tool result reports a failed call."""
    if text.lstrip()[:1] == "{":
        verdict = _json_verdict(text)
        if verdict is not None:
            return verdict
    status = _status(text)
    if status is not None:
        return status != 0
    return _LEADING.match(text) is not None


def _json_verdict(text: str) -> bool | None:
    """Return the verdict of a JSON object; None if the text is none and shows no sign either."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        # Cut off or decorated JSON still shows its members.
        return True if _CODE.search(text) or _FLAG.search(text) else None
    return _members_fail(value) or _members_fail(value.get("metadata"))


def _members_fail(value: Any) -> bool:
    if not isinstance(value, dict):
        return False
    return (
        any(value.get(key) is True for key in _FLAG_KEYS)
        or any(value.get(key) not in (None, 0, "0", "") for key in _CODE_KEYS)
        or bool(value.get("error"))
    )


def _status(text: str) -> int | None:
    """Return the exit status that one of the first or last lines states."""
    stripped = text.strip()
    head = stripped.split("\n", _EDGE_LINES)[:_EDGE_LINES]
    tail = stripped.rsplit("\n", _EDGE_LINES)[-_EDGE_LINES:]
    for line in (*head, *reversed(tail)):
        found = _STATUS.match(line[:_LINE].rstrip())
        if found:
            return int(found["tag"] or found["words"])
    return None
