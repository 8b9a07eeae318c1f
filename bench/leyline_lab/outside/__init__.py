"""``leyline bench outside``: published agent benchmarks on a user's endpoint, arm by arm.

``arms.py`` gives the proxy's settings of an arm, ``benchmarks/`` the commands and the result files
of each benchmark, ``running.py`` runs them, ``summary.py`` compares. Only ``endpoint.py``,
``proxy_process.py`` and ``running.py`` touch the world.
"""
