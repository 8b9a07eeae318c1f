"""Changes to a chat template's loops that make the text of an iteration reusable.

::

    {% for message in messages %}                  {% set run = runtime | enter(0, tools, ns) %}
      <{{ message.role }}> …             becomes   {% for message in messages | items(run) %}
    {% endfor %}                                     {% set text = run | recall(message, …) %}
                                                     {% if text is none %}
                                                       {% call(message) run() %}<{{ … {% endcall %}
                                                     {% else %}{{ text }}{% endif %}
                                                   {% endfor %}
                                                   {{ run | leave }}

The body remains as it is, as a block that can run again with the message in another form.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from jinja2 import Environment, nodes

from .outside import look_outside
from .reads import BodyReader, NotMemoisableError, Reads, Surroundings, find

RUNTIME = "__leyline_runtime"
"""Context variable with the object that the filters below use."""
ENTER, ITEMS, RECALL, LEAVE = "leyline enter", "leyline items", "leyline recall", "leyline leave"
"""Filters, with names that no template can write."""

_OURS = "__leyline_"
_UNFOLLOWED = (nodes.Extends, nodes.Block, nodes.Include, nodes.Import, nodes.FromImport)
_NAMESPACE = "namespace"


@dataclass(frozen=True, slots=True)
class Instrumented:
    """A template's syntax tree after the change."""

    tree: nodes.Template
    loops: tuple[Reads, ...]
    """Reads of the bodies, by the loop's number."""
    of_messages: tuple[bool, ...]
    """True for loops that may run over messages, by the loop's number."""
    contents_outside: bool
    """True if a message's content may enter the prompt outside its own iteration."""


def instrument(environment: Environment, source: str) -> Instrumented:
    """Change every loop that allows it.

    Raises:
        jinja2.TemplateSyntaxError: not a template.
    """
    tree = environment.parse(source)
    chosen = dict(_memoisable(tree)) if _OURS not in source else {}
    outside = look_outside(tree, chosen)
    writer = _Writer(chosen)
    tree.body = list(writer.statements(tree.body))
    tree.set_environment(environment)
    numbered = writer.loops
    return Instrumented(
        tree,
        tuple(chosen[loop] for loop in numbered),
        tuple(loop in outside.of_messages for loop in numbered),
        outside.contents,
    )


def _memoisable(tree: nodes.Template) -> Iterator[tuple[nodes.For, Reads]]:
    """Yield loops that print, at the top level or in its conditions, with their reads."""
    namespaces = _namespaces(tree)
    if namespaces is None or any(find(tree, kind) for kind in _UNFOLLOWED):
        return
    macros = find(tree, nodes.Macro)
    names = [macro.name for macro in macros]
    assigned = {name.name for name in find(tree, nodes.Name) if name.ctx == "store"}
    once = {name for name in names if names.count(name) == 1} - assigned
    written = frozenset(ref.name for macro in macros for ref in find(macro, nodes.NSRef))
    defined: dict[str, nodes.Macro] = {}
    for statement in tree.body:
        if isinstance(statement, nodes.Macro) and statement.name in once:
            defined[statement.name] = statement
        known = Surroundings(dict(defined), namespaces, written)
        for loop in _loops(statement):
            try:
                reads = _reads(loop, known)
            except NotMemoisableError:
                continue
            yield loop, reads


def _loops(statement: nodes.Node) -> Iterator[nodes.For]:
    match statement:
        case nodes.For():
            yield statement
        case nodes.If(body=body, elif_=elifs, else_=otherwise):
            for inner in (*body, *elifs, *otherwise):
                yield from _loops(inner)


def _reads(loop: nodes.For, known: Surroundings) -> Reads:
    if loop.recursive or loop.else_ or not isinstance(loop.target, nodes.Name):
        raise NotMemoisableError("form of the loop")
    if not any(find(part, nodes.Output) for part in loop.body):
        raise NotMemoisableError("prints nothing; running it is cheaper")
    reads = BodyReader(loop.target.name, loop.body, known).read()
    listed = {name.name for name in find(loop.iter, nodes.Name)}
    if listed & set(reads.names):
        raise NotMemoisableError("every iteration reads the whole list")
    return reads


def _namespaces(tree: nodes.Template) -> frozenset[str] | None:
    """Return the variables that hold namespaces; None if one may have a second name."""
    created = [
        node
        for node in find(tree, nodes.Assign)
        if isinstance(node.target, nodes.Name) and _is_namespace_call(node.node)
    ]
    names = frozenset(node.target.name for node in created if isinstance(node.target, nodes.Name))
    if not {ref.name for ref in find(tree, nodes.NSRef)} <= names:
        return None
    loads = [name.name for name in find(tree, nodes.Name) if name.ctx == "load"]
    if loads.count(_NAMESPACE) != len(created):
        return None
    members = [
        node.node.name for node in find(tree, nodes.Getattr) if isinstance(node.node, nodes.Name)
    ]
    plain = any(loads.count(name) != members.count(name) for name in names)
    return None if plain else names


def _is_namespace_call(node: nodes.Node) -> bool:
    return (
        isinstance(node, nodes.Call)
        and isinstance(node.node, nodes.Name)
        and node.node.name == _NAMESPACE
    )


class _Writer:
    """Writes the statements that surround and replace the chosen loops' bodies."""

    def __init__(self, chosen: dict[nodes.For, Reads]) -> None:
        self._chosen = chosen
        self.loops: list[nodes.For] = []

    def statements(self, body: Iterable[nodes.Node]) -> Iterator[nodes.Node]:
        for node in body:
            if isinstance(node, nodes.If):
                self._branches(node)
            if isinstance(node, nodes.For) and node in self._chosen:
                yield from self._loop(node, self._chosen[node])
            else:
                yield node

    def _branches(self, node: nodes.If) -> None:
        node.body = list(self.statements(node.body))
        node.else_ = list(self.statements(node.else_))
        for branch in node.elif_:
            self._branches(branch)

    def _loop(self, loop: nodes.For, reads: Reads) -> Iterator[nodes.Node]:
        number = len(self.loops)
        self.loops.append(loop)
        run, text = f"{_OURS}run_{number}", f"{_OURS}text"
        item: str = loop.target.name  # type: ignore[attr-defined]
        outer = [nodes.Name(name, "load") for name in (*reads.names, *reads.namespaces)]
        entered = _filter(nodes.Name(RUNTIME, "load"), ENTER, nodes.Const(number), *outer)
        recalled = _filter(nodes.Name(run, "load"), RECALL, nodes.Name(item, "load"), *reads.values)
        call = nodes.Call(nodes.Name(run, "load"), [], [], None, None)
        anew = nodes.CallBlock(call, [nodes.Name(item, "param")], [], loop.body)
        known = nodes.Output([nodes.Name(text, "load")])
        unknown = nodes.Test(nodes.Name(text, "load"), "none", [], [], None, None)
        loop.iter = _filter(loop.iter, ITEMS, nodes.Name(run, "load"))
        loop.body = [
            nodes.Assign(nodes.Name(text, "store"), recalled),
            nodes.If(unknown, [anew], [], [known]),
        ]
        for statement in (
            nodes.Assign(nodes.Name(run, "store"), entered),
            loop,
            nodes.ExprStmt(_filter(nodes.Name(run, "load"), LEAVE)),
        ):
            yield statement.set_lineno(loop.lineno)


def _filter(value: nodes.Node, name: str, *arguments: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(value, name, list(arguments), [], None, None)
