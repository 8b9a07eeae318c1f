"""Engines that measurements use: started servers, and proxies in front of engines."""
