"""Recurrent layers on the CPU equal the textbook's, one token at a time in float64."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from leyline_lab.sglang_cpu import linear_attention as on_cpu
from leyline_lab.sglang_cpu import state_space
from leyline_lab.sglang_cpu.recurrence import CHUNK, recur

TOLERANCE = 1e-5
LENGTHS = (1, 3, CHUNK, CHUNK + 1, 3 * CHUNK - 7)
HEADS, VALUE_HEADS, DIM, VALUE_DIM, WIDTH, SLOTS = 2, 4, 16, 24, 4, 11
PARTS = [HEADS * DIM, HEADS * DIM, VALUE_HEADS * VALUE_DIM]


@pytest.fixture(autouse=True)
def _fresh_inputs() -> None:
    print("torch's seed:", torch.seed())  # shown if a test fails


def one_by_one(  # noqa: PLR0917
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, state: Tensor, beta: Tensor | None
) -> tuple[Tensor, list[Tensor]]:
    """Outputs, and the state in front of each token and at the end, in float64."""
    state, outputs, states = state.double(), [], [state.double()]
    for at in range(len(query)):
        state = state * log_decay[at, :, None].double().exp()
        written = value[at].double()
        if beta is not None:
            read = torch.einsum("hvk,hk->hv", state, key[at].double())
            written = beta[at, :, None].double() * (written - read)
        state = state + written[..., None] * key[at, :, None].double()
        outputs.append(torch.einsum("hvk,hk->hv", state, query[at].double()))
        states.append(state)
    return torch.stack(outputs), states


def error(got: Tensor, expected: Tensor) -> float:
    return (got.double() - expected.double()).abs().max().item()


def unit(rows: Tensor) -> Tensor:
    return rows.double() / (rows.double().square().sum(-1, keepdim=True) + 1e-6).sqrt()


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("dims", [1, DIM], ids=["by head", "by key"])
@pytest.mark.parametrize("delta", [True, False])
def test_a_recurrence_is_its_steps(length: int, dims: int, delta: bool) -> None:
    """Outputs and the states at the chunks' edges are those of one token after another."""
    query, key = (unit(torch.randn(length, HEADS, DIM)).float() for _ in range(2))
    value = torch.randn(length, HEADS, VALUE_DIM)
    log_decay = -torch.rand(length, HEADS, dims).mul(9).sub(8).exp()
    beta = torch.rand(length, HEADS) if delta else None
    state = torch.randn(HEADS, VALUE_DIM, DIM)
    outputs, states = recur(query, key, value, log_decay, state, beta)
    expected, steps = one_by_one(query, key, value, log_decay, state, beta)
    edges = [*range(0, length, CHUNK), length]
    assert error(outputs, expected) < TOLERANCE
    assert error(torch.stack(states), torch.stack([steps[edge] for edge in edges])) < TOLERANCE
    undecayed, _ = one_by_one(query, key, value, 0 * log_decay, state, beta)
    assert error(outputs, undecayed) > 100 * TOLERANCE


@dataclass(frozen=True)
class Layer:
    """The inputs of a Gated DeltaNet for sequences in slots of a pool."""

    lengths: tuple[int, ...]
    mixed: Tensor
    a: Tensor
    b: Tensor
    A_log: Tensor
    dt_bias: Tensor
    pool: Tensor
    slots: Tensor

    def expected(self) -> tuple[list[Tensor], list[list[Tensor]]]:
        """Outputs and states of each sequence, :func:`one_by_one`."""
        q, k, v = self.mixed.split(PARTS, -1)
        query, key = (unit(x.view(-1, HEADS, DIM)).repeat_interleave(2, 1) for x in (q, k))
        value = v.view(-1, VALUE_HEADS, VALUE_DIM)
        steps = (self.a.double() + self.dt_bias.double()).exp().log1p()
        log_decay = -(self.A_log.double().exp() * steps)[..., None]
        beta = 1 / (1 + (-self.b.double()).exp())
        outputs, states = [], []
        for slot, (start, end) in zip(self.slots.tolist(), pairwise(self.starts()), strict=True):
            part = slice(start, end)
            output, found = one_by_one(
                query[part] * DIM**-0.5,
                key[part],
                value[part],
                log_decay[part],
                self.pool[slot],
                beta[part],
            )
            outputs.append(output)
            states.append(found)
        return outputs, states

    def starts(self) -> list[int]:
        return [sum(self.lengths[:count]) for count in range(len(self.lengths) + 1)]


