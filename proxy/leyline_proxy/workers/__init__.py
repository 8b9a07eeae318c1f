"""The processes of a proxy: one alone, or workers below a supervisor."""
