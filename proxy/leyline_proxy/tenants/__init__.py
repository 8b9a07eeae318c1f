"""Callers: API keys of tenants, and each tenant's rights and rules."""

from .directory import TenantDirectory, build_directory
from .key_file import KeyFile, read_keys
from .tenant import Tenant, TenantLimits

__all__ = ["KeyFile", "Tenant", "TenantDirectory", "TenantLimits", "build_directory", "read_keys"]
