"""The facts that a worker measures inside a real engine."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from copy import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm_engine import BLOCK, CONTEXT, engine, layers_of, runner_of

from leyline_engine.vllm.facts.layouts import flat_storage
from leyline_engine.vllm.facts.setup import capability, read_setup
from leyline_engine.vllm.facts.worker_facts import WorkerFacts, measure_layouts, read_worker_facts
from leyline_lab.stand_ins.random_models import RandomKind, build_random

ENGINES = {RandomKind.LLAMA: "float32", RandomKind.QWEN3: "float16"}
PROMPT = [7 * i % 4001 + 2 for i in range(100)]


class Started:
    """An engine, and what it answered and its worker measured at first."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm
        self.runner = runner_of(llm)
        self.layers = layers_of(self.runner)
        self.config = self.runner.vllm_config
        self.before = self.answer()
        self.empty()
        self.state = self.counters()
        self.facts = self.measure()
        self.zero = not any(flat_storage(each.kv_cache).any() for each in self.layers.values())

    def measure(self) -> WorkerFacts:
        """Measure the worker."""
        caches = {name: layer.kv_cache for name, layer in self.layers.items()}
        return read_worker_facts(self.runner, caches)

    def empty(self) -> None:
        """Empty the KV cache, as it is when an engine starts."""
        assert self.llm.reset_prefix_cache()
        for layer in self.layers.values():
            layer.kv_cache.zero_()

    def answer(self) -> list[tuple[int, float]]:
        """Tokens after the prompt, and their log probabilities."""
        from vllm import SamplingParams

        wanted = SamplingParams(temperature=0, max_tokens=8, logprobs=0, ignore_eos=True)
        prompt = {"prompt_token_ids": PROMPT}
        (output,) = self.llm.generate([prompt], wanted, use_tqdm=False)
        return [
            (token, steps[token].logprob)
            for token, steps in zip(
                output.outputs[0].token_ids, output.outputs[0].logprobs, strict=True
            )
        ]

    def counters(self) -> dict[str, torch.Tensor]:
        """Tensors in which the runner keeps its batches."""
        names = ("seq_lens", "positions", "optimistic_seq_lens_cpu")
        kept = {name: getattr(self.runner, name).clone() for name in names}
        table = self.runner.input_batch.block_table[0]
        kept["table"] = table.get_device_tensor(8).clone()
        kept["slots"] = table.slot_mapping.gpu.clone()
        return kept


@pytest.fixture(scope="module", params=list(ENGINES), ids=str)
def started(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Started]:
    """An engine of each tiny model, with its worker's facts."""
    kind = request.param
    folder = build_random(kind, tmp_path_factory.mktemp("vllm") / kind.value)
    with engine(folder, dtype=ENGINES[kind]) as llm:
        yield Started(llm)


def test_a_worker_of_a_plain_model_can_splice(started: Started) -> None:
    """Layouts of all layers, the pool's size and the model's rotation are known."""
    facts = started.facts
    assert facts.refusal == ""
    assert facts.splices
    assert facts.layouts is not None
    assert list(facts.layouts) == list(started.layers)
    assert (facts.blocks, facts.block_size) == (256, BLOCK)
    assert facts.kv_facts is not None
    assert facts.kv_facts.bytes_per_token == 2 * 2 * 2 * 32 * facts.dtype.itemsize
    assert facts.kv_facts.capacity_tokens == 255 * BLOCK
    assert facts.rotary_facts is not None
    assert (facts.rotary_facts.pairing, facts.rotary_facts.rotary_dim) == ("half_split", 32)


