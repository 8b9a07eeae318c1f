"""The amortize contract computed the long way round, with plain transformers only.

Hooks on the attention modules record, for every token that the model computes, what doesn't
depend on position: the key before rotation, and the value (MLA: the shared rotary key before
rotation, and the latent). The cache of an edited prompt is then put together piece by piece:

* a kept token's parts as they were, its key turned to the *target* position by the model's own
  rotary module and function, from scratch, scaling and all;
* every other token run through the plain model upon the cache so far.

Recurrent layers keep a state per sequence. Its contract has a name of its own, *kept*: after kept
tokens, the state is the one that their turn had at that place. It is had by running the turn again,
from the last place at which something was computed, to that position.

Nothing of this uses the product: no rotation by a difference, no plan, no pool, no tree.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from oracle_models import OracleModel
from transformers import DynamicCache
from transformers.cache_utils import LinearAttentionLayer

SINK = 32
"""Positions below this are computed again, says the contract; a literal on purpose."""


@dataclass(frozen=True, slots=True)
class Remembered:
    """The position-free parts of a run token sequence; per layer ``[T, heads, dim]``."""

    tokens: tuple[int, ...]
    keys: tuple[torch.Tensor, ...]
    """Before rotation. ``T`` may be one less than the tokens: the last was never fed."""
    others: tuple[torch.Tensor, ...]
    """Values, or MLA latents."""
    read: tuple[int, ...] = ()
    """Per token, the messages that it counts as a reader of, its own among them, as bits
    ``1 << message``. Empty where the tokens' messages weren't given."""
    history: tuple[_Stretch, ...] = ()
    """The origin of its tokens, where the model keeps a state."""

    @property
    def computed(self) -> int:
        """The number of leading tokens that have KV."""
        return int(self.keys[0].shape[0])


State = list[tuple[torch.Tensor | None, ...]]
"""By layer, what its convolutions and recurrences keep; nothing for attention."""


@dataclass(frozen=True, slots=True)
class _Stretch:
    """Tokens of a turn that were computed together, or kept of another turn."""

    start: int
    end: int
    before: State | None = None
    """State in front of computed tokens; None at a sequence's start."""
    turn: Remembered | None = None
    """The turn that kept tokens come from; None if they were computed."""
    place: int = 0
    """Place of the first in that turn."""


def state_of(subject: OracleModel, turn: Remembered, position: int) -> State | None:
    """The state that a turn had in front of a position, by running it to there."""
    if position == 0:
        return None
    stretch = next(each for each in turn.history if each.start < position <= each.end)
    if stretch.turn is not None:
        return state_of(subject, stretch.turn, stretch.place + position - stretch.start)
    parts = _Parts(subject)
    if stretch.start:
        parts.place(turn, 0, stretch.start)
        parts.set_state(stretch.before)
    parts.compute(turn.tokens[stretch.start : position], continued=True)
    return parts.state()


@dataclass(frozen=True, slots=True)
class Keep:
    """Tokens ``[start, end)`` of an earlier turn are here, unchanged."""

    turn: Remembered
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Fresh:
    """Tokens that no earlier turn supplies."""

    tokens: tuple[int, ...]


Piece = Keep | Fresh


@dataclass(frozen=True, slots=True)
class LongWay:
    """The contract's version of one turn."""

    logits: tuple[torch.Tensor, ...]
    """fp32 ``[vocab]`` of the last prompt token, then of each forced token."""
    reused: tuple[int, ...]
    """Prompt positions whose parts come from an earlier turn."""
    turn: Remembered


def amortized_pieces(
    source: Remembered, edits: Sequence[tuple[int, int, tuple[int, ...]]], tail: Sequence[int]
) -> list[Piece]:
    """The pieces that ``(start, end, replacement)`` edits of one source leave, and a tail."""
    pieces: list[Piece] = []
    at = 0
    for start, end, replacement in edits:
        pieces += [Keep(source, at, start), Fresh(tuple(replacement))]
        at = end
    return [*pieces, Keep(source, at, len(source.tokens)), Fresh(tuple(tail))]


def computed_anew(pieces: Sequence[Piece]) -> list[Piece]:
    """The same tokens, none of them kept."""
    return [
        Fresh(piece.turn.tokens[piece.start : piece.end]) if isinstance(piece, Keep) else piece
        for piece in pieces
    ]


