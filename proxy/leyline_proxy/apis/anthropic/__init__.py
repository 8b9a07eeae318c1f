"""Anthropic's Messages API and the chat API, one mapped to the other. No I/O, no framework.

A request becomes an OpenAI-shaped one (:mod:`.request`), for diff, policies and engines. Its answer
becomes a message (:mod:`.answer`), or events (:mod:`.stream`).
"""
