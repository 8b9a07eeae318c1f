"""The scripted agent's instructions, words and actions, turn by turn."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

SYSTEM = """\
You are a careful software engineer who works in a small repository through three tools: bash, \
read and edit.

How you work:
- Look before you change anything. Run the tests first, read the code that a failure points to, \
and form a hypothesis before you edit.
- Fix the library, not the tests. A test may be added, never weakened.
- Make the smallest change that is right, in the style of the file. Do not reformat code that you \
do not change, and do not add dependencies.
- After each fix run the tests that cover it; at the end run the whole suite.
- When a call fails, read the message, correct the call and try again. Do not repeat a call that \
failed in the same way.
- Say in one or two sentences what you are about to do and why, then call the tool. Several calls \
in one turn are fine when none needs the result of another.
- Paths are relative to the root of the working copy. The tools keep no state between calls: a cd \
does not last.
- When everything is green, finish with a short summary: what was wrong, what you changed, how it \
was checked, and anything that the maintainers should know."""

TASK = """\
The test suite of stockroom has been red since three branches were merged last week. Please find \
out why and repair the library.

There is also a report from the office: since we have a customer called "Berg & Sons, Ltd" the \
import of the order file stops with an error, although the shop system has quoted the name \
properly. Please reproduce that first, fix it, and add a regression test for it.

