"""Rotary keys: their rotation to new positions, and how it is measured on a loaded model."""
