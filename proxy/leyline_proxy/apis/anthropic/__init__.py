"""Anthropic's Messages API and the chat API, one mapped to the other. No I/O, no framework.

A request becomes an OpenAI-shaped one (:mod:`.request`), which is what diff, policies and engines
work on; its answer becomes a message (:mod:`.answer`), or events (:mod:`.stream`).
"""
