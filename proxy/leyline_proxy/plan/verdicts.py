"""Messages of a turn that are in quarantine: by verdicts that its session has, and by new ones."""

from __future__ import annotations

from collections.abc import Mapping

from leyline_policies.verbs import QUARANTINE

from ..edits.prepare import unedited
from ..errors import BadRequestError
from ..model.prepared import Prepared
from ..model.spans import SpanNames
from ..model.verdicts import MAX_VERDICTS, Verdict, VerdictIndex, demanded, keyed_print
from .naming import name_spans
from .plan_input import PlanInput

_ALLOW = "allow"


def standing_verdicts(given: PlanInput, key: bytes) -> Mapping[int, Verdict]:
    """Return the verdicts of earlier turns on this turn's messages, by index in the client's list.

    The caller's ``allow`` lifts a policy's verdict, not a verdict of the caller's own.

    Raises:
        BadRequestError: the request has more verdicts than the session may have.
    """
    session, request = given.session, given.request
    found: dict[int, Verdict] = {}
    if session is not None and session.verdicts:
        index = VerdictIndex(session.verdicts)
        client = unedited(request.messages, request.fingerprints)
        # The newest list suffices: an older text that returns is found by its hash.
        last = (session.last,) if session.last is not None else ()
        names = name_spans(given.turn, client, last, session.departed, None).client
        for place, value in enumerate(request.fingerprints):
            verdict = index.find(names[place], keyed_print(value, key))
            said = request.annotations.get(place)
            lifted = said is not None and said.verdict == _ALLOW
            if verdict is not None and not (lifted and verdict.by == "policy"):
                found[place] = verdict
    _check_room(given, found)
    return found


def found_verdicts(
    given: PlanInput,
    prepared: Prepared,
    names: SpanNames | None,
    standing: Mapping[int, Verdict],
    key: bytes,
) -> tuple[Verdict, ...]:
    """Return the verdicts on all messages that the turn has in quarantine.

    Args:
        names: of the turn's messages; None if unknown.
        standing: those of earlier turns.
    """
    found: list[Verdict] = []
    for place, (policy, why) in sorted(prepared.quarantined.items()):
        known, said = standing.get(place), given.request.annotations.get(place)
        own = names.client[place].id if names is not None else f"{given.turn}.{place}"
        is_said = said is not None and said.verdict == QUARANTINE
        found.append(
            Verdict(
                spans=(own,) if known is None else (known.span, own),
                prints=(keyed_print(prepared.client_fingerprints[place], key),),
                policy=policy,
                why=why,
                by="annotation" if is_said else "policy",
                turn=given.turn,
                message=place,
                role=str(prepared.client[place].get("role", "")),
            )
        )
    return tuple(found)


def _check_room(given: PlanInput, standing: Mapping[int, Verdict]) -> None:
    """Refuse verdicts that the session could not remember."""
    new = [
        place
        for place, said in given.request.annotations.items()
        if said.verdict == QUARANTINE and place not in standing
    ]
    known = demanded(given.session.verdicts) if given.session is not None else 0
    if new and known + len(new) > MAX_VERDICTS:
        raise BadRequestError(
            f"A session remembers {MAX_VERDICTS} messages in quarantine. Leave their text out of "
            "the messages instead.",
            param=f"messages[{new[0]}].leyline.verdict",
            code="quarantine_limit",
        )
