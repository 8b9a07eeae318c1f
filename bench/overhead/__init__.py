"""Parts of ``bench/proxy_overhead.py``: the upstream, the load and the systems under it."""
