"""Which requests of APIs that the proxy doesn't know may go upstream. Pure.

An upstream takes the proxy's key for its one customer. Whatever it keeps under that key (files,
stored completions, keys, the models themselves) belongs to all callers of the proxy at once, so
what passes is listed here, and nothing else does.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

PassThrough = Literal["off", "stateless", "all"]

PREFIX = "/v1/"


@dataclass(frozen=True, slots=True)
class Passage:
    """A kind of request that may pass."""

    method: str
    path: str
    """Below ``/v1/``, decoded; ``NAME`` stands for a model's."""
    reads: bool = True
    """A model reads what the caller sent, so it may come to be in a KV cache."""
    form: bool = False
    """The body is ``multipart/form-data``, with a file in it."""


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
    Passage("POST", "audio/transcriptions", form=True),
    Passage("POST", "audio/translations", form=True),
    Passage("POST", "images/generations"),
    Passage("POST", "images/edits", form=True),
    Passage("GET", "models/NAME", reads=False),
)
"""What inference servers offer that leaves nothing behind which another request could find: the
routes of SGLang 0.5.23, vLLM and OpenAI."""

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
"""First parts of paths to objects that are their owner's, whom an upstream knows by the key. Open
to callers who bring a key of their own."""

_TALKS = frozenset({"chat", "messages"})
"""Below these lie completions that were stored, and batches: an owner's objects as well."""

_FAMILIES = frozenset({"chat", "completions", "leyline", "messages", "models", "responses"})
"""First parts of the proxy's own paths."""

_OWN = frozenset({"completions", "messages"})
"""Paths of the proxy, which it takes with POST alone and in lower case."""

_TURNS = _OWN | {"chat/completions", "messages/count_tokens", "responses", "responses/input_tokens"}
"""What is sent here is edited, salted and accounted for; in another spelling it would be none of
that."""

_READLESS = frozenset({"GET", "HEAD", "OPTIONS", "DELETE"})
"""Methods that carry nothing for a model to read."""

_BY_NAME = {(each.method, each.path): each for each in STATELESS}
_MODEL = re.compile(r"models/[\w.:@+-]+(?:/[\w.:@+-]+)*", re.ASCII)
_MODEL_PATH = "models/NAME"

_UNCLEAR = frozenset({"", ".", ".."})
"""Parts of a path that servers read differently: a doubled or a final slash may be one or none."""

_ENCODED = frozenset("?#%\\")
"""Characters that a second decoding would make something else of."""


def is_unknown(method: str, path: str) -> bool:
    """True for a request that never passes, whatever the settings say: its path is the proxy's
    own, or one that two servers may read in two ways."""
    folded = path.casefold()
    parts = folded.split("/")
    unclear = not path.isprintable() or not _UNCLEAR.isdisjoint(parts)
    unclear = unclear or not _ENCODED.isdisjoint(path)
    own = folded in _OWN or (folded in _TURNS and method not in _READLESS)
    return unclear or own or parts[0] == "leyline"


def passage_of(mode: PassThrough, method: str, path: str, *, own_key: bool) -> Passage | None:
    """How a request may pass; None where it may not.

    Args:
        path: below ``/v1/``, decoded.
        own_key: the caller's own credentials go upstream in place of the proxy's.
    """
    if mode == "off" or is_unknown(method, path):
        return None
    listed = _BY_NAME.get((method, _MODEL_PATH if _MODEL.fullmatch(path) else path))
    if listed is not None:
        return listed
    if mode == "all" or (own_key and _is_owned(path)):
        return Passage(method, path, reads=method not in _READLESS, form=True)
    return None


def takes_form(mode: PassThrough, method: str, path: str) -> bool:
    """Whether a request to a path, with ``/v1/``, may bring a form in place of JSON."""
    below = path.removeprefix(PREFIX)
    if below == path or below.partition("/")[0].casefold() in _FAMILIES:
        return False
    # Whoever has a key of their own is known by it, and isn't asked for this.
    found = passage_of(mode, method, below, own_key=False)
    return found is not None and found.form


def _is_owned(path: str) -> bool:
    first, _, rest = path.casefold().partition("/")
    return first in OWN_OBJECTS or (first in _TALKS and bool(rest))