def forgetting(pieces: Sequence[Piece], forgotten: Collection[int]) -> list[Piece]:
    """The same tokens, computed again from the first kept one on that has read forgotten text."""
    mask = sum(1 << message for message in forgotten)
    for number, piece in enumerate(pieces):
        if not isinstance(piece, Keep):
            continue
        turn, start, end = piece.turn, piece.start, piece.end
        reader = next((i for i in range(start, end) if turn.read[i] & mask), None)
        if reader is not None:
            rest = [Keep(turn, reader, end), *pieces[number + 1 :]]
            return [*pieces[:number], Keep(turn, start, reader), *computed_anew(rest)]
    return list(pieces)


def computed_anew_from(pieces: Sequence[Piece], position: int) -> list[Piece]:
    """The same tokens, none of them kept from a prompt position on."""
    at = 0
    for number, piece in enumerate(pieces):
        length = piece.end - piece.start if isinstance(piece, Keep) else len(piece.tokens)
        if isinstance(piece, Keep) and at + length > position:
            cut = piece.start + max(0, position - at)
            rest = [Keep(piece.turn, cut, piece.end), *pieces[number + 1 :]]
            return [*pieces[:number], Keep(piece.turn, piece.start, cut), *computed_anew(rest)]
        at += length
    return list(pieces)


def long_way_round(
    subject: OracleModel,
    pieces: Sequence[Piece],
    forced: Sequence[int],
    unfed: int | None = None,
    messages: Sequence[int] = (),
    *,
    copied: Collection[int] | None = None,
) -> LongWay:
    """Compute a prompt made of ``pieces``, then ``forced`` tokens one by one.

    Args:
        subject: the model.
        pieces: what the prompt consists of, in order; at least one token.
        forced: generated tokens, each fed to the model.
        unfed: a last generated token that belongs to the turn but is never fed.
        messages: which message each token of the turn belongs to, generated ones included.
        copied: the positions, of those that the contract lets an engine copy, that it has copied;
            None for all. Where state is kept, an engine can't copy at all places.
    """
    parts = _Parts(subject)
    prompt: list[tuple[int, Remembered | None, int]] = []
    for piece in pieces:
        match piece:
            case Keep(turn, start, end):
                prompt += [(turn.tokens[i], turn, i) for i in range(start, end)]
            case Fresh(tokens):
                prompt += [(token, None, 0) for token in tokens]
    last = len(prompt) - 1
    reused = [
        position
        for position, (_, turn, index) in enumerate(prompt)
        if turn is not None
        and (SINK <= position < last if copied is None else position in copied)
        and index < turn.computed
    ]
    if copied is not None and len(reused) < len(copied):
        raise ValueError("an engine copied what the contract doesn't keep")
    logits = _lay_out(parts, prompt, set(reused))
    answers = [logits, *(parts.compute([token]) for token in forced)]
    generated = (*forced, *(() if unfed is None else (unfed,)))
    whole = (*(token for token, _, _ in prompt), *generated)
    read = _readings(prompt, set(reused), messages)
    return LongWay(tuple(answers), tuple(reused), parts.remember(whole, read))


def placed(
    subject: OracleModel, turn: Remembered
) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """The cache's content of a turn that begins at position 0: per layer ``[T, heads, dim]``.

    Returns:
        Keys turned to their positions, and values or latents.
    """
    model: Any = subject.model
    family = _family(subject)
    positions = torch.arange(turn.computed)[None]
    keys = (
        family.rotate(
            attention,
            key.transpose(0, 1)[None],
            _angles(model, attention, key[None], positions),
        )[0].transpose(0, 1)
        for attention, key in zip(attentions(subject), turn.keys, strict=True)
    )
    return tuple(keys), turn.others


def attentions(subject: OracleModel) -> list[Any]:
    """The attention modules of a model, by layer."""
    found = {
        module.layer_idx: module
        for module in subject.model.modules()
        if any(hasattr(module, name) for name in ("k_proj", "qkv_proj", "kv_a_proj_with_mqa"))
    }
    layers = DynamicCache(config=subject.config).layers
    rows = [at for at, layer in enumerate(layers) if not isinstance(layer, LinearAttentionLayer)]
    return [found[layer] for layer in rows]


