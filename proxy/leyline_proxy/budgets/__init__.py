"""Budgets of tenants: where usage is counted, and who is refused."""

from .service import Budgets, Reservation

__all__ = ["Budgets", "Reservation"]
