"""Map content of messages and of tool results to content of chat messages."""

from __future__ import annotations

from collections.abc import Mapping, MutableSet
from typing import Any

from leyline_policies.verbs import ANNOTATION

from ..fields import FieldError, UnreadableError, string
from ..foreign import joined_texts, shown_text

Item = Mapping[str, Any]
Foreign = MutableSet[str] | None

_TEXTS = ("input_text", "output_text", "text")
_DETAILS = ("auto", "low", "high")


def shown_content(
    field: str, content: object, foreign: Foreign = None
) -> str | list[dict[str, Any]]:
    """Return the content of a user's or a system message; a single text is a string.

    Args:
        foreign: takes the types of parts that only another provider can read, which are shown as
            they are in a history. None refuses them.

    Raises:
        FieldError: a field is wrong; the error names it and what it should be.
    """
    if isinstance(content, str):
        return content
    parts = _parts(field, content, foreign)
    if not parts:
        return ""
    only = parts[0] if len(parts) == 1 else {}
    return str(only["text"]) if only.get("type") == "text" else parts


def joined_content(
    field: str, output: object, foreign: Foreign = None
) -> str | list[dict[str, Any]]:
    """Return the content of a tool's result or a system message, with texts joined into one.

    Templates differ in how they show parts.

    Args:
        foreign: as for :func:`shown_content`.

    Raises:
        FieldError: a field is wrong; the error names it and what it should be.
    """
    if output is None or isinstance(output, str):
        return output or ""
    parts = _parts(field, output, foreign)
    texts = [part["text"] for part in parts if part["type"] == "text"]
    return "\n".join(texts) if len(texts) == len(parts) else parts


def said_text(field: str, content: object, foreign: MutableSet[str]) -> str:
    """Return the text of an assistant's message, refusals included, without a separator between
    its parts, as the engine gave it.

    Args:
        foreign: takes the types of parts that only another provider can read.

    Raises:
        FieldError: a field is wrong; the error names it and what it should be.
    """
    if isinstance(content, str):
        return content
    if content is None:
        return ""
    texts = []
    for number, raw in enumerate(_list(field, content)):
        place = f"{field}[{number}]"
        part = typed(place, raw)
        if part["type"] == "refusal":
            texts.append((string(place, part, "refusal"), False))
        elif part["type"] in _TEXTS:
            texts.append((string(place, part, "text"), False))
        else:
            foreign.add(part["type"])
            texts.append((shown_text(part), True))
    return joined_texts(texts)


def typed(place: str, raw: object) -> Item:
    """Return a part: an object with a type.

    Raises:
        FieldError: it is none, or has an annotation, which only an item may have.
    """
    if isinstance(raw, dict) and isinstance(raw.get("type"), str):
        if ANNOTATION in raw:
            field = f"{place}.{ANNOTATION}"
            raise FieldError(field, f"{field}: only an item as a whole may have this member.")
        return raw
    raise FieldError(place, f"{place} must be an object with a type.")


def _unknown(place: str, item: Item, known: str) -> UnreadableError:
    return UnreadableError(
        f"{place}.type", f"{place}.type: {str(item['type'])[:80]!r} isn't taken here, only {known}."
    )


def _parts(field: str, content: object, foreign: Foreign) -> list[dict[str, Any]]:
    found = []
    for number, raw in enumerate(_list(field, content)):
        place = f"{field}[{number}]"
        part = typed(place, raw)
        try:
            found.append(_part(place, part))
        except UnreadableError:
            if foreign is None:
                raise
            foreign.add(part["type"])
            if text := shown_text(part):
                found.append({"type": "text", "text": text})
    return found


def _part(place: str, part: Item) -> dict[str, Any]:
    match part["type"]:
        case "input_text" | "output_text" | "text":
            return {"type": "text", "text": string(place, part, "text")}
        case "input_image":
            return {"type": "image_url", "image_url": _image(place, part)}
        case "input_file":
            return {"type": "file", "file": _file(place, part)}
        case "input_audio":
            audio = part.get("input_audio")
            if not isinstance(audio, dict):
                raise FieldError(f"{place}.input_audio", f"{place}.input_audio must be an object.")
            return {"type": "input_audio", "input_audio": audio}
    raise _unknown(place, part, "input_text, input_image, input_file or input_audio")


def _image(place: str, part: Item) -> dict[str, Any]:
    url = part.get("image_url")
    if not isinstance(url, str) or not url:
        raise UnreadableError(
            f"{place}.image_url",
            f"{place}.image_url must be a URL, or the image as a data URL; files aren't kept here.",
        )
    detail = part.get("detail")
    return {"url": url, **({"detail": detail} if detail in _DETAILS else {})}


def _file(place: str, part: Item) -> dict[str, Any]:
    data = part.get("file_data")
    if not isinstance(data, str) or not data:
        raise UnreadableError(
            f"{place}.file_data",
            f"{place}.file_data must be the file in base64; files aren't kept or fetched here.",
        )
    name = part.get("filename")
    return {"file_data": data, **({"filename": name} if isinstance(name, str) else {})}


def _list(field: str, content: object) -> list[Any]:
    if isinstance(content, list):
        return content
    raise FieldError(field, f"{field} must be a string or a list of content parts.")
