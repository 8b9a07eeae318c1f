"""Forgets that engines owe: kept outside the process that carries them."""

from .book import DebtBook, older
from .debt import Debt, DebtKey, Inherited
from .debts import Debts
from .store import DebtStore, DebtStoreGoneError, MemoryDebtStore

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
