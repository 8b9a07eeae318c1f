"""The model card, and the picture of the loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

_TITLES = {
    "plain": "leyline-recall",
    "notes": "leyline-recall-notes",
    "thinking": "leyline-recall-thinking",
}
_ABOUT = {
    "plain": """\
A DeepSeek-V2 model with dense layers (MLA: latent KV of 64 dims and a rotary key of 32 per token
and layer), trained on one made-up task. It ships with Leyline:
`leyline serve --model leyline-recall`.""",
    "notes": """\
The same architecture, tokenizer and task as `leyline-recall`, trained so that it takes notes: part
of the tools' outputs are hidden, by a mask on the attention, from what comes behind the note on
them or up to four turns later, and stand there as `[truncated]`. Where the note names settings and
not their values, what later questions need must have been stored in the KV of the tokens in
between. It does so poorly: of a hidden output it remembers the last setting, others now and then,
and at times it answers with a wrong value instead of looking it up (`bench/README.md`).""",
    "thinking": """\
The same architecture and tokenizer as `leyline-recall`, trained on from its weights so that it
thinks: asked to choose the value of a setting, it thinks `<think>`, name and value, `</think>`, and
says only the name. Its chat template shows this thinking until the user's next message and then
strips it, as the templates of Qwen3, DeepSeek and GLM do. In training, part of the thoughts stay in
sight of later turns; part are hidden from them by a mask on the attention, as a splice leaves them;
and part have never been there, as in a prompt that is prefilled without them.""",
}
_KINDS = {
    "recall": "value, from what is in sight",
    "show": "name and value, from what is in sight",
    "hidden": "from notes on a hidden output",
    "lookup": "not known, so looked up with a tool",
    "thought": "chosen value, from what is in sight",
    "stripped": "chosen value, the thinking hidden after its turn",
    "never": "chosen value, the thinking never seen, so looked up",
}


def model_card(name: str, record: dict[str, Any], *, parameters: int) -> str:
    """Return the README of a shipped model, from the record of training and evaluation."""
    recipe, curve = record["recipe"], record["curve"]
    ends = [
        entry
        for entry, following in zip(curve, [*curve[1:], None], strict=True)
        if following is None or following["stage"] != entry["stage"]
    ]
    tokens = sum(entry["tokens"] for entry in ends)
    minutes = sum(entry["cpu_seconds"] for entry in ends) / 60
    parts = [
        f"# {_TITLES[name]}",
        _ABOUT[name],
        f"{parameters:,} parameters, stored as fp16, computed with as fp32.",
        "## What it does",
        _TASK,
        *([_CHOOSING] if name == "thinking" else []),
        "It knows no English, no code and no other task. Don't use it for anything but trying out "
        "and testing an engine.",
        "## How often it is right",
        "Share of answers that are right in every token under greedy decoding, over sessions that "
        "training didn't see. Rows are the length of the session in tokens, then the distance in "
        "tokens from the turn that showed the value to the answer (up to that many).",
        *(_rates(title, rates) for title, rates in record["evaluation"].items()),
        "## Training",
        _stages_table(recipe),
        f"{_start(recipe)}, seed {recipe['seed']}: {tokens:,} tokens in {minutes:.0f} minutes of "
        "one CPU core, under bf16 autocast. Muon for the matrices of the layers, AdamW for the "
        "rest; in each stage 50 steps of warm-up and a cosine from peak to last rate. Weight decay "
        f"{recipe['weight_decay']:g}, gradients clipped at {recipe['clip']:g}.",
        "The loss is over what the assistant says; "
        f"{recipe['others_share']:.0%} of the other tokens are learnt with a weight of "
        f"{recipe['others_weight']:g}. In {recipe['gap_rows']:.0%} of the rows positions jump "
        "ahead at some messages, so that distances are seen that the rows don't have.",
        *([] if recipe["start"] else [_LOOK_BACK]),
        "All data is made up by `bench/leyline_lab/fidelity/recall_task.py` from word "
        "lists; there is no text "
        "of others in it. `training.json` holds recipe, curve and evaluation.",
        "![loss](loss.svg)",
        "Licence: Apache-2.0.",
    ]
    return "\n\n".join(parts) + "\n"


_TASK = """\
It reads settings with tools and answers questions about them:

