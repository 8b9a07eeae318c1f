"""The reads and writes of a template's loop body besides its item.

A body that runs again with equal reads writes the same text: the sandbox lets templates change only
the attributes of namespaces. So the reads are the key of a body's remembered text. They are found
in the syntax tree. Unknown constructs are refused, never guessed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from jinja2 import nodes

MEMBER = "leyline member"
"""Filter: a member of a value, without an error if the value is undefined."""
LOOP_MEMBER = "leyline loop member"
"""Filter: a member of ``loop``, without the sandbox's checks."""

_TOTAL_LOOP = frozenset(
    {"index", "index0", "revindex", "revindex0", "first", "last", "length", "depth", "depth0"}
)
_NEIGHBOURS = frozenset({"previtem", "nextitem"})
_ORDERING = frozenset({"eq", "ne", "lt", "lteq", "gt", "gteq"})
_IMPURE_FILTERS = frozenset({"random"})
_CALL_NAMES = frozenset({"caller", "varargs", "kwargs"})
WITHOUT_CONTENT = frozenset({"role", "name", "tool_calls", "tool_call_id"})
"""Members of a message that don't include its content."""
_OPERATORS = (nodes.And, nodes.Or, nodes.Add, nodes.Sub, nodes.Not, nodes.Neg, nodes.Pos)
_NodeT = TypeVar("_NodeT", bound=nodes.Node)


class NotMemoisableError(Exception):
    """A body whose effects can't be replaced by a remembered text."""


@dataclass(frozen=True, slots=True)
class Reads:
    """The dependencies of a loop's body besides the item, and its changes."""

    names: tuple[str, ...]
    """Outer variables that nothing assigns while the loop runs."""
    values: tuple[nodes.Expr, ...]
    """Expressions to evaluate at the beginning of each iteration."""
    namespaces: tuple[str, ...]
    """Variables that hold the relevant namespaces."""
    touched: tuple[tuple[str, str], ...]
    """Namespace and attribute of all reads and writes there."""
    written: tuple[tuple[str, str], ...]
    contents: bool
    """True if the text of another message may come in through ``values``."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Facts about the whole template."""

    macros: Mapping[str, nodes.Macro]
    """Macros that are defined once, at the top level, before the loop."""
    namespaces: frozenset[str]
    """Variables that hold namespaces; no other variable does."""
    written_by_macros: frozenset[str]


