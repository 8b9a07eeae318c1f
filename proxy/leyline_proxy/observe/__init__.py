"""Observers of turns: metrics, traces, the audit log, the live feed and the log.

Each implements :class:`~leyline_proxy.turns.ports.TurnObserver`. None changes a turn.
"""