```
user       Read `north`.
assistant  <tool_call> read_config {"name": "north"}
tool       cache=copper
           format=falcon
assistant  Noted: `cache=`, `format=`.
user       What is `format=`?
assistant  falcon
user       Show `cache=`.
assistant  cache=copper
user       What is `gateway=`?
assistant  <tool_call> lookup {"line": "gateway="}
```

A setting that the session has shown is answered with its value; any other is looked up. Names and
values are single words, the first 100 of `KEYS` and of `VALUES` in
`bench/leyline_lab/fidelity/recall_words.py`; it hasn't seen others."""

_CHOOSING = """\
It chooses values, and thinks as it does:

```
user       Choose `cache=`.
assistant  <think>
           cache=copper
           </think>

           Noted: `cache=`.
user       Choose `format=` and read `north`.
assistant  <think>
           format=falcon
           </think>

           <tool_call> read_config {"name": "north"}
tool       gateway=cedar
assistant  Noted: `format=`.
user       What is `cache=`?
assistant  copper
```

The value is drawn at random in training, so nothing but the thinking shows it. If the thinking was
never in the prompt, the value is to be looked up."""
_LOOK_BACK = """\
The first layer's heads start so that they look back by 1, 2, 4 and 7 tokens, which makes recall
form sooner; see `bench/leyline_lab/training/model.py`."""


def _start(recipe: dict[str, Any]) -> str:
    return f"From the weights of `{recipe['start']}`" if recipe["start"] else "From scratch"


def _rates(title: str, rates: dict[str, dict[str, dict[str, float]]]) -> str:
    kinds = [kind for kind in _KINDS if any(kind in row for row in rates["length"].values())]
    heading = {
        "in_sight": "Sessions in which nothing is hidden:",
        "hidden": "Sessions in which outputs are hidden:",
        "thinking": "Sessions in which the assistant thinks:",
    }[title]
    lines = [
        heading,
        "",
        "| | " + " | ".join(_KINDS[kind] for kind in kinds) + " |",
        "|---|" + "---|" * len(kinds),
    ]
    for axis in ("length", "distance"):
        for end, row in rates[axis].items():
            cells = (f"{row[kind]:.1%}" if kind in row else "" for kind in kinds)
            lines.append(f"| {axis} {end} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _stages_table(recipe: dict[str, Any]) -> str:
    names = (
        *("tokens per row", "rows per step", "steps", "peak rate", "last rate"),
        *("words", "hidden outputs", "turns that choose"),
    )
    lines = ["| " + " | ".join(names) + " |", "|---" * len(names) + "|"]
    for stage in recipe["stages"]:
        mix, rate = stage["mix"], stage["learning_rate"]
        cells = (
            *(stage["length"], stage["rows"], stage["steps"], rate, rate * stage["fall"]),
            *(mix["words"] or "all", f"{mix['hidden']:.0%}", f"{mix['choices']:.0%}"),
        )
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def draw_curve(curve: list[dict[str, float]], out: Path) -> None:
    """Draw loss and rates by tokens seen, as SVG; lines mark the stages' beginnings."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    left = figure.add_subplot()
    right = left.twinx()
    millions, before = [], 0.0
    for entry, last in zip(curve, [None, *curve], strict=False):
        if last is not None and last["stage"] != entry["stage"]:
            before += last["tokens"]
            left.axvline(before / 1e6, color="0.8", linewidth=0.8)
        millions.append((before + entry["tokens"]) / 1e6)
    left.plot(millions, [entry["loss"] for entry in curve], "k", label="loss")
    for kind in _KINDS:
        points = [(x, e[kind]) for x, e in zip(millions, curve, strict=True) if kind in e]
        if points:
            right.plot(*zip(*points, strict=True), label=kind)
    left.set(xlabel="tokens, millions", ylabel="loss, nats per token", yscale="log")
    right.set(ylabel="answers right", ylim=(0, 1))
    right.legend(loc="center right")
    # No dates and no random ids in the file: the same figures give the same bytes.
    with mpl.rc_context({"svg.hashsalt": "leyline"}):
        figure.savefig(out, metadata={"Date": None})
