"""The laboratory for contributors: tests whether an engine keeps the contract of claims.

It isn't part of the wheel, and nothing that is imports it. Run it from a checkout with
``leyline claims``.
"""