def layer(lengths: tuple[int, ...]) -> Layer:
    tokens = sum(lengths)
    return Layer(
        lengths,
        torch.randn(tokens, sum(PARTS)),
        torch.randn(tokens, VALUE_HEADS),
        torch.randn(tokens, VALUE_HEADS),
        torch.linspace(-7.5, 1.0, VALUE_HEADS),
        torch.randn(VALUE_HEADS),
        torch.randn(SLOTS, VALUE_HEADS, VALUE_DIM, DIM),
        torch.randperm(SLOTS - 1)[: len(lengths)].int() + 1,
    )


def test_prompts_run_through_the_delta_rule() -> None:
    """A batch of prompts goes on from the states in its slots, leaves its own there, and returns
    those at the chunks' edges; other slots keep theirs."""
    given = layer(LENGTHS)
    outputs, steps = given.expected()
    pool = given.pool.clone()
    q, k, v = given.mixed.split(PARTS, -1)
    decays, beta = on_cpu.delta_gates(given.A_log, given.a, given.b, given.dt_bias)
    got, _, chunks = on_cpu.delta_prompts(
        q.view(1, -1, HEADS, DIM),
        k.view(1, -1, HEADS, DIM),
        v.view(1, -1, VALUE_HEADS, VALUE_DIM),
        decays,
        beta,
        initial_state=pool,
        initial_state_indices=given.slots,
        cu_seqlens=torch.tensor(given.starts(), dtype=torch.int32),
    )
    assert error(got[0], torch.cat(outputs)) < TOLERANCE
    edges = [
        states[edge]
        for states, n in zip(steps, LENGTHS, strict=True)
        for edge in range(0, n, CHUNK)
    ]
    assert error(chunks[0], torch.stack(edges)) < TOLERANCE
    after = given.pool.double().clone()
    after[given.slots.long()] = torch.stack([states[-1] for states in steps])
    assert error(pool, after) < TOLERANCE
    assert error(pool, given.pool) > 100 * TOLERANCE


def test_tokens_run_through_the_delta_rule() -> None:
    """One token of each sequence does the same; a row that pads the batch touches only slot 0."""
    given = layer((1,) * 5)
    outputs, steps = given.expected()
    pool, out = given.pool.clone(), torch.empty(5, 1, VALUE_HEADS, VALUE_DIM)
    slots = given.slots.clone()
    slots[2] = -1
    on_cpu.delta_tokens(
        mixed_qkv=given.mixed,
        a=given.a,
        b=given.b,
        A_log=given.A_log,
        dt_bias=given.dt_bias,
        initial_state=pool,
        out=out,
        ssm_state_indices=slots,
    )
    real = [0, 1, 3, 4]
    assert error(out[real, 0], torch.cat(outputs)[real]) < TOLERANCE
    after = given.pool.double().clone()
    after[slots[real].long()] = torch.stack([steps[row][-1] for row in real])
    assert error(pool[1:], after[1:]) < TOLERANCE


