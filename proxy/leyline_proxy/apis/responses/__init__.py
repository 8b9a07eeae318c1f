"""OpenAI's Responses API and the chat API, one mapped to the other. No I/O, no framework.

A request becomes a chat request (:mod:`.request`), which is what diff, policies and engines work
on; its answer becomes a response (:mod:`.answer`), or events (:mod:`.stream`). What is kept for
``previous_response_id`` is in :mod:`.stored`.
"""
