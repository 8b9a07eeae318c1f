"""Who is calling: API keys to tenants, and what each tenant may and wants."""

from .directory import TenantDirectory, build_directory
from .key_file import KeyFile, read_keys
from .tenant import Tenant, TenantLimits

__all__ = [
    "KeyFile",
    "Tenant",
    "TenantDirectory",
    "TenantLimits",
    "build_directory",
    "read_keys",
]
