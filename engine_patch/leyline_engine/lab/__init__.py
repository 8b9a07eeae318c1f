"""The laboratory for contributors: the contract of claims, and the most that reuse could find.

It isn't part of the wheel, and nothing that is imports it. Run it from a checkout with
``leyline claims`` and ``bench/reuse_offline.py``.
"""
