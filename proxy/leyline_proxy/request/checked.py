"""Bodies of Leyline's own routes, checked against their types."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from ..errors import BadRequestError
from ..model.fields import field_error

B = TypeVar("B", bound=msgspec.Struct)


def checked_body(body: Mapping[str, Any], kind: type[B]) -> B:
    """Return a body as a value of its type.

    Raises:
        BadRequestError: names the field.
    """
    try:
        return msgspec.convert(body, kind)
    except msgspec.ValidationError as error:
        found = field_error("", str(error), kind.__struct_fields__, body)
        param = found.param.removeprefix(".")
        text = str(found).removeprefix(".")
        raise BadRequestError(text if param else f"The body{text}", param=param or None) from error
