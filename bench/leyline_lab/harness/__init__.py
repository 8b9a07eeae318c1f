"""The frame of a measurement: its flags, progress, figures, table, and the machine it runs on."""
