"""The choice of the next token from a model's logits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

_GREEDY_BELOW = 1e-5
"""Temperature below which the draw is greedy; dividing by less would overflow."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Parameters of sampling; the caller has checked the ranges.

    ``temperature`` 0 is greedy; ``top_k`` 0 and ``top_p`` 1 restrict nothing.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    top_logprobs: int | None = None
    """Number of most likely tokens reported beside the chosen one; None for none at all."""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural log probability of a token under the model, before bias and temperature."""

    token: int
    logprob: float


@dataclass(frozen=True, slots=True)
class SampledToken:
    """The chosen token, with log probabilities if they were requested."""

    token: int
    logprob: float | None = None
    top: tuple[TokenLogprob, ...] = ()


class Sampler:
    """The sampling state of one request: its random numbers and the tokens so far.

    With a seed, equal logits give equal tokens on every machine: the draw is made on the CPU.
    """

    def __init__(self, params: SamplingParams) -> None:
        self._params = params
        self._counts: Counter[int] = Counter()
        self._generator = torch.Generator()
        if params.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(params.seed % 2**63)

    def sample(self, logits: torch.Tensor) -> SampledToken:
        """Choose a token.

        Args:
            logits: fp32 ``[vocab]`` on any device; left unchanged.
        """
        token = self._choose(self._adjusted(logits))
        self._counts[token] += 1
        if self._params.top_logprobs is None:
            return SampledToken(token)
        logprobs = torch.log_softmax(logits, dim=-1)
        values, indices = logprobs.topk(min(self._params.top_logprobs, logprobs.numel()))
        top = tuple(
            TokenLogprob(index, value)
            for index, value in zip(indices.tolist(), values.tolist(), strict=True)
        )
        return SampledToken(token, float(logprobs[token]), top)

    def _adjusted(self, logits: torch.Tensor) -> torch.Tensor:
        """Add bias and penalties: ``l − count · frequency − [count > 0] · presence``."""
        changes = Counter[int]()
        changed: dict[int, float] = dict(self._params.logit_bias)
        if self._params.frequency_penalty or self._params.presence_penalty:
            changes = self._counts
        for token, count in changes.items():
            penalty = self._params.frequency_penalty * count + self._params.presence_penalty
            changed[token] = changed.get(token, 0.0) - penalty
        if not changed:
            return logits
        index = torch.tensor(list(changed), device=logits.device)
        values = torch.tensor(list(changed.values()), device=logits.device, dtype=logits.dtype)
        return logits.index_add(0, index, values)

    def _choose(self, logits: torch.Tensor) -> int:
        if self._params.temperature < _GREEDY_BELOW:
            return int(logits.argmax())
        scaled = (logits / self._params.temperature).cpu()
        values, indices = scaled.sort(descending=True, stable=True)
        if 0 < self._params.top_k < values.numel():
            values = values[: self._params.top_k]
        probabilities = torch.softmax(values.double(), dim=-1)
        if self._params.top_p < 1:
            # Keep the smallest set that reaches top_p; the most likely token always stays.
            kept = probabilities.cumsum(0) - probabilities < self._params.top_p
            kept[0] = True
            probabilities = probabilities[kept]
        drawn = torch.multinomial(probabilities, 1, generator=self._generator)
        return int(indices[drawn])
