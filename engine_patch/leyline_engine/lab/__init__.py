"""The laboratory for contributors: the contract of claims, run from a checkout.

It isn't part of the wheel, and nothing that is imports it. Run it with ``leyline claims``.
"""
