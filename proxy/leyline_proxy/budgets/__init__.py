"""Budgets of tenants: where usage is counted, and who is refused."""

from .service import Budgets, Reservation
from .store import BudgetReports

__all__ = ["BudgetReports", "Budgets", "Reservation"]
