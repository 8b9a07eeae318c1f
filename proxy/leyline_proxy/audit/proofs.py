"""Proofs of forgets: their verdicts, signatures and records. Pure; counts and names only."""

from __future__ import annotations

import hmac
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import msgspec

from leyline_engine.contract import PLACES, RECORDS, Proof, ProofPlace

from .chain import AuditKey

Verdict = Literal["clean", "survivors", "not_proven"]

NO_SUPPORT = "the engine makes no proofs"


def verdict_of(parts: Iterable[Verdict]) -> Verdict:
    """Return the verdict over several parts: survivors anywhere outweigh all else."""
    found = set(parts)
    if "survivors" in found:
        return "survivors"
    return "clean" if found == {"clean"} else "not_proven"


def engine_document(
    upstream: str, run: str, proof: Proof | None, reason: str = ""
) -> dict[str, Any]:
    """Return an engine's part of a proof.

    Args:
        proof: the last known one; None if the engine gave none.
        reason: the reason for that.
    """
    found: dict[str, Any] = {"upstream": upstream, "engine": run}
    if proof is None:
        return {**found, "verdict": "not_proven", "reason": reason or NO_SUPPORT}
    complete = proof.complete and not _missing(proof)
    verdict = _verdict(proof.survivors, complete=complete)
    return {
        **found,
        "verdict": verdict,
        "reason": _reason(proof) if verdict == "not_proven" else "",
        "pending": proof.pending,
        "doomed": proof.doomed,
        "digested": proof.digested,
        "places": [msgspec.to_builtins(place) for place in proof.places],
    }


def places_verdict(places: Sequence[ProofPlace]) -> Verdict:
    """Return the verdict over the proxy's own places."""
    complete = not any(place.unscanned for place in places)
    return _verdict(sum(place.survivors for place in places), complete=complete)


def _verdict(survivors: int, *, complete: bool) -> Verdict:
    if survivors:
        return "survivors"
    return "clean" if complete else "not_proven"


def _reason(proof: Proof) -> str:
    if proof.unscanned:
        return proof.unscanned
    if proof.pending:
        return "running requests still hold some of it"
    if proof.digested < proof.doomed:
        return f"only {proof.digested} of {proof.doomed} rows could be digested"
    if proof.doubtful:
        return f"too many rows of others are equal in part: {proof.chance}"
    reasons = [f"{place.place}: {place.unscanned}" for place in proof.places if place.unscanned]
    if not proof.places:
        reasons.append("the engine looked nowhere")
    elif missing := _missing(proof):
        reasons.append(f"the engine didn't look at {', '.join(sorted(missing))}")
    return "; ".join(reasons)


def _missing(proof: Proof) -> set[str]:
    """Return the places of an engine that a proof lacks."""
    return {*PLACES, RECORDS} - {place.place for place in proof.places}


def signed(proof: Mapping[str, Any], key: AuditKey | None) -> dict[str, Any]:
    """Return a proof with the key's name and an HMAC-SHA-256 over its other members.

    They are signed as JSON without spaces, with sorted keys.
    """
    if key is None:
        return {**proof, "key": None, "signature": None}
    named = {**proof, "key": key.id}
    return {**named, "signature": _signature(named, key)}


def is_signed(proof: Mapping[str, Any], key: AuditKey) -> bool:
    """Return True if a proof's signature is the key's."""
    bare = {name: value for name, value in proof.items() if name != "signature"}
    given = proof.get("signature")
    wanted = _signature(bare, key)
    return isinstance(given, str) and hmac.compare_digest(given.encode(), wanted.encode())


def _signature(proof: Mapping[str, Any], key: AuditKey) -> str:
    return hmac.digest(key.proofs, msgspec.json.encode(proof, order="sorted"), "sha256").hex()
