"""Admission: from the envelope of a request to the plan of its turn, and its receipt. Mostly pure."""
