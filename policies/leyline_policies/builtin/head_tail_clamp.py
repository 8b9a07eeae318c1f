"""The policy that clamps overlong tool results to a head and a tail."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from leyline_policies.builtin.old_results import ShorterResults, check_head_and_tail, of_tools
from leyline_policies.builtin.tool_results import check_numbers, check_tools
from leyline_policies.context import Context
from leyline_policies.conversation import map_text
from leyline_policies.marks import edit
from leyline_policies.policy import Message

_WARNING = """\
<warning>
The output of your last command was too long.
Please try a different command that produces less output.
If you're looking at a file you can try use head, tail or sed to view a smaller number of lines \
selectively.
If you're using grep or find and it produced too much output, you can use a more selective search \
pattern.
If you really need to see something from the full command's output, you can redirect output to a \
file and then search in that file.
</warning>"""


@dataclass(frozen=True, slots=True)
class HeadTailClamp(ShorterResults):
    """Cut tool results of ``max_chars`` characters or more down to their head and tail, at once.

    A warning asks the model to request less; then come the first ``head_chars`` characters,
    the number of elided ones, and the last ``tail_chars``. Each text part of a part list counts for
    itself. With ``tools`` only results of these tools are clamped.

    The rule and its text are mini-swe-agent's (2.4.6, ``observation_template`` in
    config/benchmarks/swebench.yaml). Different from it: a text that would not get shorter stays;
    and the limit is on the whole result, of which mini-swe-agent's own template has put a return
    code before the output.
    """

    name: ClassVar[str] = "head_tail_clamp"

    max_chars: int = 10_000
    head_chars: int = 5_000
    tail_chars: int = 5_000
    tools: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        """Raise ValueError for a number out of range or an empty ``tools``."""
        check_numbers(1, max_chars=self.max_chars)
        check_numbers(0, head_chars=self.head_chars, tail_chars=self.tail_chars)
        check_head_and_tail(self.head_chars, self.tail_chars, "max_chars", self.max_chars)
        check_tools("tools", self.tools)

    def _places(self, messages: list[Message], context: Context) -> Sequence[int]:
        return of_tools(context.results(messages), messages, context, tools=self.tools)

    def _shorter(self, message: Message) -> Message:
        shorter = map_text(message, self._clamp)
        return message if shorter is message else edit(message, content=shorter["content"])

    def _clamp(self, text: str) -> str:
        # Clamped results begin with the warning and may be longer than the limit.
        if len(text) < self.max_chars or text.startswith(_WARNING):
            return text
        head, tail = text[: self.head_chars], text[len(text) - self.tail_chars :]
        elided = len(text) - len(head) - len(tail)
        clamped = (
            f"{_WARNING}<output_head>\n{head}\n</output_head>\n"
            f"<elided_chars>\n{elided} characters elided\n</elided_chars>\n"
            f"<output_tail>\n{tail}\n</output_tail>"
        )
        return clamped if len(clamped) < len(text) else text