def _readings(
    prompt: Sequence[tuple[int, Remembered | None, int]],
    reused: set[int],
    messages: Sequence[int],
) -> tuple[int, ...]:
    """Per token, the messages that it counts as a reader of.

    All that is before it, and for a kept token all that ever was before it. A token that was
    computed before something was put in front of it counts as well: the contract knows a span's
    first reader by its place.
    """
    before = 0
    read: list[int] = []
    for position, message in enumerate(messages):
        before |= 1 << message
        if position in reused:
            _, turn, index = prompt[position]
            before |= turn.read[index] if turn is not None else 0
        read.append(before)
    return tuple(read)


def _lay_out(
    parts: _Parts, prompt: Sequence[tuple[int, Remembered | None, int]], reused: set[int]
) -> torch.Tensor:
    """Fill the cache left to right; the logits of the last position, which is computed."""
    logits: torch.Tensor | None = None
    start = 0
    while start < len(prompt):
        end = start + 1
        turn = prompt[start][1]
        keep = start in reused
        while (
            end < len(prompt)
            and (end in reused) == keep
            and not (keep and prompt[end][1:] != (turn, prompt[start][2] + end - start))
        ):
            end += 1
        if keep and turn is not None:
            parts.place(turn, prompt[start][2], end - start)
        else:
            logits = parts.compute([token for token, _, _ in prompt[start:end]])
        start = end
    if logits is None:
        raise ValueError("an empty prompt has no logits")
    return logits