def test_measured_rows_are_those_that_the_back_end_writes(started: Started) -> None:
    """Random rows in random slots are read by the strides exactly as they were written."""
    assert started.facts.layouts is not None
    for name, layer in started.layers.items():
        layout = started.facts.layouts[name]
        slots = torch.randperm(256 * BLOCK)[:64]
        key, value = (torch.randn(64, 2, 32).to(started.facts.dtype) for _ in range(2))
        layer.impl.do_kv_cache_update(layer, key, value, layer.kv_cache, slots)
        keys, values = layout.rows(flat_storage(layer.kv_cache))
        assert values is not None
        assert torch.equal(keys[slots // BLOCK, slots % BLOCK], key)
        assert torch.equal(values[slots // BLOCK, slots % BLOCK], value)
        layer.kv_cache.zero_()


def test_the_rotation_turns_keys_as_the_models_own_module_does(started: Started) -> None:
    """The frequencies are the module's own to the last bit, and so is a turn in fp64."""
    from leyline_engine.rotary.tables import rotary_modules

    (module,) = rotary_modules(started.runner.get_model())
    assert started.facts.rotary is not None
    rotary = started.facts.rotary.whole()
    inv_freq = module._compute_inv_freq(module.base).to("cpu")
    (distinct,) = rotary.distinct
    assert torch.equal(distinct.inv_freq, inv_freq)
    raw = torch.randn(5, 2, 32, dtype=torch.float64)
    here, there = torch.randint(CONTEXT, (2, 5))

    def own(positions: torch.Tensor) -> torch.Tensor:
        angles = (positions.float()[:, None] * inv_freq).double()[:, None]
        first, second = raw.chunk(2, dim=-1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

    turned = distinct.rotate(own(here), here, there)
    assert (turned.double() - own(there)).abs().max() < 1e-6


def test_the_cache_is_empty_and_the_batch_untouched_afterwards(started: Started) -> None:
    """No number that was measured with is left, and nothing of the runner's batch changed."""
    assert started.zero
    state = started.state
    started.empty()
    started.measure()
    assert all(torch.equal(state[name], now) for name, now in started.counters().items())


def test_the_engine_answers_as_it_did_before(started: Started) -> None:
    """A measured engine gives the same tokens and probabilities to the last bit."""
    assert started.answer() == started.before
    started.empty()


def test_keys_of_another_base_are_refused(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gate fails when the model's tables have frequencies that its keys don't turn by."""
    from leyline_engine.rotary.tables import rotary_modules

    (module,) = rotary_modules(started.runner.get_model())
    other = copy(module)
    other.base = 500000.0
    other._buffers = {"cos_sin_cache": other._compute_cos_sin_cache()}
    monkeypatch.setattr("leyline_engine.rotary.measured_keys.rotary_modules", lambda model: [other])
    assert started.measure().refusal == "no one rotation explains how a layer's keys turn"


@pytest.mark.parametrize("block", [2, 4])
def test_a_cache_in_use_is_refused(started: Started, block: int) -> None:
    """Rows in the blocks that a measurement writes to are never overwritten."""
    layer = list(started.layers.values())[-1]
    layer.kv_cache[block, 0, 0, 0] = 3.0
    assert started.measure().refusal == "a KV cache that isn't empty"
    assert layer.kv_cache[block, 0, 0, 0] == 3.0
    started.empty()


def test_a_failure_to_measure_is_an_answer(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine whose probe breaks after it wrote gets a refusal, and its cache is empty again."""
    from leyline_engine.vllm.facts import probe

    run = probe._run

    def broken(*arguments: Any) -> None:
        run(*arguments)
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(probe, "_run", broken)
    facts = started.measure()
    assert facts.refusal == "the model can't be measured (RuntimeError)"
    assert facts.fingerprint == started.facts.fingerprint
    assert not any(flat_storage(each.kv_cache).any() for each in started.layers.values())


def test_facts_travel_between_processes(started: Started) -> None:
    """Pickled facts are the same, rotation included."""
    again = pickle.loads(pickle.dumps(started.facts))  # noqa: S301  our own
    assert again.layouts == started.facts.layouts
    assert again.rotary_facts == started.facts.rotary_facts
    assert started.facts.rotary is not None
    assert torch.equal(
        again.rotary.whole().inv_freq, started.facts.rotary.whole().distinct[0].inv_freq
    )


def with_connector(started: Started) -> Any:
    """The engine's settings as they are with Leyline's connector."""
    config = copy(started.config)
    config.kv_transfer_config = SimpleNamespace(kv_connector="LeylineConnector", kv_role="kv_both")
    return config


def test_the_capability_of_a_plain_server_splices(started: Started) -> None:
    """With the connector, nothing of a plain server is refused, and its facts are in it."""
    config = with_connector(started)
    document = capability(config, started.runner.kv_cache_config, [started.facts])
    assert document.refusals == ()
    assert document.splices
    assert document.engine == "vllm"
    assert document.rotary == started.facts.rotary_facts
    assert document.kv == started.facts.kv_facts
    assert (document.vocab_size, document.max_context) == (4096, CONTEXT)


def test_the_capability_without_the_connector_names_it(started: Started) -> None:
    """A server that wasn't started with Leyline's connector is refused by that alone."""
    document = capability(started.config, started.runner.kv_cache_config, [started.facts])
    assert document.unsupported_reason == "the KV connector none"
    assert not document.splices


def test_workers_that_refuse_or_differ_keep_the_engine_from_splicing(started: Started) -> None:
    """One rank's refusal is the engine's, and so is a difference between ranks."""
    config = with_connector(started)
    groups = started.runner.kv_cache_config
    other = WorkerFacts(rank=1, refusal="no room")
    assert capability(config, groups, [started.facts, other]).unsupported_reason == "no room"
    differing = WorkerFacts(rank=1, fingerprint="another")
    document = capability(config, groups, [started.facts, differing])
    assert "ranks that differ" in document.unsupported_reason
    assert capability(config, groups, []).unsupported_reason == "workers that measured nothing"


def test_the_setup_is_read_from_the_running_engine(started: Started) -> None:
    """The allow-list sees the settings that the engine resolved."""
    setup = read_setup(with_connector(started), started.runner.kv_cache_config)
    assert (setup.block_size, setup.hash_block_size) == (BLOCK, 0)
    assert f"torch.{setup.kv_dtype}" == str(started.facts.dtype)
    assert setup.prefix_caching
    assert not setup.attention_kinds


def test_layers_of_several_groups_are_refused(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Groups with block tables of their own are refused before anything is written."""
    config = copy(started.runner.kv_cache_config)
    config.kv_cache_groups = config.kv_cache_groups * 2
    monkeypatch.setattr(started.runner, "kv_cache_config", config)
    assert started.measure().refusal == "2 groups of KV caches"


def test_layouts_count_kernels_blocks(started: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers that are packed between each other's blocks are refused by name."""
    group = copy(started.runner.attn_groups[0][0])
    group.kernel_block_stride = 3
    monkeypatch.setattr(started.runner, "attn_groups", [[group]])
    with pytest.raises(Exception, match="packed between each other's blocks"):
        measure_layouts(started.runner)
