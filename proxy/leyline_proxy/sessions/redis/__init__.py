"""Sessions in Redis, which several proxies share and which outlive them. See docs/sessions.md."""

from .link import RedisLink, RedisOptions
from .responses import RedisResponseStore
from .sealing import Seal
from .store import RedisSessionStore

__all__ = ["RedisLink", "RedisOptions", "RedisResponseStore", "RedisSessionStore", "Seal"]
