"""The vLLM setups in which Leyline doesn't splice, each refused by name.

A model's name decides nothing: :mod:`.measuring` asks the loaded model itself.
"""

from __future__ import annotations

from dataclasses import dataclass

from leyline_engine.contract import VLLM, Refusal, engine_versions, is_tested

KV_DTYPES = frozenset({"float32", "bfloat16", "float16"})
BLOCK_SIZES = frozenset({16, 32, 64, 128})
"""Tokens per block for which splices are planned."""
CONNECTOR = "LeylineConnector"
"""Value of ``kv_connector`` in ``--kv-transfer-config`` that switches Leyline on."""
_Row = tuple[object, str, str]
"""A condition, its name and its remedy."""
_OTHER_MODEL = "serve a model whose layers all have plain causal attention"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """A server's settings and a model's kind, as far as they decide on splicing.

    The defaults are a plain server of a supported model.
    """

    version: str = engine_versions(VLLM)[0]
    """vLLM's, without the part after a plus sign."""
    kv_dtype: str = "bfloat16"
    block_size: int = 16
    hash_block_size: int = 0
    """Tokens of a hash by which prefixes are found, unless it is of a block; 0 if it is."""
    prefix_caching: bool = True
    mla_on_cpu: bool = False
    chunked_prefill: bool = True
    groups: int = 1
    """Number of groups of layers with block tables of their own."""
    attention_kinds: frozenset[str] = frozenset()
    """Kinds of KV that plain causal attention doesn't have."""
    sparse_attention: bool = False
    fast_prefill: bool = False
    """True if layers that share the KV of others skip a prompt (``--kv-sharing-fast-prefill``)."""
    generates: bool = True
    encodes_only: bool = False
    """True if only the encoder of a multimodal model runs."""
    prefix_lm: bool = False
    """True if the tokens of an image attend to each other in both directions."""
    prompt_embeddings: bool = False
    """True if a prompt may come as embeddings, without the tokens that a splice is planned by."""
    diffusion: bool = False
    lookback: bool = False
    """True for embeddings of several tokens (Engram), which a probe of one token can't show."""
    speculative: str = ""
    """Method; empty for none."""
    pipeline_parallel: int = 1
    context_parallel: int = 1
    """Number of ranks that share one sequence, in prefill or in decode."""
    data_parallel: int = 1
    elastic: bool = False
    micro_batches: bool = False
    connector: str = CONNECTOR
    """Name of the KV connector; empty for none."""
    connector_role: str = "kv_both"
    kv_offloading: bool = False
    sleep_mode: bool = False
    replaced_weights: bool = False
    """True if weights may be replaced while the server runs."""
    routed_experts: bool = False
    """True if answers bring the experts of each prompt token, which copied KV doesn't."""
    scheduler_class: str = ""
    """Module and name of one that is neither vLLM's nor Leyline's; empty for none."""


def refusals(setup: Setup) -> tuple[Refusal, ...]:
    """Return all that keeps ``setup`` from splicing, each with its remedy; empty if it can."""
    rows = (*_rows_of_model(setup), *_rows_of_cache(setup), *_rows_of_server(setup))
    return tuple(Refusal(what, fix) for applies, what, fix in rows if applies)


def _rows_of_model(setup: Setup) -> tuple[_Row, ...]:
    kinds = ", ".join(sorted(setup.attention_kinds))
    return (
        (
            setup.sparse_attention,
            "sparse attention with an index key (DSA)",
            "serve a model without DSA",
        ),
        (setup.attention_kinds, f"attention that is not plain and causal: {kinds}", _OTHER_MODEL),
        (
            setup.groups != 1,
            f"{setup.groups} groups of KV caches",
            "start with --disable-hybrid-kv-cache-manager, or serve a model whose layers all "
            "keep every token",
        ),
        (
            not setup.generates,
            "no generating model",
            "start with --runner generate, or serve a generating model",
        ),
        (setup.encodes_only, "only a multimodal encoder", "drop --mm-encoder-only"),
        (
            setup.prefix_lm,
            "images whose tokens attend to each other in both directions",
            "start with --language-model-only, or serve a text model",
        ),
        (setup.diffusion, "diffusion language model", "drop --diffusion-config"),
        (setup.lookback, "embeddings of several tokens (Engram)", _OTHER_MODEL),
    )


