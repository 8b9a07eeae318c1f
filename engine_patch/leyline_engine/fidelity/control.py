"""The control of every measurement: keys that keep the rotation of their old positions."""

from __future__ import annotations

import torch

from leyline_engine.rotation import Rotary


class UnrotatedRotary(Rotary):
    """A rotary that leaves keys as they were computed."""

    def rotate(
        self, keys: torch.Tensor, computed_at: torch.Tensor, needed_at: torch.Tensor
    ) -> torch.Tensor:
        """Return the keys."""
        return keys
