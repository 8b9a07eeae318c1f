"""Records of what an engine holds: sources, the ledger of spans, lineages and paths. Pure."""
