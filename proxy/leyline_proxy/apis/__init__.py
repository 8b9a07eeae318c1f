"""Mappings of other APIs to chat requests and answers, and back. Pure."""