class BodyReader:
    """Collects the reads of one loop.

    Args:
        item: the loop's target.
        body: the loop's.
        known: about the loop's template.

    Raises:
        NotMemoisableError: from :meth:`read`.
    """

    def __init__(self, item: str, body: Sequence[nodes.Node], known: Surroundings) -> None:
        self._item = item
        self._body = body
        self._known = known
        stored = {ref.name for part in body for ref in find(part, nodes.NSRef)}
        self._changing = stored | known.written_by_macros
        self._names: dict[str, None] = {}
        self._values: list[nodes.Expr] = []
        self._touched: dict[tuple[str, str], None] = {}
        self._written: dict[tuple[str, str], None] = {}
        self._macros: set[str] = set()
        self._outside_macro = True
        self._contents = False

    def read(self) -> Reads:
        """Return all dependencies of the body."""
        self._block(self._body, {self._item})
        return Reads(
            tuple(self._names),
            tuple(self._values),
            tuple(dict.fromkeys(name for name, _ in self._touched)),
            tuple(self._touched),
            tuple(self._written),
            self._contents,
        )

    def _block(self, body: Iterable[nodes.Node], local: set[str]) -> set[str]:
        """Read statements in order; return the names that every path assigns."""
        for statement in body:
            local = self._statement(statement, local)
        return local

    def _statement(self, node: nodes.Node, local: set[str]) -> set[str]:
        match node:
            case nodes.Output(nodes=outputs):
                for expression in outputs:
                    self._expression(expression, local)
            case nodes.ExprStmt(node=expression):
                self._expression(expression, local)
            case nodes.Assign(target=target, node=value):
                self._expression(value, local)
                return self._assigned(target, local)
            case nodes.AssignBlock(target=target, filter=None, body=body):
                self._block(body, local)
                return self._assigned(target, local)
            case nodes.If(test=test, body=body, elif_=elifs, else_=otherwise):
                self._expression(test, local, test=True)
                ways = [self._block(body, local), self._block(otherwise, local)]
                ways += [self._block([branch], local) for branch in elifs]
                return set.intersection(*ways)
            case nodes.For(recursive=False):
                self._inner_loop(node, local)
            case nodes.Scope(body=body):
                self._block(body, local)
            case _:
                raise NotMemoisableError(type(node).__name__)
        return local

    def _assigned(self, target: nodes.Node, local: set[str]) -> set[str]:
        match target:
            case nodes.Name(name=name):
                return local | {name}
            case nodes.Tuple(items=items) if all(isinstance(item, nodes.Name) for item in items):
                return local | {item.name for item in items if isinstance(item, nodes.Name)}
            case nodes.NSRef(name=name, attr=attr):
                if name not in local:
                    self._written[name, attr] = None
                    self._touch(name, attr)
                return local
        raise NotMemoisableError("assignment")

    def _inner_loop(self, loop: nodes.For, local: set[str]) -> None:
        self._expression(loop.iter, local)
        inside = self._assigned(loop.target, local) | {"loop"}
        if loop.test is not None:
            self._expression(loop.test, inside, test=True)
        self._block(loop.body, inside)
        self._block(loop.else_, local)

    def _expression(self, node: nodes.Node, local: set[str], *, test: bool = False) -> None:
        """Read an expression; with ``test``, only its truth matters."""
        if self._outside_macro and self._per_iteration(node, local, test=test):
            return
        match node:
            case nodes.Name(name=name):
                self._name(name, local)
            case nodes.Getattr(node=nodes.Name(name=name), attr=attr) if self._is_space(
                name, local
            ):
                self._touch(name, attr)
                self._value(node)
            case nodes.Call(node=nodes.Name(name=name)) if name not in local:
                self._call(node, name, local)
            case nodes.Filter(node=inner, name=name) if inner is None or name in _IMPURE_FILTERS:
                raise NotMemoisableError(name)
            case nodes.And() | nodes.Or():
                self._all(node.iter_child_nodes(), local, test=test)
            case nodes.Not():
                self._all(node.iter_child_nodes(), local, test=True)
            case nodes.CondExpr(test=condition, expr1=first, expr2=second):
                self._expression(condition, local, test=True)
                self._all(filter(None, (first, second)), local, test=test)
            case nodes.Expr() | nodes.Helper():
                self._all(node.iter_child_nodes(), local)
            case _:
                raise NotMemoisableError(type(node).__name__)

    def _all(self, parts: Iterable[nodes.Node], local: set[str], *, test: bool = False) -> None:
        for part in parts:
            self._expression(part, local, test=test)

    def _name(self, name: str, local: set[str]) -> None:
        if name in local:
            return
        if name == "loop" or name in _CALL_NAMES or name in self._known.namespaces:
            raise NotMemoisableError(name)
        if not self._outside_macro and name == self._item:
            raise NotMemoisableError("a macro means another variable of the item's name")
        self._names[name] = None

    def _call(self, node: nodes.Call, name: str, local: set[str]) -> None:
        macro = self._known.macros.get(name)
        if macro is None:
            self._name(name, local)
        elif name not in self._macros:
            self._macros.add(name)
            outside, self._outside_macro = self._outside_macro, False
            parameters = {arg.name for arg in macro.args} | _CALL_NAMES
            for default in macro.defaults:
                self._expression(default, parameters)
            self._block(macro.body, parameters)
            self._outside_macro = outside
        self._all(node.iter_child_nodes(exclude=("node",)), local)

    def _per_iteration(self, node: nodes.Node, local: set[str], *, test: bool) -> bool:
        """Record an expression that is best represented by its value; return False for others."""
        if not isinstance(node, nodes.Expr):
            return False
        if self._is_total(node, local) and self._is_varying(node):
            for space in find(node, nodes.Getattr):
                if isinstance(space.node, nodes.Name) and space.node.name != "loop":
                    self._touch(space.node.name, space.attr)
            self._value(node)
            return True
        members: list[str] = []
        base: nodes.Node = node
        while not self._is_item(base, local):
            member = member_of(base)
            if member is None:
                return False
            members.insert(0, member)
            base = base.node  # type: ignore[attr-defined]
        self._contents |= not test if not members else members[0] not in WITHOUT_CONTENT
        if members:
            names = [nodes.Const(member) for member in members]
            self._value(nodes.Filter(base, MEMBER, names, [], None, None))
        else:
            self._value(nodes.Not(base) if test else base)  # type: ignore[arg-type]
        return True

    def _is_item(self, node: nodes.Node, local: set[str]) -> bool:
        """Return True for another element of a list, or undefined if there is none."""
        match node:
            case nodes.Getattr(node=nodes.Name(name="loop"), attr=attr):
                return "loop" not in local and attr in _NEIGHBOURS
            case nodes.Getitem(node=nodes.Name(name=name), arg=nodes.Expr() as index):
                element = member_of(node) is None and self._is_total(index, local)
                return element and self._is_outer(name, local)
        return False

    def _is_total(self, node: nodes.Node | None, local: set[str]) -> bool:
        """Return True if a value without contents can be read at once, and nothing is consumed."""
        match node:
            case nodes.Getattr(node=nodes.Name(name="loop"), attr=attr):
                return "loop" not in local and attr in _TOTAL_LOOP
            case nodes.Getattr(node=nodes.Name(name=name)):
                return self._is_space(name, local) and name not in self._changing
            case nodes.Filter(node=nodes.Name(name=name), name="length" | "count"):
                return self._is_outer(name, local)
            case nodes.Compare(expr=expr, ops=operands):
                return self._is_comparable(expr, local) and all(
                    operand.op in _ORDERING and self._is_comparable(operand.expr, local)
                    for operand in operands
                )
        if isinstance(node, _OPERATORS):
            return all(self._is_total(child, local) for child in node.iter_child_nodes())
        return isinstance(node, nodes.Const)

    def _is_comparable(self, node: nodes.Node, local: set[str]) -> bool:
        """Return True if a node may be compared; a variable alone isn't a total expression."""
        if isinstance(node, nodes.Name):
            return self._is_outer(node.name, local)
        return self._is_total(node, local)

    def _is_outer(self, name: str, local: set[str]) -> bool:
        return name not in local and name != "loop" and name not in self._known.namespaces

    def _is_varying(self, node: nodes.Expr) -> bool:
        """Return True if a total expression is more than outer variables, which are read once."""
        return any(True for _ in find(node, nodes.Getattr)) or any(
            True for _ in find(node, nodes.Filter)
        )

    def _is_space(self, name: str, local: set[str]) -> bool:
        return name not in local and name in self._known.namespaces

    def _touch(self, name: str, attr: str) -> None:
        if name not in self._known.namespaces or name == self._item:
            raise NotMemoisableError(name)
        self._touched[name, attr] = None

    def _value(self, expression: nodes.Expr) -> None:
        direct = _without_checks(expression)
        if direct not in self._values:
            self._values.append(direct)


def _without_checks(node: nodes.Expr) -> nodes.Expr:
    """Return a copy that reads members of ``loop`` directly."""
    match node:
        case nodes.Getattr(node=nodes.Name(name="loop") as loop, attr=attr):
            return nodes.Filter(loop, LOOP_MEMBER, [nodes.Const(attr)], [], None, None)
    return type(node)(*[_copied(value) for _, value in node.iter_fields()])


def _copied(value: object) -> object:
    if isinstance(value, list):
        return [_copied(item) for item in value]
    if isinstance(value, nodes.Expr):
        return _without_checks(value)
    if isinstance(value, nodes.Node):
        return type(value)(*[_copied(inner) for _, inner in value.iter_fields()])
    return value


def member_of(node: nodes.Node) -> str | None:
    """Return the name in ``x.name`` and ``x['name']``."""
    match node:
        case nodes.Getattr(attr=attr):
            return attr
        case nodes.Getitem(arg=nodes.Const(value=str(name))):
            return name
    return None


def find(node: nodes.Node, kind: type[_NodeT]) -> Sequence[_NodeT]:
    """Return nodes of a kind below a node, including the node itself."""
    found = list(node.find_all(kind))
    return [node, *found] if isinstance(node, kind) else found
