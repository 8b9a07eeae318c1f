"""Options that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

JsonOut = Annotated[
    Path | None, typer.Option("--json", metavar="OUT", help="Write the figures here.")
]
Plot = Annotated[Path | None, typer.Option(metavar="OUT.png", help="Write a picture here.")]
TurnPlot = Annotated[
    Path | None, typer.Option(metavar="OUT.png", help="Write a picture by turn here.")
]
Policy = Annotated[str, typer.Option(metavar="SPEC", help="Policy pipeline, as for serve.")]
Undeclared = Annotated[
    list[str] | None,
    typer.Option(
        metavar="ROLE=amortize",
        help="Splice the harness's own edits of this role's messages. May be repeated.",
    ),
]
Limit = Annotated[int | None, typer.Option(min=1, help="Only the first N requests of each file.")]
AnchorTokens = Annotated[
    int,
    typer.Option(
        min=1,
        help="Tokens between two places with cached state, of a model with recurrent layers: new "
        "text in front of kept text costs so many more, on average.",
    ),
]
ApiKey = Annotated[str | None, typer.Option(help="API key of the server at --url.")]
ServerFlag = Annotated[
    list[str] | None,
    typer.Option(help="Flag for the server that is started, such as --tp=2; repeatable."),
]
