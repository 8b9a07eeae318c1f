"""Budgets of tenants: where usage is counted, and who is refused."""

from .service import Budgets, Hold

__all__ = ["Budgets", "Hold"]
