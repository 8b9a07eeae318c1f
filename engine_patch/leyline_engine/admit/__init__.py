"""Admission: from a request's envelope to the plan of its turn, and its receipt. Mostly pure."""
