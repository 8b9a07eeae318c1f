"""Budgets of tenants: where usage is counted, and who is refused."""

from .reports import BudgetReports
from .service import Budgets, Reservation

__all__ = ["BudgetReports", "Budgets", "Reservation"]
