"""The cost of anchors on recorded edited histories."""