def _rows_of_cache(setup: Setup) -> tuple[_Row, ...]:
    nearest = min(sorted(BLOCK_SIZES), key=lambda size: abs(size - setup.block_size))
    return (
        (
            setup.mla_on_cpu,
            "MLA on a CPU, where vLLM has no prefix caching",
            "serve the model on a GPU",
        ),
        (
            not setup.prefix_caching and not setup.mla_on_cpu,
            "prefix caching is off",
            "start with --enable-prefix-caching",
        ),
        (
            setup.kv_dtype not in KV_DTYPES,
            f"KV dtype {setup.kv_dtype}",
            "start with --kv-cache-dtype bfloat16",
        ),
        (
            setup.block_size not in BLOCK_SIZES,
            f"blocks of {setup.block_size} tokens",
            f"start with --block-size {nearest}",
        ),
        (
            setup.hash_block_size,
            f"hashes of {setup.hash_block_size} tokens in blocks of {setup.block_size}",
            "drop --prefix-match-unit",
        ),
        (
            setup.fast_prefill,
            "layers that skip prompts, as they share KV",
            "drop --kv-sharing-fast-prefill",
        ),
        (
            setup.connector != CONNECTOR,
            f"the KV connector {setup.connector or 'none'}",
            f"name {CONNECTOR} alone in --kv-transfer-config",
        ),
        (
            setup.connector_role != "kv_both",
            f"the KV connector's role {setup.connector_role}",
            "set kv_role to kv_both in --kv-transfer-config",
        ),
        (setup.kv_offloading, "KV offloading", "drop --kv-offloading-size"),
        (setup.sleep_mode, "sleep mode, which drops KV", "drop --enable-sleep-mode"),
        (
            setup.replaced_weights,
            "weights that may be replaced under their KV",
            "drop --weight-transfer-config",
        ),
    )


def _rows_of_server(setup: Setup) -> tuple[_Row, ...]:
    return (
        (
            not is_tested(VLLM, setup.version),
            f"vLLM {setup.version}",
            f"install vLLM {' or '.join(engine_versions(VLLM))}",
        ),
        (
            # What lies between two copies is prefilled as a part of its prompt.
            not setup.chunked_prefill,
            "prompts that are never prefilled in parts",
            "start with --enable-chunked-prefill",
        ),
        (
            setup.prompt_embeddings,
            "prompts of embeddings in place of tokens",
            "drop --enable-prompt-embeds",
        ),
        (
            setup.speculative,
            f"speculative decoding ({setup.speculative})",
            "drop --speculative-config and --spec-method",
        ),
        (
            setup.pipeline_parallel != 1,
            "pipeline parallelism",
            "start with --pipeline-parallel-size 1",
        ),
        (
            setup.context_parallel != 1,
            "context parallelism",
            "start with --prefill-context-parallel-size 1 and --decode-context-parallel-size 1",
        ),
        (
            setup.data_parallel != 1,
            "data parallelism",
            "start with --data-parallel-size 1, and more servers",
        ),
        (setup.elastic, "elastic expert parallelism", "drop --enable-elastic-ep"),
        (setup.micro_batches, "batches in two halves", "drop --enable-dbo and --ubatch-size"),
        (
            setup.routed_experts,
            "routed experts in answers",
            "drop --enable-return-routed-experts",
        ),
        (
            setup.scheduler_class,
            f"the scheduler {setup.scheduler_class}",
            "drop --scheduler-cls",
        ),
    )
