"""The laboratory for contributors: the contract of claims, run from a checkout.

It isn't part of the wheel, and nothing that is imports it. Run it with ``leyline claims``,
or with ``python -m leyline_lab.claims`` where only an engine is installed.
"""
