"""Leyline's laboratory: replays of recorded sessions, benchmarks, evaluations and litmus tests.

It is a distribution of its own, ``leyline-lab``; nothing that serves imports it.
"""
