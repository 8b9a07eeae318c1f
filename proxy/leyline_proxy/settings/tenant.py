"""Settings of one tenant."""

from __future__ import annotations

from typing import Annotated

from pydantic import ConfigDict, Field, SecretStr

from leyline_engine.contract import MAX_GROUPS, RecurrentEdits

from ..model.fields import GROUP_PATTERN, SHARE_PATTERN, ToolOrder
from ..model.undeclared import OwnMode
from .budgets import Budget
from .cache_scope import CacheScope
from .limits import TenantLimitSettings
from .off import Reuse
from .recall import OnOff


class TenantSettings(TenantLimitSettings):
    """Settings of one tenant. Unset ones come from the proxy-wide settings."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    api_keys: tuple[SecretStr, ...] = ()
    """Written as in the key file, without the tenant."""
    policy: str | None = None
    undeclared: dict[str, str] | None = None
    reasoning_edits: OwnMode | None = None
    compaction_edits: OwnMode | None = None
    recurrent_edits: RecurrentEdits | None = None
    tool_order: ToolOrder | None = None
    allow_request_policy: bool | None = None
    share: Annotated[str, Field(pattern=SHARE_PATTERN)] = ""
    """Lets each of the tenant's sessions use KV that another one spliced. By default, none does."""
    reuse: Reuse | None = None
    reuse_groups: Annotated[
        tuple[Annotated[str, Field(pattern=GROUP_PATTERN)], ...], Field(max_length=MAX_GROUPS)
    ] = ()
    """Groups of tenants that may take KV of one another's content, if their reuse isn't ``off``."""
    reuse_margin: Annotated[float, Field(ge=0, le=100)] | None = None
    upstreams: tuple[str, ...] | None = None
    """Names of the engines that may serve the tenant; None for all."""
    cache_scope: CacheScope | None = None
    warm_start: bool = True
    """False keeps none of the tenant's prompts for a warm start."""
    recall: OnOff | None = None
    budgets: tuple[Budget, ...] | None = None
    """The tenant's budgets instead of the proxy's; an empty list is none."""
