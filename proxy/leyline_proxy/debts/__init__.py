"""Forgets that engines owe: kept outside the process that carries them."""

from .book import (
    Debt,
    DebtBook,
    DebtKey,
    DebtStore,
    DebtStoreGoneError,
    Inherited,
    MemoryDebtStore,
    older,
)
from .debts import Debts

__all__ = [
    "Debt",
    "DebtBook",
    "DebtKey",
    "DebtStore",
    "DebtStoreGoneError",
    "Debts",
    "Inherited",
    "MemoryDebtStore",
    "older",
]