Do not touch the public interface: other scripts import Money, Inventory, Invoice and PriceList."""


@dataclass(frozen=True, slots=True)
class ScriptedTurn:
    """One message of the agent: its text, and its calls (none in the last)."""

    say: str
    calls: tuple[tuple[str, Mapping[str, Any]], ...] = ()


def bash(command: str) -> tuple[str, Mapping[str, Any]]:
    """Return a shell command."""
    return "bash", {"command": command}


def read(path: str, start: int | None = None, end: int | None = None) -> tuple[str, dict[str, Any]]:
    """Return a call that reads a file, or some lines of it."""
    span = {"start": start, "end": end}
    return "read", {"path": path} | {key: line for key, line in span.items() if line is not None}


def edit(path: str, old: str, new: str) -> tuple[str, Mapping[str, Any]]:
    """Return a call that makes one replacement in a file."""
    return "edit", {"path": path, "old": old, "new": new}


ALLOCATE_OLD = """\
        return [Money(self.cents * weight // total) for weight in weights]
"""
ALLOCATE_FIRST = """\
        parts = [self.cents * weight // total for weight in weights]
        for index in range(self.cents - sum(parts)):
            parts[index] += 1
        return [Money(part) for part in parts]
"""
ALLOCATE_FINAL = """\
        parts = [self.cents * weight // total for weight in weights]
        takers = [index for index, weight in enumerate(weights) if weight]
        for index in takers[: self.cents - sum(parts)]:
            parts[index] += 1
        return [Money(part) for part in parts]
"""
ROWS_OLD = """\
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    header = lines[0].split(",") if lines else []
    if header != columns:
        raise BadRow(path, 1, f"expected the columns {', '.join(columns)}")
    for number, line in enumerate(lines[1:], start=2):
        if not line.strip():
            continue
        fields = line.split(",")
        if len(fields) != len(columns):
"""
ROWS_NEW = """\
    with Path(path).open(encoding="utf-8", newline="") as file:
        rows = list(csv.reader(file))
    header = rows[0] if rows else []
    if header != columns:
        raise BadRow(path, 1, f"expected the columns {', '.join(columns)}")
    for number, fields in enumerate(rows[1:], start=2):
        if not any(field.strip() for field in fields):
            continue
        if len(fields) != len(columns):
"""
REGRESSION = """

def test_quoted_fields_may_hold_commas_and_quotes(tmp_path):
    path = write(
        tmp_path / "orders.csv",
        "order,customer,sku,quantity",
        '7,"Berg & Sons, Ltd",A-1,2',
        '8,"The ""Old"" Mill",A-1,1',
    )
    assert [order[1] for order in read_orders(path)] == ["Berg & Sons, Ltd", 'The "Old" Mill']


def test_too_many_fields_name_the_row(tmp_path):
    path = write(tmp_path / "orders.csv", "order,customer,sku,quantity", "7,Berg, Ltd,A-1,2")
    with pytest.raises(BadRow, match="row 2: 5 fields, expected 4"):
        read_orders(path)
"""

LOOK_AROUND = (
    ScriptedTurn(
        "I'll start with an overview of the repository.", (bash("ls -lA . stockroom tests"),)
    ),
    ScriptedTurn("The README should say what each module is for.", (bash("cat README.md"),)),
    ScriptedTurn(
        "Now the tests. I assume the usual layout with unit tests in a folder of their own.",
        (bash("python -m pytest -q tests/unit"),),
    ),
    ScriptedTurn(
        "There is no tests/unit; the test files lie directly in tests. I'll run the whole suite.",
        (bash("python -m pytest -q"),),
    ),
    ScriptedTurn(
        "Fourteen failures, but they look like a handful of causes: allocation of cents, "
        "reserving the last units, discount tiers, and invoices that share their lines. The "
        "report failures are probably consequences. I'll take money first, because everything "
        "else is built on it.",
        (read("stockroom/money.py"),),
    ),
)

MONEY = (
    ScriptedTurn(
        "allocate() floors every part and drops the remainder, although its docstring promises "
        "that the parts add up. Before I change it: who relies on it?",
        (bash('grep -rn "allocate\\|\\.split(" stockroom tests | sort'),),
    ),
    ScriptedTurn(
        "Only split(), the instalments and csvio's own string splits. I'll hand the remaining "
        "cents to the first parts, as documented.",
        (
            edit(
                "stockroom/money.py",
                "    return [Money(self.cents * w // total) for w in weights]\n",
                ALLOCATE_FIRST,
            ),
        ),
    ),
    ScriptedTurn(
        "The old text did not match: I shortened the variable name. Let me see the exact lines.",
        (bash("sed -n '62,80p' stockroom/money.py"),),
    ),
    ScriptedTurn(
        "It is `weight`, and the line is indented by eight blanks.",
        (edit("stockroom/money.py", ALLOCATE_OLD, ALLOCATE_FIRST),),
    ),
    ScriptedTurn("Now the tests for money.", (bash("python -m pytest -q tests/test_money.py"),)),
    ScriptedTurn(
        "Two of three pass now. The remaining case is instructive: a part with weight zero must "
        "stay at zero, so the extra cents may only go to parts that have a weight.",
        (edit("stockroom/money.py", ALLOCATE_FIRST, ALLOCATE_FINAL),),
    ),
    ScriptedTurn(
        "There are never more remaining cents than parts with a weight, so the slice is long "
        "enough. Again the tests, with the instalments that use this.",
        (bash("python -m pytest -q tests/test_money.py tests/test_invoices.py"),),
    ),
)

INVENTORY = (
    ScriptedTurn(
        "Money and the instalments are right; the shared lines in invoices are another matter. "
        "Next the inventory.",
        (bash("cat stockroom/inventry.py"),),
    ),
    ScriptedTurn("A typing error of mine.", (bash("cat stockroom/inventory.py"),)),
    ScriptedTurn(
        "`if quantity >= available` refuses to reserve the very last units; the docstring says "
        "that only fewer than quantity is an error. I want to be sure that no caller has worked "
        "around this by asking for one unit less.",
        (bash("grep -rn --include-only='*.py' 'reserve(' ."),),
    ),
    ScriptedTurn(
        "The option is called --include.",
        (bash("grep -rn --include='*.py' 'reserve(' . | sort"),),
    ),
    ScriptedTurn(
        "fulfil() in reports asks for the full quantity, so the comparison is simply wrong.",
        (
            edit(
                "stockroom/inventory.py",
                "        if quantity >= available:\n",
                "        if quantity > available:\n",
            ),
        ),
    ),
    ScriptedTurn(
        "The inventory tests, and the reports that build on them.",
        (bash("python -m pytest -q tests/test_inventory.py tests/test_reports.py"),),
    ),
)

PRICES = (
    ScriptedTurn(
        "Inventory is green, and fulfil() with it. The sales figures are still far too high. Let "
        "me read pricing, its tests and the catalogue together.",
        (
            read("stockroom/pricing.py"),
            read("tests/test_pricing.py"),
            read("stockroom/catalog.py"),
        ),
    ),
    ScriptedTurn(
        "The tiers are sorted from the smallest minimum up, and discount() returns the first one "
        "that is reached, which is always the smallest. Walking them from the top gives the best "
        "tier. I leave the sort order alone, because self.tiers is public.",
        (
            edit(
                "stockroom/pricing.py",
                "        for tier in self.tiers:\n",
                "        for tier in reversed(self.tiers):\n",
            ),
        ),
    ),
    ScriptedTurn("The pricing tests.", (bash("python -m pytest -q tests/test_pricing.py"),)),
    ScriptedTurn(
        "Good. Now the invoices that share their lines.",
        (read("stockroom/invoices.py"),),
    ),
    ScriptedTurn(
        "The classic: `lines=[]` is evaluated once, so every invoice without lines of its own "
        "appends to the same list. Is there another mutable default in the package?",
        (bash("grep -rnE '=(\\[\\]|\\{\\}|set\\(\\))[,)]' stockroom | sort"),),
    ),
    ScriptedTurn(
        "Only this one. A copy also protects a caller who passes a list and goes on using it.",
        (
            edit(
                "stockroom/invoices.py",
                "    def __init__(self, number, customer, lines=[], tax_rate=STANDARD_TAX):\n"
                "        self.number = number\n"
                "        self.customer = customer\n"
                "        self.lines = lines\n",
                "    def __init__(self, number, customer, lines=(), tax_rate=STANDARD_TAX):\n"
                "        self.number = number\n"
                "        self.customer = customer\n"
                "        self.lines = list(lines)\n",
            ),
        ),
    ),
    ScriptedTurn("The whole suite again.", (bash("python -m pytest -q"),)),
)

IMPORT = (
    ScriptedTurn(
        "The suite is green. Now the report from the office. How does the command line read its "
        "files?",
        (read("stockroom/cli.py"),),
    ),
    ScriptedTurn(
        "I'll reproduce it with a copy of the order file and the customer's name, quoted as the "
        "shop system does.",
        (
            bash(
                "cp data/orders.csv data/quoted.csv && "
                "printf '1005,\"Berg & Sons, Ltd\",GLUE-500,5\\n' >> data/quoted.csv && "
                "python -m stockroom report --stock data/stock.csv --order-file data/quoted.csv"
            ),
        ),
    ),
    ScriptedTurn(
        "The option is --orders. The file is already written, so I only repeat the report.",
        (bash("python -m stockroom report --stock data/stock.csv --orders data/quoted.csv"),),
    ),
    ScriptedTurn(
        "Reproduced: the quoted comma counts as a separator. Let me read the parser.",
        (read("stockroom/csv_io.py"),),
    ),
    ScriptedTurn(
        "The module is csvio, as the README says. Its tests belong to it.",
        (read("stockroom/csvio.py"), read("tests/test_csvio.py")),
    ),
    ScriptedTurn(
        "read_rows() splits lines at commas by hand. The standard csv module knows quoting; the "
        "row numbers and the messages stay as they are.",
        (edit("stockroom/csvio.py", ROWS_OLD, ROWS_NEW),),
    ),
    ScriptedTurn(
        "The tests of this module first.",
        (bash("python -m pytest -q tests/test_csvio.py"),),
    ),
    ScriptedTurn(
        "I forgot the import.",
        (
            edit(
                "stockroom/csvio.py",
                "from pathlib import Path\n\nfrom .catalog",
                "import csv\nfrom pathlib import Path\n\nfrom .catalog",
            ),
        ),
    ),
    ScriptedTurn(
        "Once more, and the office's own case.",
        (
            bash("python -m pytest -q tests/test_csvio.py"),
            bash("python -m stockroom report --stock data/stock.csv --orders data/quoted.csv"),
        ),
    ),
    ScriptedTurn(
        "Both work, and Berg & Sons, Ltd is in the table. Now the regression test, "
        "with a doubled quote as well, and one that an unquoted comma is still refused.",
        (edit("tests/test_csvio.py", "", REGRESSION),),
    ),
    ScriptedTurn(
        "The file's tests, with names, so that the two new ones can be seen to run.",
        (bash("python -m pytest -v tests/test_csvio.py"),),
    ),
)

FINISH = (
    ScriptedTurn(
        "An invoice with instalments exercises the discount, the tax and the allocation "
        "together. Five parts do not divide the amount evenly.",
        (
            bash(
                "python -m stockroom invoice --stock data/stock.csv --orders data/quoted.csv "
                "1002 --instalments 5"
            ),
        ),
    ),
    ScriptedTurn(
        "The five parts add up to the total; I check that with the shell rather than by eye.",
        (
            bash(
                "python -m stockroom invoice --stock data/stock.csv --orders data/quoted.csv 1002 "
                "--instalments 5 | awk '/^instalment/ {sum += $2} END {printf \"%.2f\\n\", sum}'"
            ),
        ),
    ),
    ScriptedTurn(
        "Now I remove my copy of the order file and look at the parts that I have changed.",
        (
            bash("rm data/quoted.csv && ls data"),
            bash(
                "sed -n '64,84p' stockroom/money.py; echo ---; "
                "sed -n '36,52p' stockroom/inventory.py; echo ---; "
                "sed -n '30,45p' stockroom/pricing.py; echo ---; "
                "sed -n '1,36p' stockroom/csvio.py"
            ),
        ),
    ),
    ScriptedTurn(
        "All as intended. The whole suite one last time, with names.",
        (bash("python -m pytest -v"),),
    ),
)

SUMMARY = ScriptedTurn(
    """\
The suite is green (47 tests, two of them new), and the office's order file is read.

What was wrong:
1. `money.Money.allocate` floored every part and lost the remaining cents. They now go to the \
first parts that have a weight, one each, so that the parts add up; a part with weight zero stays \
at zero.
2. `inventory.Inventory.reserve` compared with `>=` and refused to reserve the last units. It is \
`>` now.
3. `pricing.PriceList.discount` returned the smallest tier reached, not the best one. It walks the \
tiers from the top.
4. `invoices.Invoice` had a mutable default for `lines`, so invoices shared one list. Each has its \
own copy now.
5. `csvio.read_rows` split lines at commas by hand. It uses the csv module, so quoted names with \
commas and quotes are read; an unquoted extra comma is still refused with its row number.

How it was checked: the tests of each module after its fix, the report with the quoted customer, \
an invoice in five instalments whose sum equals the total, and the whole suite at the end.

For the maintainers: invoices that were written since the merge may show too small a discount and \
lines of other customers; it would be well to issue them again."""
)

TURNS: tuple[ScriptedTurn, ...] = (
    *LOOK_AROUND,
    *MONEY,
    *INVENTORY,
    *PRICES,
    *IMPORT,
    *FINISH,
    SUMMARY,
)
