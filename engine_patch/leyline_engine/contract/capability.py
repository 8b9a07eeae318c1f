"""The capability document of the handshake."""

from __future__ import annotations

import msgspec

from .vocabulary import (
    ACTION_VERSION,
    CLAIM_ACTION,
    EDIT_ACTION,
    PROTOCOL_VERSION,
    PROVE_ACTION,
    RECEIPT_ACTION,
    REUSE_ACTION,
)

CAPABILITY_PATH = "/leyline/capability"
RECEIPT_PATH = "/leyline/receipts/{message_id}"
RECEIPT_IN_ANSWER = f"{RECEIPT_ACTION}@{ACTION_VERSION}"
"""One of a capability's actions if answers bring their records; see :mod:`.answer`."""
RENDERER_PATH = "/leyline/renderer"
"""Path of the engine's chat template, special tokens and ``tokenizer.json``."""
TOKENIZE_PATH = "/tokenize"
"""Path of the tokens of a chat request, unless the renderer's document names another."""
TOKENS_PATH = "/leyline/tokens"
"""The same for engines whose own ``/tokenize`` isn't exact for chat requests."""


def engine_actions(*, splices: bool, recurrent: bool = False) -> tuple[str, ...]:
    """Return the actions of an engine as its capability lists them.

    Args:
        splices: True if the engine can turn the keys of its model's pool.
        recurrent: True if the model has recurrent layers: a state that is taken from elsewhere
            brings all that it has read there, so that nothing is reused.
    """
    reuses = splices and not recurrent
    kinds = [EDIT_ACTION, CLAIM_ACTION, PROVE_ACTION, *([REUSE_ACTION] if reuses else [])]
    return tuple(f"{kind}@{ACTION_VERSION}" for kind in kinds)


class RotaryFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The rotation of the model's keys by position, read from its own rotary module."""

    rope_type: str
    """Such as ``yarn``; kinds of different layers are joined, as in ``default+yarn``. ``none``
    stands for layers that don't turn."""
    pairing: str
    """``interleaved`` (2i, 2i+1) or ``half_split`` (i, i+d/2), as the keys lie in the cache."""
    rotary_dim: int
    inv_freq_digest: str
    attention_scaling: float = 1.0


class KVFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The layout of the KV pool."""

    pool_class: str
    """``mla_latent`` (compressed latent and k_pe) or ``gqa``."""
    dtype: str
    layers: int
    bytes_per_token: int
    capacity_tokens: int
    page_tokens: int = 1
    """Tokens per page: prefixes are found, and spliced, in whole pages."""
    origin_tokens: int = 0
    """Spliced tokens whose keys are kept as computed, beside the pool; 0 if that isn't so."""
    origin_bytes: int = 0
    """Bytes that these take on each GPU, outside the pool."""


class StateFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The state that the model keeps per sequence, beside its rows per token."""

    window: int = 0
    """Rows that layers with a sliding window keep; 0 if they keep all, or if there are none."""
    recurrent_layers: int = 0
    edits: str = ""
    """Contract of edits on recurrent layers: ``kept``; empty if there are none."""
    bytes_per_state: int = 0
    """Bytes of one recurrent state with its convolutions' inputs, over all layers of a GPU."""
    slots: int = 0
    """Recurrent states that the engine holds at most, those of running requests included."""
    window_tokens: int = 0
    """Tokens whose rows the layers with a window hold at most, of all sequences together."""
    anchor_tokens: int = 1
    """A forward leaves an anchor at multiples of so many tokens from where it started."""


class Refusal(msgspec.Struct, frozen=True):
    """One thing that keeps an engine from splicing."""

    what: str
    """Name of it, in words for an operator."""
    fix: str = ""
    """The remedy, such as a flag to drop; empty if none is known."""


class Plugin(msgspec.Struct, frozen=True, kw_only=True):
    """The release of Leyline beside an engine; empty if it came before these fields."""

    version: str = ""
    """Version of the wheel that the plugin is a part of."""
    proxies: str = ""
    """Versions of earlier proxies whose edits it takes (PEP 440): ``>=0.1.0``."""


class Capability(msgspec.Struct, frozen=True, kw_only=True):
    """An engine's properties, and whether it splices."""

    engine: str
    engine_version: str
    model: str
    """Served model name."""
    model_fingerprint: str
    """Digest over configuration and the weights' identity; turns of another model are no source."""
    architecture: str
    vocab_size: int
    max_context: int
    splices: bool
    isolates: bool = False
    """True if requests with different ``cache_salt`` share no KV, not even of an equal prefix."""
    reuse_within: bool = False
    """True if reuse keeps to a request's ``within`` and ``own``; other engines ignore both."""
    unsupported_reason: str = ""
    """Reason why ``splices`` is false; all of them, if there are several."""
    refusals: tuple[Refusal, ...] = ()
    """The same one by one, each with its remedy; empty if the engine gives only the text."""
    protocol_version: str = PROTOCOL_VERSION
    actions: tuple[str, ...] = ()
    """Supported actions as ``type@version``."""
    rotary: RotaryFacts | None = None
    kv: KVFacts | None = None
    state: StateFacts | None = None
    """None if the model keeps nothing but rows, or if the engine doesn't splice."""
    speculative: str = ""
    """Algorithm of speculative decoding beside which it splices; empty for none."""
    draft_layers: int = 0
    """Layers of draft models whose KV is spliced, too."""
    sink: int = 0
    data_parallel: int = 1
    """Replicas behind one address, each with its own KV pool."""
    instance: str = ""
    """Name of this run of the engine: turns that an earlier run retained are gone."""
    plugin: Plugin = Plugin()

    @property
    def engine_label(self) -> str:
        """The engine and its version in words, such as ``sglang 0.5.23``."""
        if self.engine_version.startswith(f"{self.engine} "):
            return self.engine_version
        return f"{self.engine} {self.engine_version}"

    @property
    def receipt_in_answer(self) -> bool:
        """True if answers bring their records when envelopes ask for them: :mod:`.answer`."""
        return RECEIPT_IN_ANSWER in self.actions

    def is_of(self, model: str) -> bool:
        """Return True if ``model`` names the engine's model, or a LoRA adapter of it.

        SGLang takes ``base:adapter``; an adapter has its base's tokenizer and template.
        """
        return model == self.model or model.startswith(f"{self.model}:")

    @property
    def unsupported_fix(self) -> str:
        """The remedies of all refusals; empty unless all of them have one."""
        fixes = [refusal.fix for refusal in self.refusals]
        return "; ".join(dict.fromkeys(fixes)) if all(fixes) else ""

    @property
    def reuses(self) -> bool:
        """True if envelopes may ask for reuse."""
        return f"{REUSE_ACTION}@{ACTION_VERSION}" in self.actions
