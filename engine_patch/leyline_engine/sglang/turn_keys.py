"""The keys of one request in SGLang's tree: each map's are made once, and kept while it lasts."""

from __future__ import annotations

from array import array
from collections import OrderedDict

from leyline_engine.contract import LineageRun
from leyline_engine.records.lineage import fold_keys

_MAPS = 2
"""Maps whose keys are kept: that of the request, and one under which it may be cached."""

Map = tuple[LineageRun, ...]


class TurnKeys:
    """Keys of a request's tokens, by lineage map.

    Only those of its prompt are kept: what a request generates may change if it is retracted.

    Args:
        scope: its tenant.
    """

    def __init__(self, scope: str) -> None:
        self._scope = scope
        self._prompt = array("q")
        self._made: OrderedDict[Map, array[int]] = OrderedDict()

    def of(self, tokens: array[int], lineage: Map, prompt: array[int]) -> array[int]:
        """Return the keys of tokens under a map. They may be shared: nobody may change them.

        Args:
            tokens: the first tokens of the request, its prompt and what it generated.
            prompt: its prompt; another one than before makes all keys anew.
        """
        if not lineage:
            return tokens
        known = self._of_prompt(lineage, prompt)
        if len(tokens) <= len(prompt):
            return known if len(tokens) == len(prompt) else known[: len(tokens)]
        return known + fold_keys(tokens[len(prompt) :], lineage, self._scope, start=len(prompt))

    def _of_prompt(self, lineage: Map, prompt: array[int]) -> array[int]:
        if prompt is not self._prompt:
            self._made.clear()
            self._prompt = prompt
        if lineage not in self._made:
            self._made[lineage] = fold_keys(prompt, lineage, self._scope)
            if len(self._made) > _MAPS:
                self._made.popitem(last=False)
        self._made.move_to_end(lineage)
        return self._made[lineage]
