"""The test kit accepts what the registry accepts, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, cast

import pytest

from leyline_policies import Message, Policy, PolicyError, Registry, function_policy, load_pipeline
from leyline_policies.errors import PluginError, SpecError
from leyline_policies.registry import Candidate, built_in_candidates
from leyline_policies.spec import build_policy
from leyline_policies.testing import check_policy, requests_of

pytestmark = pytest.mark.filterwarnings("ignore::leyline_policies.testing.NothingEditedWarning")

SESSIONS = [requests_of([{"role": "user", "content": "x" * 99}])]


class Plain:
    """A policy with one setting."""

    name: Any = "it"
    mode: Any = "amortize"

    def __init__(self, limit: int = 3) -> None:
        if limit < 0:
            raise ValueError(f"limit={limit} is negative")
        self.limit = limit

    def transform(self, messages: list[Message], turn_idx: int) -> list[Message]:
        """Edit nothing."""
        return messages


class NamedLate(Plain):
    """A policy that gets its name when it is made."""

    name: Any = None

    def __init__(self) -> None:
        self.name = "it"


@dataclass(frozen=True)
class Frozen:
    """A policy whose settings are fields."""

    name: ClassVar[str] = "it"
    mode: ClassVar[str] = "forget"
    limit: int = 3

    def transform(self, messages: list[Message], turn_idx: int) -> list[Message]:
        """Edit nothing."""
        return messages


@dataclass(frozen=True)
class Around(Plain):
    """A policy with others inside."""

    policies: tuple[Policy, ...]


class Nameless(Plain):
    """A policy without a name."""

    name = None


class OtherName(Plain):
    """A policy with another name than the registered one."""

    name = "other"


class WrongMode(Plain):
    """A policy with a mode that doesn't exist."""

    mode = "sometimes"


class NoTransform:
    """A class without the method."""

    name = "it"
    mode = "amortize"


class Reserved(Plain):
    """A policy with a setting that every policy takes."""

    def __init__(self, every: int = 2) -> None:
        super().__init__(every)


class Unreadable(Plain):
    """A policy whose settings can't be read."""

    def __init__(self, limit: NoSuchType = 1) -> None:  # type: ignore[name-defined]  # noqa: F821
        super().__init__(limit)


class Failing(Plain):
    """A policy that can't be made."""

    def __init__(self) -> None:
        raise KeyError("x")


def function(messages: list[Message], turn_idx: int, *, limit: int = 3) -> list[Message]:
    """Edit nothing."""
    return messages


def with_context(messages: list[Message], turn_idx: int, context: object) -> list[Message]:
    """Edit nothing, and look at the context."""
    return messages


def needing(messages: list[Message], turn_idx: int, *, limit: int) -> list[Message]:
    """Edit nothing, with a setting that must be given."""
    return messages


def reserved(messages: list[Message], turn_idx: int, *, when: str = "") -> list[Message]:
    """Edit nothing, with a setting that every policy takes."""
    return messages


def too_short(messages: list[Message]) -> list[Message]:
    """Edit nothing, and miss the turn."""
    return messages


GOOD: dict[str, tuple[Any, dict[str, object]]] = {
    "class": (Plain, {}),
    "class with settings": (Plain, {"limit": 4}),
    "class named late": (NamedLate, {}),
    "dataclass": (Frozen, {"limit": 1}),
    "function": (function, {}),
    "function with settings": (function, {"limit": 1}),
    "function with common settings": (function, {"limit": 1, "every": 2, "protect_roles": "user"}),
    "function with a context": (with_context, {}),
    "function that needs a setting": (needing, {"limit": 1}),
    "decorated function": (function_policy(name="it", mode="forget")(function), {"limit": 1}),
    "policies inside": (Around, {"policies": ["truncate_older_than:n=1", "keep_all"]}),
}


async def waiting(messages: list[Any], turn_idx: int) -> list[Any]:
    """A function that would need an event loop."""
    return messages


class Waiting(Plain):
    """A policy that would need an event loop."""

    async def transform(self, messages: Any, turn_idx: int) -> Any:
        """Keep all messages, some time later."""
        return messages