@pytest.mark.parametrize("lower", [None, -5.0])
def test_kimis_delta_rule_decays_by_key(lower: float | None) -> None:
    """Prompts and tokens decay each key by its own gate, which may have a lower bound; the states
    in front of the chunks that the tree wants are written down."""
    given = layer(LENGTHS)
    heads, tokens = VALUE_HEADS, sum(LENGTHS)
    q, k = torch.randn(2, 1, tokens, heads, DIM)
    v = torch.randn(1, tokens, heads, VALUE_DIM)
    a, bias = torch.randn(tokens, heads * DIM), torch.randn(heads * DIM)
    x = (a + bias).double().view(tokens, heads, DIM)
    rate = given.A_log.double().exp()[:, None]
    log_decay = lower / (1 + (-rate * x).exp()) if lower else -rate * x.exp().log1p()
    beta = 1 / (1 + (-given.b.double()).exp())
    wanted = torch.tensor([-1, -1, 0, 1, 2])
    gates = {"A_log": given.A_log.view(1, 1, -1, 1), "dt_bias": bias, "lower_bound": lower}
    pool, tracked = given.pool.clone(), torch.zeros(len(LENGTHS), *given.pool.shape[1:])
    got, chunks = on_cpu.kimi_delta_prompts(
        q,
        k,
        v,
        a[None].view(1, tokens, heads, DIM),
        given.b[None],
        initial_state=pool,
        initial_state_indices=given.slots,
        cu_seqlens=torch.tensor(given.starts()),
        beta_is_raw=True,
        output_intermediate_states=True,
        track_state=tracked,
        track_chunk_idx=wanted,
        **gates,
    )
    one_token = given.pool.clone()
    first = torch.tensor(given.starts()[:-1])
    out = torch.empty(len(LENGTHS), 1, heads, VALUE_DIM)
    mixed = torch.cat([x[0, first].flatten(1) for x in (q, k, v)], -1)
    on_cpu.kimi_delta_tokens(
        mixed_qkv=mixed,
        a=a[first],
        b=given.b[first],
        initial_state=one_token,
        out=out,
        ssm_state_indices=given.slots,
        **gates | {"A_log": given.A_log},
    )
    at = 0
    for row, (start, end) in enumerate(pairwise(given.starts())):
        part, slot = slice(start, end), int(given.slots[row])
        expected, states = one_by_one(
            unit(q[0, part]) * DIM**-0.5,
            unit(k[0, part]),
            v[0, part],
            log_decay[part],
            given.pool[slot],
            beta[part],
        )
        assert error(got[0, part], expected) < TOLERANCE
        assert error(out[row, 0], expected[0]) < TOLERANCE
        assert error(pool[slot], states[-1]) < TOLERANCE
        assert error(one_token[slot], states[1]) < TOLERANCE
        for edge in range(0, end - start, CHUNK):
            assert error(chunks[0, at], states[edge]) < TOLERANCE
            if edge == CHUNK * wanted[row]:
                assert error(tracked[row], states[edge]) < TOLERANCE
            at += 1


@pytest.mark.parametrize("known", [True, False], ids=["goes on", "begins"])
def test_a_state_space_is_scanned(known: bool) -> None:
    """Prompts leave their outputs, their last states, those on the batch's grid, and those at
    places by name; one token of each gives what a prompt of one token gives."""
    heads, groups, chunk = VALUE_HEADS, HEADS, 16
    lengths = (1, 40, 2 * chunk, 5)
    starts = [sum(lengths[:count]) for count in range(len(lengths) + 1)]
    tokens = starts[-1]
    x, dt = torch.randn(1, tokens, heads, VALUE_DIM), torch.randn(1, tokens, heads)
    B, C = torch.randn(2, 1, tokens, groups, DIM) * DIM**-0.5
    A, D, bias = -torch.rand(heads), torch.randn(heads), torch.randn(heads)
    initial = torch.randn(len(lengths), heads, VALUE_DIM, DIM)
    out, named = torch.empty_like(x), torch.tensor([starts[1] + 9, starts[2] + 3])
    grid, ends, found = state_space.scan_prompts(
        x,
        dt,
        A,
        B,
        C,
        chunk,
        D=D,
        dt_bias=bias,
        cu_seqlens=torch.tensor(starts),
        out=out,
        initial_states=initial if known else None,
        track_end_locs=named,
    )
    steps = (dt[0] + bias).double().exp().log1p()
    read, key = (y[0].double().repeat_interleave(2, 1) for y in (C, B))
    pool, one_token = torch.randn(SLOTS, heads, VALUE_DIM, DIM), torch.empty(4, heads, VALUE_DIM)
    slots = torch.tensor([7, 1, 3, 5])
    pool[slots] = initial if known else torch.zeros(())
    wide = {"A": A[:, None, None].expand(-1, VALUE_DIM, DIM), "D": D[:, None].expand(-1, VALUE_DIM)}
    first = torch.tensor(starts[:-1])
    state_space.scan_tokens(
        pool,
        x[0, first],
        dt[0, first, :, None].expand(-1, -1, VALUE_DIM),
        B=B[0, first],
        C=C[0, first],
        dt_bias=bias[:, None].expand(-1, VALUE_DIM),
        state_batch_indices=slots,
        out=one_token,
        **wide,
    )
    at: dict[int, Tensor] = {}
    for row, (start, end) in enumerate(pairwise(starts)):
        part = slice(start, end)
        expected, states = one_by_one(
            read[part],
            key[part],
            x[0, part] * steps[part][..., None],
            (steps[part] * A.double())[..., None],
            initial[row] if known else torch.zeros_like(initial[row]),
            None,
        )
        expected += x[0, part].double() * D.double()[:, None]
        assert error(out[0, part], expected) < TOLERANCE
        assert error(ends[row], states[-1]) < TOLERANCE
        assert error(one_token[row], expected[0]) < TOLERANCE
        assert error(pool[slots[row]], states[1]) < TOLERANCE
        at |= dict(zip(range(start, end), states, strict=False))
    assert error(grid[0], torch.stack([at[place] for place in range(0, tokens, chunk)])) < TOLERANCE
    assert found is not None
    assert error(found[0], torch.stack([at[place] for place in named.tolist()])) < TOLERANCE


