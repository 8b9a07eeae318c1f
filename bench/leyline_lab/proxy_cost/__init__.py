"""The cost of the proxy: its time and memory by request, session, worker and policy."""
