"""Configuration: flags override ``LEYLINE_*`` variables, these a YAML file, and it the defaults."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, SecretStr, field_validator, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from leyline_engine.contract import RecurrentEdits

from ..model.fields import ToolOrder
from ..model.name_rule import NameRule
from ..model.undeclared import OwnMode
from .api_keys import check_tenant, parse_key
from .audit import AuditSettings
from .authorities import parse_authority
from .budgets import BudgetSettings, check_money
from .cache_scope import CacheScope
from .identity import IdentitySettings
from .limits import MIB, LimitSettings
from .off import Reuse
from .other_paths import PassThrough
from .processes import ProcessSettings
from .recall import RecallSettings
from .sockets import SocketSettings
from .tenant import TenantSettings
from .tls import TlsSettings
from .tracing import TraceSettings
from .upstreams import EngineUrl, RouterSettings, UpstreamSettings
from .warm_start import WarmStartSettings

DEFAULT_TENANT = "default"
ONLY_ENGINE = "engine"
"""Name of the engine if there is only one."""

_ENGINE_NAME = NameRule("[A-Za-z0-9._:-]", "letters, digits and . _ : -", 64)


class Settings(
    AuditSettings,
    BudgetSettings,
    IdentitySettings,
    LimitSettings,
    ProcessSettings,
    RecallSettings,
    RouterSettings,
    SocketSettings,
    TlsSettings,
    TraceSettings,
    WarmStartSettings,
    BaseSettings,
):
    """Everything an operator can set. Nested values in the environment are JSON."""

    model_config = SettingsConfigDict(
        env_prefix="LEYLINE_",
        env_ignore_empty=True,
        extra="forbid",
        frozen=True,
        hide_input_in_errors=True,  # keys are among it
    )

    allowed_hosts: Annotated[tuple[str, ...], NoDecode] = ()
    """``NAME`` or ``NAME:PORT``: further hosts by which requests may call the proxy while there are
    no API keys, and whose web pages may send requests. This machine's loopback names and the
    address in ``host`` are always allowed."""

    upstream: EngineUrl | None = None
    """Base URL of the engine, such as ``http://127.0.0.1:30000``. With neither this nor
    ``upstreams``, an engine runs in this process."""
    upstreams: dict[str, UpstreamSettings] = Field(default_factory=dict)
    """Several engines by name; a bare URL is an engine with defaults. A session stays with one
    engine for as long as it is up (rendezvous hashing)."""
    upstream_api_key: SecretStr | None = None
    """Bearer token that the proxy sends to engines."""
    engine: str = "replay"
    """Name of the embedded engine, from the entry-point group ``leyline.engines``."""
    engine_options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments for the embedded engine."""
    model: str | None = None
    """Model of the embedded engine: a bundled model, a folder or a hub id. None is
    ``leyline-recall`` if the engine is ``replay``."""

    max_owed_forgets: Annotated[int, Field(ge=1)] = 4096
    """Sessions of one tenant whose forgets may wait for engines to confirm them. Above this limit,
    a request that demands another forget is refused (503), because it could not be remembered."""
    owed_forgets_path: Path | None = None
    """Folder that keeps forgets until engines confirm them, also if the proxy is killed; it holds
    names, no text. Proxies of one machine may share it. With sessions in Redis, Redis keeps them,
    and this setting has no effect."""

    policy: str | None = None
    """Policies for everyone, such as ``truncate_older_than:n=2,max_chars=200``."""
    policies_file: Path | None = None
    """YAML file of policies for everyone, by tenant and by model; reloaded when it changes."""
    sensitive: str = ""
    """Content that is forgotten whichever policy takes it out, as settings of ``redact``:
    ``detectors=[keys;email],patterns=[…]``."""
    policy_timeout_s: Annotated[float, Field(gt=0, le=60)] = 1.0
    """Time limit for one policy on one turn, unless the policy comes with Leyline."""
    on_fault: Literal["refuse", "skip"] = "refuse"
    """How to handle a request when a policy fails that takes out what the model must not see.
    ``refuse`` sends nothing, ``skip`` sends the request as it was. Other policies are always
    skipped."""
    fidelity_profile: Path | None = None
    """JSON file with measured settings by model, such as a report of ``leyline eval``: the tokens
    after an edit that are computed again, and the note in shortened messages."""
    edit_timing: Literal["now", "auto", "wait"] = "auto"
    """``now``: a policy's edits are sent on the turn on which it makes them. ``wait``: edits that
    reclaim tokens wait until they pay off. ``auto``: they wait if the engine can't splice."""
    edit_carry: Annotated[float, Field(ge=0, le=10)] = 0.002
    """Cost per turn of a token that stays, as a share of its prefill."""
    edit_need: Annotated[float, Field(ge=0, le=10)] = 0.25
    """Value of a reclaimed token in prefilled tokens, when the window is nearly full."""
    edit_pressure: Annotated[float, Field(gt=0, le=1)] = 0.8
    """Share of the model's window above which no edit waits."""
    undeclared: Annotated[dict[str, str], NoDecode] = Field(default_factory=dict)
    """Maps roles to modes for undeclared edits: ``tool=amortize``."""
    reasoning_edits: OwnMode = "amortize"
    """Edits by which a chat template only strips the model's own thinking: ``amortize`` splices
    what comes after it, ``exact`` prefills it. A fidelity profile may make a model ``exact``."""
    compaction_edits: OwnMode = "amortize"
    """A history that gives way to a summary which the model wrote in the same session:
    ``amortize`` splices the summary where it is quoted, and what is left, ``exact`` prefills."""
    recurrent_edits: RecurrentEdits = RecurrentEdits.KEPT
    """Amortized edits on models with recurrent layers: ``kept`` copies recurrent states, which
    still hold what was cut, ``exact`` prefills. Other models ignore it."""
    tool_order: ToolOrder = "sent"
    """``first`` sends a session's tools in the order in which it first had them, and new ones after
    them: a client that reconnects to tool servers may have them in another order."""
    allow_request_policy: bool = True
    """Whether a request may choose its policy (``leyline.policy``)."""
    cache_scope: CacheScope = "shared"
    """Sharing of KV between equal prefixes: ``shared`` is among all tenants, ``tenant`` is only
    within each tenant. For ``tenant`` the engine must know ``cache_salt``, as SGLang does."""
    reuse: Reuse = "off"
    """Content that the engine holds from another place or session of the tenant: ``off`` leaves it,
    ``observe`` counts what could be reused, ``live`` copies it instead of prefilling it."""
    reuse_margin: Annotated[float, Field(ge=0, le=100)] = 0.0
    """Smallest lead of the likeliest first token over the second, in logits, at which a turn that
    copied content is trusted. 0 trusts every one."""
    splice: bool = True
    """False turns off splicing and nothing else: edits become ordinary re-prefills."""

    retained_turns: Annotated[int, Field(ge=1, le=64)] = 4
    """Turns of a session that later ones may be spliced from."""
    session_ttl_s: Annotated[float, Field(gt=0)] = 3600.0
    """How long a session is kept after its last turn."""
    max_sessions: Annotated[int, Field(ge=1)] = 1000
    """Sessions in memory. Above the limit, the least recently used ones are dropped."""
    max_session_bytes: Annotated[int, Field(ge=MIB)] = 1024 * MIB
    """Size of all sessions together. Above the limit, the least recently used ones are dropped."""
    max_stored_responses: Annotated[int, Field(ge=0)] = 10_000
    """Responses kept for ``previous_response_id``; 0 keeps none, even if ``store`` is set."""
    max_stored_response_bytes: Annotated[int, Field(ge=MIB)] = 256 * MIB
    """Size of all stored responses. Above the limit, the least recently used ones are dropped."""
    stored_response_ttl_s: Annotated[float, Field(gt=0)] = 86_400.0
    """How long a stored response is kept after its last use."""

    compaction_tokens: Annotated[int, Field(ge=16, le=32_768)] = 2048
    """Longest summary that a compaction may write."""

    claims_interval_s: Annotated[float, Field(gt=0)] = 5.0
    """Time between two checks of the engine's claims, while there are live ones."""

    connect_timeout_s: Annotated[float, Field(gt=0)] = 5.0
    """Longest wait for a new connection to an engine, and for a free connection."""
    first_token_timeout_s: Annotated[float, Field(gt=0)] = 600.0
    """Longest time from the request to the first byte of a stream or of a whole answer."""
    idle_timeout_s: Annotated[float, Field(gt=0)] = 120.0
    """Longest pause between two chunks of an answer."""
    total_timeout_s: Annotated[float, Field(gt=0)] | None = None
    """Longest time for a whole answer; None for no limit."""
    receipt_timeout_s: Annotated[float, Field(gt=0, le=60)] = 0.5
    """Longest wait for the receipt of an answer, including all questions to the engine. After that,
    the answer ends without a receipt, and later edits can't use the turn as a source."""
    max_answer_bytes: Annotated[int, Field(ge=MIB)] = 64 * MIB
    """Size of an engine's answer that is read whole, or kept while it is passed on in another API's
    format. A longer answer is abandoned (502), and its connection is closed."""
    max_event_bytes: Annotated[int, Field(ge=64 * 1024)] = 8 * MIB
    """The same for one event of an engine's stream."""
    max_upstream_connections: Annotated[int, Field(ge=1)] = 1024
    """Connections to one engine. Further requests wait for a free connection."""
    failover: bool = True
    """Send a request to another engine if its engine fails before the first byte."""
    pass_through: PassThrough = "stateless"  # noqa: S105
    """Other paths below ``/v1`` that go upstream unchanged. ``stateless``: a fixed list of paths
    that store nothing there, such as embeddings. ``all``: every path, under the proxy's own
    upstream key, so that any caller can do whatever that key allows."""
    handshake_interval_s: Annotated[float, Field(gt=0)] = 10.0
    """Time between two checks of an engine that is up."""
    handshake_retry_s: Annotated[float, Field(gt=0)] = 1.0
    """Time between two checks of an engine that is down."""

    api_keys: Annotated[tuple[SecretStr, ...], NoDecode] = ()
    """``tenant:key`` or ``tenant:sha256:HEX``, optionally followed by `` expires=TIME``. Without
    any keys, every caller is the tenant ``default``."""
    api_keys_file: Path | None = None
    """File with one such line per key, reloaded when it changes. ``#`` starts a comment."""
    tenants: dict[str, TenantSettings] = Field(default_factory=dict)
    """Settings of each tenant, by name."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Lowest level that is logged."""
    log_format: Literal["auto", "json", "console"] = "auto"
    """``json``: one object per line; ``console``: for people; ``auto``: this on a terminal."""

    @field_validator("api_keys", "allowed_hosts", mode="before")
    @classmethod
    def _split_words(cls, value: object) -> object:
        return _words(value) if isinstance(value, str) else value

    @field_validator("allowed_hosts")
    @classmethod
    def _check_hosts(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for host in value:
            if parse_authority(host) is None:
                raise ValueError(
                    f"{host[:80]!r} isn't NAME or NAME:PORT, such as gpu1 or gpu1:8790"
                )
        return value

    @field_validator("undeclared", mode="before")
    @classmethod
    def _split_rules(cls, value: object) -> object:
        items = _words(value) if isinstance(value, str) else value
        if not isinstance(items, (list, tuple)):
            return items
        rules: dict[str, str] = {}
        for item in items:
            role, sign, mode = str(item).partition("=")
            if not sign:
                raise ValueError(f"{item!r} is not ROLE=MODE, for example tool=amortize")
            rules[role.strip()] = mode.strip()
        return rules

    @field_validator("loop")
    @classmethod
    def _check_loop(cls, value: str) -> str:
        if value == "uvloop" and find_spec(value) is None:
            raise ValueError("uvloop isn't installed; auto works without it")
        return value

    @field_validator("upstreams", mode="before")
    @classmethod
    def _bare_urls(cls, value: object) -> object:
        if not isinstance(value, dict):
            return value
        return {
            name: {"url": item} if isinstance(item, str) else item for name, item in value.items()
        }

    @field_validator("upstreams")
    @classmethod
    def _check_names(cls, value: dict[str, UpstreamSettings]) -> dict[str, UpstreamSettings]:
        for name in value:
            if (broken := _ENGINE_NAME.broken(name)) is not None:
                raise ValueError(f"the name {name[:80]!r} {broken}")
        return value

    @model_validator(mode="after")
    def _check_one_way(self) -> Settings:
        if self.upstream is not None and self.upstreams:
            raise ValueError("give engines as upstream or as upstreams, not both")
        if self.router is not None and not self.engines():
            raise ValueError("router needs the engines behind it: name them in upstreams")
        if self.workers > 1 and self.warm_start_path is not None:
            raise ValueError("warm_start_path needs workers: 1; run several proxies instead")
        for tenant, own in self.tenants.items():
            unknown = set(own.upstreams or ()) - set(self.engines())
            if unknown:
                raise ValueError(
                    f"tenants.{tenant}.upstreams names {sorted(unknown)}; "
                    f"there are {sorted(self.engines())}"
                )
        return self

    @model_validator(mode="after")
    def _check_money(self) -> Settings:
        check_money(self, {name: own.budgets for name, own in self.tenants.items()})
        return self

    @model_validator(mode="after")
    def _check_policies(self) -> Settings:
        named = self.policy or any(tenant.policy for tenant in self.tenants.values())
        if self.policies_file is not None and named:
            raise ValueError("give policies in policies_file or as policy, not both")
        return self

    @model_validator(mode="after")
    def _check_key_lines(self) -> Settings:
        for secret in self.api_keys:
            with _naming("api_keys"):
                parse_key(secret.get_secret_value())
        for tenant, own in self.tenants.items():
            with _naming("tenants"):
                check_tenant(tenant)
            for secret in own.api_keys:
                with _naming(f"tenants.{tenant}.api_keys"):
                    parse_key(f"{tenant}:{secret.get_secret_value()}")
        return self

    @model_validator(mode="after")
    def _check_admin(self) -> Settings:
        if self.admin_port is not None and self.admin_key is None:
            raise ValueError("admin_port needs an admin_key; leyline keys new makes a good one")
        if self.metrics_on_admin and self.admin_port is None:
            raise ValueError("metrics_on_admin needs an admin_port")
        if self.admin_port and self.admin_port == self.port and self._one_address():
            raise ValueError("admin_port must differ from port")
        return self

    def _one_address(self) -> bool:
        """Return True if both ports are at one address."""
        hosts = {self.host, self.admin_host}
        return len(hosts) == 1 or not hosts.isdisjoint({"0.0.0.0", "::", ""})  # noqa: S104

    def engines(self) -> dict[str, UpstreamSettings]:
        """Return the engines by name; none if an engine runs in this process."""
        if self.upstream is not None:
            return {ONLY_ENGINE: UpstreamSettings(url=self.upstream)}
        return self.upstreams


def secret_of(key: SecretStr | None) -> str | None:
    """Return the secret itself."""
    return key.get_secret_value() if key is not None else None


def _words(value: str) -> list[str]:
    return [word.strip() for word in value.split(",") if word.strip()]


@contextmanager
def _naming(setting: str) -> Iterator[None]:
    """Put the setting's name before the error."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{setting}: {error}") from error
