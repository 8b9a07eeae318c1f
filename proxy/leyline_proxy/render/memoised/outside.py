"""Detection of message contents that enter a prompt outside the remembered iterations.

It uses the syntax tree, and follows the variables that come from ``messages``. In doubt the answer
is yes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from jinja2 import nodes

from .reads import WITHOUT_CONTENT, Reads, find, member_of

MESSAGES = "messages"


@dataclass(frozen=True, slots=True)
class Outside:
    """Places that contents may reach."""

    contents: bool
    """True if one may be printed, or decide the output, outside the remembered loops."""
    of_messages: frozenset[nodes.For]
    """Remembered loops that may run over messages."""


def look_outside(tree: nodes.Template, remembered: Mapping[nodes.For, Reads]) -> Outside:
    """Follow the messages through everything but the bodies of ``remembered`` loops."""
    statements = list(_outside(tree.body, remembered))
    derived = _derived(statements)
    over_messages = frozenset(loop for loop in remembered if _mentions(loop.iter, derived))
    loops_read = {
        name for reads in remembered.values() for name in (*reads.names, *reads.namespaces)
    }
    # A namespace's member may hold anything, whatever its name.
    plain = derived - {ref.name for ref in find(tree, nodes.NSRef)}
    leaks = any(_leaks(node, derived, plain) for node in statements)
    return Outside(bool(loops_read & derived) or leaks, over_messages)


def _outside(
    nodes_: Iterable[nodes.Node], remembered: Collection[nodes.For]
) -> Iterable[nodes.Node]:
    """Yield statements that contain expressions, without the bodies of remembered loops."""
    for node in nodes_:
        if node in remembered:
            continue
        yield node
        if isinstance(node, nodes.Stmt):
            yield from _outside(_inner_statements(node), remembered)


def _inner_statements(node: nodes.Stmt) -> list[nodes.Node]:
    return [child for child in node.iter_child_nodes() if isinstance(child, nodes.Stmt)]


def _derived(statements: Iterable[nodes.Node]) -> set[str]:
    """Return variables whose value may come from the messages."""
    derived = {MESSAGES}
    flows = [flow for node in statements for flow in _flows(node)]
    for _ in range(len(flows) + 1):
        for targets, value in flows:
            if _mentions(value, derived):
                derived |= targets
    return derived


def _mentions(node: nodes.Node, names: Collection[str]) -> bool:
    return any(name.name in names for name in find(node, nodes.Name))


def _flows(node: nodes.Node) -> Iterable[tuple[set[str], nodes.Node]]:
    match node:
        case nodes.Assign(target=target, node=value) | nodes.For(target=target, iter=value):
            yield _stored(target), value
        case nodes.AssignBlock(target=target):
            yield _stored(target), node


def _stored(target: nodes.Node) -> set[str]:
    names = {name.name for name in find(target, nodes.Name)}
    return names | {ref.name for ref in find(target, nodes.NSRef)}


def _leaks(node: nodes.Node, derived: set[str], plain: set[str]) -> bool:
    """Return True if a statement's own expressions use a content."""
    if isinstance(node, nodes.Assign):
        return False  # only the use of its target matters
    if isinstance(node, nodes.For):
        return node.test is not None and _uses(node.test, derived, plain, test=True)
    return any(
        _uses(child, derived, plain, test=isinstance(node, nodes.If))
        for child in node.iter_child_nodes()
        if not isinstance(child, nodes.Stmt)
    )


def _uses(node: nodes.Node, derived: set[str], plain: set[str], *, test: bool = False) -> bool:
    match node:
        case nodes.Name(name=name):
            return name in derived and not test
        case nodes.Filter(node=nodes.Name(), name="length" | "count"):
            return False
        case nodes.And() | nodes.Or() | nodes.Not():
            return any(_uses(child, derived, plain, test=test) for child in node.iter_child_nodes())
    member = member_of(node)
    if member in WITHOUT_CONTENT:
        owner = node.node  # type: ignore[attr-defined]
        element = isinstance(owner, nodes.Getitem) and isinstance(owner.arg, nodes.Const)
        owner = owner.node if element else owner
        if isinstance(owner, nodes.Name) and (owner.name in plain or owner.name not in derived):
            return False
    return any(_uses(child, derived, plain) for child in node.iter_child_nodes())
