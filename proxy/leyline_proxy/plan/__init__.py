"""Turn messages into tokens, directives and the upstream body: step 4 in ARCHITECTURE.md."""
