"""Parts of a turn that engines with a scheduler of their own share: its account, contained errors."""
