"""Parts of a turn that engines with a scheduler share: its account, and contained errors."""
