"""The search for a turn's cached prefix, under the lineage maps under which it may be cached."""

from __future__ import annotations

from array import array

from sglang.srt.mem_cache.base_prefix_cache import MatchResult

from leyline_engine.admit.rules import CheckedRequest, Rules
from leyline_engine.records.lineage import runs_before
from leyline_engine.sglang.radix import LeylineRadixCache
from leyline_engine.sglang.turn import Phase, Turn


class Matcher:
    """Finds cached prefixes of turns in one tree.

    Args:
        cache: the tree.
        rules: names the maps of a request, and how far each may be used.
    """

    def __init__(self, cache: LeylineRadixCache, rules: Rules) -> None:
        self._cache = cache
        self._rules = rules

    def match(self, turn: Turn, tokens: array[int], limit: int | None) -> MatchResult:
        """Return a turn's longest cached prefix, under the map it runs under or may run under."""
        if turn.phase is Phase.NEW:
            return self.best(turn, _unchecked(turn), tokens, limit)
        return self._cache.find(turn.keys(tokens), turn.space, limit)

    def best(
        self, turn: Turn, checked: CheckedRequest, tokens: array[int], limit: int | None
    ) -> MatchResult:
        """Match under each map under which the prompt may be cached; exact KV is preferred.

        The turn's lineage becomes that of what was found.
        """
        limit = len(tokens) if limit is None else limit
        best = self._cache.find(tokens, turn.space, limit)
        turn.lineage = ()
        for lineage in self._rules.maps(checked):
            keys = turn.keys_under(lineage, tokens)
            clean = min(limit, self._rules.clean_length(checked, lineage))
            found = self._cache.find(keys, turn.space, clean)
            if reach(found) > reach(best):
                best, turn.lineage = found, runs_before(lineage, reach(found))
        return best


def reach(found: MatchResult) -> int:
    """Return the number of cached tokens, with those that only the host's memory has."""
    return int(found.device_prefix_len + found.host_hit_length)


def _unchecked(turn: Turn) -> CheckedRequest:
    """Return the request while it waits: its sources aren't checked before it is admitted."""
    prompt = turn.req.origin_input_ids
    return CheckedRequest(prompt, turn.payload, None, turn.refusal, (), None)
