"""``leyline eval``: the effect of edits on a model's output, measured against references."""
