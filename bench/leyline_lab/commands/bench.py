"""``leyline bench NAME``: benchmarks on this machine."""

from __future__ import annotations

import typer

from ..outside.command import command as outside
from ..reuse.command import command as reuse
from ..splice_kernel import command as splice_kernel
from ..three_arm.command import command as three_arm
from ..user_turn.command import command as user_turn


def register(app: typer.Typer) -> None:
    """Add the group."""
    bench = typer.Typer(no_args_is_help=True, help="Measure a part of the engine on this machine.")
    bench.command("outside")(outside)
    bench.command("reuse")(reuse)
    bench.command("splice-kernel")(splice_kernel)
    bench.command("three-arm")(three_arm)
    bench.command("user-turn")(user_turn)
    app.add_typer(bench, name="bench")