class _Parts:
    """A growing transformers cache, and the position-free parts of what lies in it."""

    def __init__(self, subject: OracleModel) -> None:
        self._model: Any = subject.model
        self._subject = subject
        self._layers = attentions(subject)
        self._family = _family(subject)
        self._dtype = subject.kv_dtype
        self._cache = (
            DynamicCache(config=subject.config)
            if self._dtype is None
            else _RoundingCache(subject.config, self._dtype)
        )
        self._keys: list[list[torch.Tensor]] = [[] for _ in self._layers]
        self._others: list[list[torch.Tensor]] = [[] for _ in self._layers]
        self._history: list[_Stretch] = []
        self._recurrent = [
            layer for layer in self._cache.layers if isinstance(layer, LinearAttentionLayer)
        ]

    def state(self) -> State:
        """Copies of all that the cache keeps of the whole sequence."""
        return [
            tuple(
                None if tensor is None else tensor.clone()
                for tensor in (*layer.conv_states.values(), *layer.recurrent_states.values())
            )
            for layer in self._recurrent
        ]

    def set_state(self, state: State | None) -> None:
        """Let what is computed next start from a state."""
        for layer, (inputs, recurrence) in zip(self._recurrent, state or (), strict=bool(state)):
            with torch.inference_mode():
                if inputs is not None:
                    layer.update_conv_state(inputs.clone())
                if recurrence is not None:
                    layer.update_recurrent_state(recurrence.clone())
            layer.has_previous_state[0] = inputs is not None or recurrence is not None

    def compute(self, tokens: Sequence[int], *, continued: bool = False) -> torch.Tensor:
        """Run the plain model over the next tokens; fp32 logits ``[vocab]`` of the last.

        Args:
            continued: True if the state in front of them is set already.
        """
        start = self._cache.get_seq_length()
        if self._recurrent:
            if not continued and self._history and (kept := self._history[-1]).turn is not None:
                place = kept.place + kept.end - kept.start
                self.set_state(state_of(self._subject, kept.turn, place))
            before = self.state() if start else None
            self._history.append(_Stretch(start, start + len(tokens), before))
        with torch.inference_mode(), self._recorded():
            output = self._model(
                input_ids=torch.tensor([list(tokens)]),
                position_ids=torch.arange(start, start + len(tokens))[None],
                past_key_values=self._cache,
                use_cache=True,
            )
            if self._dtype is not None:
                self._round(start, self._dtype)
        logits: torch.Tensor = output.logits[0, -1].float().clone()
        return logits

    def _round(self, start: int, dtype: torch.dtype) -> None:
        """Remember what was computed last as it was kept: rounded where it stands."""
        rotary = self._model.model.rotary_emb
        # Turning scales, in either direction.
        scale = float(getattr(rotary, "attention_scaling", 1.0)) ** 2
        for index, attention in enumerate(self._layers):
            key, other = self._keys[index][-1], self._others[index][-1]
            places = torch.arange(start, start + len(key))[None]

            def turned(key: torch.Tensor, places: torch.Tensor, layer: Any) -> torch.Tensor:
                angles = _angles(self._model, layer, key[None], places)
                swapped = self._family.rotate(layer, key.transpose(0, 1)[None], angles)[0]
                return swapped.transpose(0, 1)

            kept = _rounded(turned(key, places, attention), dtype)
            self._keys[index][-1] = turned(kept, -places, attention) / scale
            self._others[index][-1] = _rounded(other, dtype)

    def place(self, turn: Remembered, start: int, count: int) -> None:
        """Put ``count`` tokens of an earlier turn at the next positions."""
        at = self._cache.get_seq_length()
        self._history.append(_Stretch(at, at + count, turn=turn, place=start))
        positions = torch.arange(at, at + count)[None]
        with torch.inference_mode():
            for index, attention in enumerate(self._layers):
                key = turn.keys[index][start : start + count]
                other = turn.others[index][start : start + count]
                angles = _angles(self._model, attention, key[None], positions)
                turned = self._family.rotate(attention, key.transpose(0, 1)[None], angles)
                pair = self._family.order(turned, other.transpose(0, 1)[None])
                self._cache.update(*pair, attention.layer_idx)
                self._keys[index].append(key)
                self._others[index].append(other)

    def remember(self, tokens: Sequence[int], read: tuple[int, ...]) -> Remembered:
        """Keep the parts that a later turn may reuse of this one."""
        return Remembered(
            tuple(tokens),
            tuple(torch.cat(chunks) for chunks in self._keys),
            tuple(torch.cat(chunks) for chunks in self._others),
            read,
            tuple(self._history),
        )

    @contextmanager
    def _recorded(self) -> Iterator[None]:
        handles = []
        for index, attention in enumerate(self._layers):
            for (module, read), kept in zip(
                self._family.taps(attention), (self._keys[index], self._others[index]), strict=True
            ):
                handles.append(module.register_forward_hook(_recorder(read, kept)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


class _RoundingCache(DynamicCache):
    """A cache that keeps what it is given in another dtype."""

    def __init__(self, config: Any, dtype: torch.dtype) -> None:
        super().__init__(config=config)
        self._kept = dtype

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        pair = _rounded(key_states, self._kept), _rounded(value_states, self._kept)
        found: tuple[torch.Tensor, torch.Tensor] = super().update(*pair, *args, **options)
        return found


def _rounded(numbers: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    limit = torch.finfo(dtype).max
    return numbers.clamp(-limit, limit).to(dtype).to(numbers.dtype)


def _recorder(
    read: Callable[[torch.Tensor], torch.Tensor], kept: list[torch.Tensor]
) -> Callable[..., None]:
    def record(_module: object, _inputs: object, output: torch.Tensor) -> None:
        kept.append(read(output).detach().clone())

    return record


Tap = tuple[torch.nn.Module, Callable[[torch.Tensor], torch.Tensor]]
"""A module, and how to read ``[T, heads, dim]`` from its output."""


@dataclass(frozen=True, slots=True)
class _Family:
    """The place of an architecture's position-free attention parts, and its rotation."""

    taps: Callable[[Any], tuple[Tap, Tap]]
    """Of an attention module: the key before rotation, and the value or latent."""
    rotate: Callable[[Any, torch.Tensor, Any], torch.Tensor]
    """The attention module, a key ``[1, heads, T, dim]`` and the rotary module's output."""
    order: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
    """(key, other) in the order in which the attention hands them to its cache."""


def _modeling(attention: Any) -> Any:
    """The architecture's own module of functions."""
    return sys.modules[type(attention).__module__]


def _angles(model: Any, attention: Any, like: torch.Tensor, positions: torch.Tensor) -> Any:
    """The rotary module's output for a layer; some modules have one per kind of layer."""
    rotary = getattr(model.base_model, "rotary_emb", None)
    if rotary is None:
        return None
    if hasattr(rotary, "layer_types"):
        kind = model.config.layer_types[attention.layer_idx]
        return rotary(like, positions, kind)
    return rotary(like, positions)


def _gqa_taps(attention: Any) -> tuple[Tap, Tap]:
    def heads(output: torch.Tensor) -> torch.Tensor:
        return output[0].reshape(output.shape[1], -1, attention.head_dim)

    return (getattr(attention, "k_norm", attention.k_proj), heads), (attention.v_proj, heads)


def _lfm_taps(attention: Any) -> tuple[Tap, Tap]:
    _, value = _gqa_taps(attention)
    return (attention.k_layernorm, lambda output: output[0]), value


def _late_norm_taps(attention: Any) -> tuple[Tap, Tap]:
    """Of keys that are normed once their heads are in front: ``[1, heads, T, dim]``."""
    _, value = _gqa_taps(attention)
    return (attention.k_norm, lambda output: output[0].transpose(0, 1)), value


def _fused_taps(attention: Any) -> tuple[Tap, Tap]:
    """Of one projection for queries, keys and values."""
    config, width = attention.config, attention.head_dim
    queries, keys = (n * width for n in (config.num_attention_heads, config.num_key_value_heads))

    def part(start: int) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda output: output[0, :, start : start + keys].reshape(output.shape[1], -1, width)

    projection = attention.qkv_proj
    return (projection, part(queries)), (projection, part(queries + keys))


def _mla_taps(attention: Any) -> tuple[Tap, Tap]:
    rank = attention.kv_lora_rank
    return (
        (attention.kv_a_proj_with_mqa, lambda output: output[0, :, None, rank:]),
        (attention.kv_a_layernorm, lambda output: output[0, :, None, :]),
    )


def _rotate_whole(attention: Any, key: torch.Tensor, angles: Any) -> torch.Tensor:
    rotated: torch.Tensor = _modeling(attention).apply_rotary_pos_emb(key, key, *angles)[1]
    return rotated


def _rotate_not(attention: Any, key: torch.Tensor, angles: Any) -> torch.Tensor:
    return key


def _rotate_first_dims(attention: Any, key: torch.Tensor, angles: Any) -> torch.Tensor:
    width = attention.rotary_ndims
    turned = _rotate_whole(attention, key[..., :width], angles)
    return torch.cat((turned, key[..., width:]), dim=-1)


def _rotate_windowed(attention: Any, key: torch.Tensor, angles: Any) -> torch.Tensor:
    return key if attention.sliding_window is None else _rotate_whole(attention, key, angles)


def _rotate_complex(attention: Any, key: torch.Tensor, angles: Any) -> torch.Tensor:
    rotated: torch.Tensor = _modeling(attention).apply_rotary_emb(key, key, angles)[1]
    return rotated


def _rotate_v3(attention: Any, key: torch.Tensor, angles: Any) -> torch.Tensor:
    if not attention.config.rope_interleave:
        return _rotate_whole(attention, key, angles)
    functions = _modeling(attention)
    rotated: torch.Tensor = functions.apply_rotary_pos_emb_interleave(key, key, *angles)[1]
    return rotated


def _as_is(key: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return key, other


def _latent_first(key: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return other, key


_PLAIN = _Family(_gqa_taps, _rotate_whole, _as_is)
_UNTURNED = _Family(_gqa_taps, _rotate_not, _as_is)
_WITHOUT_PECULIARITIES = (
    "cohere",
    "ernie4_5",
    "ernie4_5_moe",
    "glm",
    "glm4_moe",
    "gpt_oss",
    "granite",
    "llama",
    "minimax_m2",
    "ministral3",
    "mistral",
    "olmo2",
    "olmo3",
    "qwen2",
    "qwen3",
    "qwen3_5_text",
    "qwen3_moe",
    "qwen3_next",
)
_FAMILIES = dict.fromkeys(_WITHOUT_PECULIARITIES, _PLAIN) | {
    "nemotron_h": _UNTURNED,
    "granitemoehybrid": _UNTURNED,
    "jamba": _UNTURNED,
    "lfm2": _Family(_lfm_taps, _rotate_whole, _as_is),
    "kimi_linear": _Family(_mla_taps, _rotate_not, _latent_first),
    "cohere2": _Family(_gqa_taps, _rotate_windowed, _as_is),
    "gemma3_text": _Family(_late_norm_taps, _rotate_whole, _as_is),
    "phi": _Family(_gqa_taps, _rotate_first_dims, _as_is),
    "hy_v3": _Family(_late_norm_taps, _rotate_whole, _as_is),
    "phi3": _Family(_fused_taps, _rotate_whole, _as_is),
    "stablelm": _Family(_gqa_taps, _rotate_first_dims, _as_is),
    "deepseek_v2": _Family(_mla_taps, _rotate_complex, _latent_first),
    "deepseek_v3": _Family(_mla_taps, _rotate_v3, _latent_first),
    "glm4_moe_lite": _Family(_mla_taps, _rotate_v3, _latent_first),
}


def _family(subject: OracleModel) -> _Family:
    return _FAMILIES[subject.config.model_type]
