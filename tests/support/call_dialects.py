"""Spellings of tool calls in the streams of engines and gateways, as a strategy."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st
from support.responses_talks import cuts, piece

Delta = dict[str, Any]
_KEYS = st.sampled_from(["path", "a", "", 'q"}', "\\"])
_VALUES = st.recursive(
    st.text(alphabet='ab \n{}[]"\\é€😀', max_size=6) | st.integers() | st.none() | st.booleans(),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(_KEYS, inner, max_size=2),
    max_leaves=4,
)
INPUTS = st.dictionaries(_KEYS, _VALUES, max_size=2)
NAMES = st.sampled_from(["ls", "read_file", "ls_all"])


@dataclass(frozen=True)
class Dialect:
    """One spelling; see :func:`_parts`."""

    index: str
    """``own``, ``text`` (as a string), ``zero`` for all, or ``none``."""
    id: str
    """``first`` part only, ``each``, ``late``, ``fresh`` for each part, ``same`` for all, or
    ``none``."""
    name: str = "first"
    """``first`` part only, ``each``, ``split``, ``late``, or ``empty`` on later parts."""
    whole: bool = False
    """True if a call comes in one part."""
    interleaves: bool = False


DIALECTS = (
    *(
        Dialect(index, identifier, name, interleaves=name != "split" and identifier != "late")
        for index in ("own", "text")
        for identifier in ("first", "each", "none", "late")
        for name in ("first", "each", "split", "late", "empty")
        if not (identifier == "late" and name == "late")
    ),
    Dialect("own", "fresh", interleaves=True),
    Dialect("own", "fresh", "empty", interleaves=True),
    Dialect("own", "same", interleaves=True),
    Dialect("none", "each", interleaves=True),
    Dialect("none", "each", "each", interleaves=True),
    Dialect("none", "each", "empty", interleaves=True),
    Dialect("none", "first"),
    Dialect("none", "none"),
    Dialect("zero", "first"),
    Dialect("zero", "each", "each", interleaves=True),
    Dialect("zero", "each", "empty", interleaves=True),
    *(
        Dialect(index, identifier, whole=True)
        for index in ("own", "zero", "none")
        for identifier in ("first", "none")
    ),
)
"""Spellings in which calls can be told apart."""

INDICES = ("own", "text", "zero", "none")
"""Their ways to number calls."""


@st.composite
def spelled(draw: st.DrawFn, index: str, *, names: Any = NAMES) -> tuple[Delta, list[Delta]]:
    """An assistant's message, whole and in the chunks of a stream."""
    dialect = draw(st.sampled_from([each for each in DIALECTS if each.index == index]))
    made = draw(st.lists(st.tuples(names, INPUTS), min_size=1, max_size=3))
    calls, queues = [], []
    for number, (name, given) in enumerate(made):
        arguments: Any = json.dumps(given, ensure_ascii=draw(st.booleans()))
        shape = draw(st.sampled_from(["text", "text", "object", "null"]))
        if shape == "null" and not given and dialect.index != "zero":
            arguments = draw(st.sampled_from([None, "", "null"])) if dialect.whole else ""
        parts = draw(_parts(dialect, number, name, arguments))
        if shape == "object" and dialect.whole:
            parts[0]["function"]["arguments"] = given
            arguments = given
        queues.append(parts)
        function = {"name": name, "arguments": arguments}
        call = {"type": "function", "function": function}
        identifier = "c" if dialect.id == "same" else f"c{number}"
        calls.append(call if dialect.id == "none" else {**call, "id": identifier})
    parts = draw(_merged(queues)) if dialect.interleaves else [p for queue in queues for p in queue]
    texts = draw(st.lists(st.text(alphabet="ab \n", min_size=1, max_size=4), max_size=3))
    thinking = draw(st.text(alphabet="ab ", max_size=4))
    chunks = [piece({"role": "assistant", "content": ""})]
    named = draw(st.sampled_from(["reasoning_content", "reasoning"]))
    if thinking:
        chunks.append(piece({named: thinking, "role": "assistant"}))
    for text in texts:
        listed = [{"type": "text", "text": text}]
        chunks.append(piece({"content": draw(st.sampled_from([text, listed]))}))
    while parts:
        count = draw(st.integers(1, 3))
        chunks.append(piece({"tool_calls": parts[:count], "content": None}))
        del parts[:count]
    chunks += [piece({}), {"choices": []}]
    message = {"role": "assistant", "content": "".join(texts), "tool_calls": calls}
    return {**message, named: thinking}, draw(_ended(chunks))


@st.composite
def _ended(draw: st.DrawFn, chunks: list[Delta]) -> list[Delta]:
    """End a stream: the reason comes with the last part or after it, and empty before; counts come
    with chunks or after them."""
    usage = {"prompt_tokens": 9, "completion_tokens": 3, "total_tokens": 12}
    if draw(st.booleans()):
        for each in chunks:
            each["usage"] = usage
            if each["choices"]:
                each["choices"][0]["finish_reason"] = ""
                each["choices"][0]["index"] = None
    if draw(st.booleans()):
        last = next(each for each in reversed(chunks[:-2]) if each["choices"])
        last["choices"][0]["finish_reason"] = "tool_calls"
    else:
        chunks.append(piece({}, "tool_calls"))
    return [*chunks, {"choices": [], "usage": usage}]


@st.composite
def _parts(
    draw: st.DrawFn, dialect: Dialect, number: int, name: str, arguments: Any
) -> list[Delta]:
    """The parts of one call."""
    if dialect.whole:
        pieces: list[Any] = [arguments]
    else:
        cut = draw(cuts(arguments))
        # What comes after the first arguments would be too late: the call has begun.
        begins = dialect.name == "split" or dialect.id == "late" or draw(st.booleans())
        pieces = ["", *cut] if begins else cut or [""]
    parts: list[Delta] = []
    for at, text in enumerate(pieces):
        function: Delta = {"arguments": text} if text is not None else {}
        if dialect.name == "each" or (at == 0 and dialect.name in ("first", "empty")):
            function["name"] = name
        elif dialect.name == "empty":
            function["name"] = ""
        parts.append({"function": function})
    if dialect.name == "split":
        middle = draw(st.integers(1, len(name) - 1))
        parts[0]["function"]["name"] = name[:middle]
        parts.insert(1, {"function": {"name": name[middle:]}})
    if dialect.name == "late":
        parts.append({"function": {"name": name}})
    if dialect.id == "late":
        parts.insert(1, {"function": {"arguments": ""}})
    return [{**part, **_marks(dialect, number, at)} for at, part in enumerate(parts)]


def _marks(dialect: Dialect, number: int, at: int) -> Delta:
    """Index and id of a part."""
    index = {"own": number, "text": str(number), "zero": 0}.get(dialect.index)
    first = at == (1 if dialect.id == "late" else 0)
    own = dialect.id == "each" or (first and dialect.id in ("first", "late", "fresh"))
    identifier = f"c{number}" if own else {"fresh": f"c{number}-{at}", "same": "c"}.get(dialect.id)
    marks = {"index": index, "id": identifier}
    return {name: value for name, value in marks.items() if value is not None}


@st.composite
def _merged(draw: st.DrawFn, queues: list[list[Delta]]) -> list[Delta]:
    """The parts of several calls in turn; calls begin in their order."""
    merged, left, begun = [], [list(queue) for queue in queues], 0
    while any(left):
        ready = [at for at in range(min(begun + 1, len(left))) if left[at]]
        at = draw(st.sampled_from(ready))
        begun = max(begun, at + 1)
        merged.append(left[at].pop(0))
    return merged
