"""OpenAI's Responses API and the chat API, one mapped to the other. No I/O, no framework.

A request becomes a chat request (:mod:`.request`), for diff, policies and engines. Its answer
becomes a response (:mod:`.answer`), or events (:mod:`.stream`). :mod:`.stored` lists the items of
responses stored for ``previous_response_id``.
"""
