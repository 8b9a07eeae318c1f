"""Rules for requests of APIs that the proxy doesn't know. Pure.

An upstream sees the proxy's key as one customer. Everything stored under that key (files, stored
completions, keys, the models themselves) belongs to all callers of the proxy at once, so only the
requests listed here pass.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Literal

from .off import OR_FALSE

PassThrough = Annotated[Literal["off", "stateless", "all"], OR_FALSE]

PREFIX = "/v1/"


@dataclass(frozen=True, slots=True)
class Passage:
    """A kind of request that may pass."""

    method: str
    path: str
    """Path below ``/v1/``, decoded; ``NAME`` is a placeholder for a model's name."""
    reads: bool = True
    """True if a model reads the caller's content, which may then be in a KV cache."""
    form: bool = False
    """True if the body is ``multipart/form-data`` with a file."""
    writes: bool = False
    """True if a model may have written the answer."""


MODEL_PATH = "models/NAME"
STATELESS = (
    Passage("POST", "embeddings"),
    Passage("POST", "pooling"),
    Passage("POST", "classify"),
    Passage("POST", "score"),
    Passage("POST", "rerank"),
    Passage("POST", "decisions"),
    Passage("POST", "moderations"),
    Passage("POST", "tokenize", reads=False),
    Passage("POST", "detokenize", reads=False),
    Passage("POST", "audio/speech"),
    Passage("POST", "audio/transcriptions", form=True, writes=True),
    Passage("POST", "audio/translations", form=True, writes=True),
    Passage("POST", "images/generations"),
    Passage("POST", "images/edits", form=True),
    Passage("GET", MODEL_PATH, reads=False),
)
"""Requests to inference servers that leave no trace for other requests to find: the routes of
SGLang 0.5.23, vLLM and OpenAI."""

OWN_OBJECTS = frozenset(
    {
        "assistants",
        "batches",
        "containers",
        "conversations",
        "evals",
        "files",
        "fine_tuning",
        "responses",
        "skills",
        "threads",
        "uploads",
        "vector_stores",
        "videos",
    }
)
"""First parts of paths to objects of an owner, whom an upstream knows by the key. Open to callers
with their own key."""

_TALKS = frozenset({"chat", "messages"})
"""Stored completions and batches are below these: an owner's objects as well."""

_FAMILIES = frozenset({"chat", "completions", "leyline", "messages", "models", "responses"})
"""First parts of the proxy's own paths."""

_OWN = frozenset({"completions", "messages"})
"""Paths that the proxy accepts only with POST and in lower case."""

_TURNS = _OWN | {"chat/completions", "messages/count_tokens", "responses", "responses/input_tokens"}
"""Paths whose requests are edited, salted and accounted for, which another spelling would evade."""

_READLESS = frozenset({"GET", "HEAD", "OPTIONS", "DELETE"})
"""Methods without content for a model to read."""

_BY_NAME = {(each.method, each.path): each for each in STATELESS}
_MODEL = re.compile(r"models/[\w.:@+-]+(?:/[\w.:@+-]+)*", re.ASCII)

_UNCLEAR = frozenset({"", ".", ".."})
"""Parts of a path that servers read differently: a doubled or a final slash may count or not."""

_ENCODED = frozenset("?#%\\")
"""Characters that a second decoding would change."""


def is_unknown(method: str, path: str) -> bool:
    """Return True for a request that never passes, whatever the settings: its path is the proxy's
    own, or one that two servers may read differently."""
    folded = path.casefold()
    parts = folded.split("/")
    unclear = not path.isprintable() or not _UNCLEAR.isdisjoint(parts)
    unclear = unclear or not _ENCODED.isdisjoint(path)
    own = folded in _OWN or (folded in _TURNS and method not in _READLESS)
    return unclear or own or parts[0] == "leyline"


def passage_of(mode: PassThrough, method: str, path: str, *, own_key: bool) -> Passage | None:
    """Return the kind of a request that may pass; None for others.

    Args:
        path: below ``/v1/``, decoded.
        own_key: True if the caller's own credentials replace the proxy's upstream.
    """
    if mode == "off" or is_unknown(method, path):
        return None
    listed = _BY_NAME.get((method, MODEL_PATH if _MODEL.fullmatch(path) else path))
    if listed is not None:
        return listed
    if mode == "all" or (own_key and _is_owned(path)):
        reads = method not in _READLESS
        return Passage(method, path, reads=reads, form=True, writes=reads)
    return None


def passing_paths(mode: PassThrough) -> list[tuple[str, list[str]]]:
    """Return the paths that pass for everybody, with their methods."""
    listed = STATELESS if mode != "off" else ()
    return [(PREFIX + each.path.replace("NAME", "{name:path}"), [each.method]) for each in listed]


def takes_form(mode: PassThrough, method: str, path: str) -> bool:
    """Return True if a request to a path, with ``/v1/``, may have a form instead of JSON."""
    below = path.removeprefix(PREFIX)
    if below == path or below.partition("/")[0].casefold() in _FAMILIES:
        return False
    # This isn't asked for callers with their own key, who are known by it.
    found = passage_of(mode, method, below, own_key=False)
    return found is not None and found.form


def _is_owned(path: str) -> bool:
    first, _, rest = path.casefold().partition("/")
    return first in OWN_OBJECTS or (first in _TALKS and bool(rest))