BAD: dict[str, tuple[Any, dict[str, object]]] = {
    "nameless": (Nameless, {}),
    "other name": (OtherName, {}),
    "wrong mode": (WrongMode, {}),
    "no transform": (NoTransform, {}),
    "reserved name": (Reserved, {}),
    "unreadable": (Unreadable, {}),
    "failing": (Failing, {}),
    "refused setting": (Plain, {"limit": -1}),
    "unknown setting": (Plain, {"limits": 1}),
    "wrong type": (Plain, {"limit": "x"}),
    "trigger that can't be read": (function, {"when": "tokens >"}),
    "number out of range": (function, {"protect_last": -1}),
    "no setting that is needed": (needing, {}),
    "reserved name of a function": (reserved, {}),
    "function without the turn": (too_short, {}),
    "async function": (waiting, {}),
    "async transform": (Waiting, {}),
    "decorated function without the turn": (function_policy(name="it")(too_short), {}),
    "decorated function of another name": (function_policy(name="other")(function), {}),
    "forgetting that waits": (Frozen, {"every": 2}),
    "unknown policy inside": (Around, {"policies": ["no_such_policy"]}),
}


def _told(run: Callable[[], object]) -> str:
    """The error's type and text, without the origin; nothing for none."""
    try:
        run()
    except PolicyError as error:
        return f"{type(error).__name__}: {error}".replace("(not installed)", "(installed)")
    return ""


def _registry_on(offered: object, settings: dict[str, object]) -> str:
    known = Registry(built_in_candidates()).having(Candidate("it", "installed", lambda: offered))
    return _told(lambda: build_policy("it", settings.items(), known))


def _kit_on(offered: Any, settings: dict[str, object]) -> str:
    return _told(lambda: check_policy(offered, SESSIONS, settings=settings, name="it"))


@pytest.mark.parametrize("case", GOOD)
def test_both_accept(case: str) -> None:
    """A policy that can be chosen by name can be checked."""
    assert (_registry_on(*GOOD[case]), _kit_on(*GOOD[case])) == ("", "")


@pytest.mark.parametrize("case", BAD)
def test_both_refuse_with_the_same_words(case: str) -> None:
    """The kit refuses what the proxy would refuse at its start."""
    told = _registry_on(*BAD[case])
    assert told
    assert _kit_on(*BAD[case]) == told


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (Plain(4), ""),
        (NamedLate(), ""),
        (Frozen(), ""),
        (load_pipeline("truncate_older_than:every=3,recallable=true,on_fault=skip")[0], ""),
        (function_policy(name="it")(needing).with_settings(limit=1), ""),
        (Nameless(), "its attribute name is None"),
        (WrongMode(), "its attribute mode is 'sometimes'"),
        (NoTransform(), "it is a NoTransform; a policy is a class, a function"),
        (Reserved(), "every has a name that every policy takes"),
        (function_policy(name="it")(reserved).with_settings(when="x"), "when has a name that"),
        (partial(function, limit=1), "it is a partial; a policy is a class, a function"),
        (42, "it is a int; a policy is"),
    ],
    ids=lambda each: type(each).__name__ if not isinstance(each, str) else each[:20],
)
def test_a_policy_that_was_made_is_held_to_the_same(made: Any, words: str) -> None:
    """A policy as such is accepted if its class or function is."""
    told = _told(lambda: check_policy(made, SESSIONS))
    assert (told == "") if not words else (words in told)


def test_a_policy_that_was_made_takes_no_settings() -> None:
    """Settings that would have no effect are refused."""
    with pytest.raises(SpecError, match="it has its settings already"):
        check_policy(Plain(4), SESSIONS, settings={"limit": 5})


def test_a_name_of_its_own_is_enough() -> None:
    """Without a name to register it under, a class or function has its own."""
    assert check_policy(Plain, SESSIONS).policy == "it"
    assert check_policy(function, SESSIONS).policy == "function"
    assert check_policy(function, SESSIONS, name="renamed").policy == "renamed"
    with pytest.raises(PluginError, match="must be the registered name"):
        check_policy(cast("type[Policy]", NamedLate), SESSIONS)