@pytest.mark.parametrize("bias", [True, False])
def test_prompts_are_convolved(bias: bool) -> None:
    """Each channel of a prompt sees its last inputs: those in its slot, if it goes on from them,
    otherwise zeros; its slot then holds the last ones."""
    channels = 5
    starts = torch.tensor([0, 1, 3, 3 + WIDTH, 93 + WIDTH])
    inputs, weight = torch.randn(channels, 93 + WIDTH), torch.randn(channels, WIDTH)
    pool = torch.randn(SLOTS, channels, WIDTH - 1)
    offset = torch.randn(channels) if bias else None
    slots, goes_on = torch.tensor([4, 9, 2, 7]), torch.tensor([True, False, True, True])
    after = pool.clone()
    got = on_cpu.convolve_prompts(
        inputs,
        weight,
        offset,
        conv_states=after,
        query_start_loc=starts,
        cache_indices=slots,
        has_initial_state=goes_on,
    )
    expected, states = torch.empty(got.shape, dtype=torch.float64), pool.double().clone()
    for row, (start, end) in enumerate(pairwise(starts.tolist())):
        seen = [*(goes_on[row] * pool[slots[row]].T), *inputs[:, start:end].T]
        for at in range(end - start):
            window = torch.stack(seen[at : at + WIDTH], -1).double()
            total = (window * weight.double()).sum(-1) + (0 if offset is None else offset.double())
            expected[:, start + at] = total / (1 + (-total).exp())
        states[slots[row]] = torch.stack(seen[1 - WIDTH :], -1).double()
    assert error(got, expected) < TOLERANCE
    assert error(after, states) < TOLERANCE
    assert error(after, pool) > 100 * TOLERANCE


def test_tokens_are_convolved() -> None:
    """One token of each sequence gives what a prompt of one token gives."""
    inputs, weight = torch.randn(3, 5), torch.randn(5, WIDTH)
    pool, slots = torch.randn(SLOTS, 5, WIDTH - 1), torch.tensor([8, 1, 6], dtype=torch.int32)
    one, other = pool.clone(), pool.clone()
    starts, goes_on = torch.arange(4), torch.ones(3, dtype=torch.bool)
    expected = on_cpu.convolve_prompts(
        inputs.T,
        weight,
        None,
        conv_states=one,
        query_start_loc=starts,
        cache_indices=slots,
        has_initial_state=goes_on,
    )
    got = on_cpu.convolve_tokens(inputs, other, weight, None, "silu", conv_state_indices=slots)
    assert error(got.T, expected) == 0
    assert torch.equal(one, other)


