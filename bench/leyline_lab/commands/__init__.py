"""The laboratory's subcommands of ``leyline``, found by the entry points ``leyline.commands``."""