def test_projections_are_split() -> None:
    """Each key head's queries, keys, values, z, b and a go to the places of their heads, from
    either layout."""
    head_parts = [
        (torch.randn(7, n) for n in (DIM, DIM, 2 * VALUE_DIM, 2 * VALUE_DIM, 2, 2))
        for _ in range(HEADS)
    ]
    q, k, v, z, b, a = ([*column] for column in zip(*head_parts, strict=True))
    by_head = torch.cat([torch.cat(row, -1) for row in zip(q, k, v, z, strict=True)], -1)
    gates = torch.cat([torch.cat(row, -1) for row in zip(b, a, strict=True)], -1)
    rows = torch.cat([*q, *k, *v], -1)
    expected = (rows, torch.cat(z, -1).view(7, VALUE_HEADS, -1), torch.cat(b, -1), torch.cat(a, -1))
    shape = (HEADS, VALUE_HEADS, DIM, VALUE_DIM)
    flat = (torch.cat([rows, *z], -1), torch.cat([*b, *a], -1))
    for got in (
        on_cpu.split_projections(by_head, gates, *shape),
        on_cpu.split_flat_projections(*flat, *shape),
    ):
        assert all(torch.equal(one, other) for one, other in zip(got, expected, strict=True))


@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
@pytest.mark.parametrize("first", [True, False], ids=["norm first", "gate first"])
@pytest.mark.parametrize("group", [None, 4])
def test_a_norm_is_gated(activation: str, first: bool, group: int | None) -> None:
    """Rows over the root of their groups' mean square go by weight, and by gate before or after."""
    rows, gate, weight = 3 * torch.randn(9, DIM), torch.randn(9, DIM), torch.randn(DIM)
    opened = (gate if activation == "silu" else 1) / (1 + (-gate.double()).exp())
    before = rows.double() * (1 if first else opened)
    groups = before.view(9, -1, group or DIM)
    scale = (groups.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    expected = (groups / scale).view(9, DIM) * weight.double() * (opened if first else 1)
    options = {"group_size": group, "norm_before_gate": first, "activation": activation}
    got = on_cpu.grouped_norm(x=rows, weight=weight, bias=None, z=gate, is_rms_norm=True, **options)
    assert error(got, expected) < TOLERANCE
    if first and group is None:
        assert torch.equal(got, on_cpu.gated_norm(rows, gate, weight, None, activation))


def test_attention_is_gated() -> None:
    """Each number of the attention goes by its gate's sigmoid."""
    attended, gate = torch.randn(9, HEADS * DIM), torch.randn(9, HEADS, DIM)
    expected = attended.double() / (1 + (-gate.double().view(9, -1)).exp())
    assert error(on_cpu.gated(attended, gate), expected) < TOLERANCE


def test_a_shared_expert_is_gated() -> None:
    """Its output goes by one gate per token, and is added to that of others."""
    hidden, gate, shared, total = torch.randn(9, DIM), torch.randn(DIM), *torch.randn(2, 9, DIM)
    expected = shared.double() / (1 + (-(hidden.double() @ gate.double())).exp())[:, None]
    assert error(on_cpu.gated_share(hidden, gate, shared), expected) < TOLERANCE
    both = total.clone()
    on_cpu.add_gated_share(hidden, gate, shared, both)
    assert error(both, total.double() + expected) < TOLERANCE


def test_states_are_copied_to_the_trees_slots() -> None:
    """The sequences that the mask names leave their states of all layers in their targets; freed
    slots, and those of other sequences, are left alone."""
    pools = [torch.randn(3, SLOTS, 5, 2), torch.randn(3, SLOTS, 4)]
    after = [pool.clone() for pool in pools]
    slots, targets = torch.tensor([1, 2, -1, 4, 9]), torch.tensor([5, 6, 7, -1, 0])
    mask = torch.tensor([True, False, True, True, True])
    on_cpu.copy_all_tracked(*after, slots, mask, targets, 4)
    for pool in pools:
        pool[:, 5] = pool[:, 1].clone()
    assert all(torch.equal(pool, got) for pool, got in zip(pools, after, strict=True))
