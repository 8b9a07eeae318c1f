"""A vLLM whose blocks Leyline doesn't understand takes no claims."""

from __future__ import annotations

from pathlib import Path

from claimant import claiming_engine

from leyline_engine.contract import ProblemCode


def test_an_engine_that_does_not_splice_takes_no_claims(vllm_model: Path) -> None:
    """The refusal says why; requests are served as ever."""
    with claiming_engine(vllm_model, 64, enable_prefix_caching=False) as claimant:
        answer = claimant.opened("s")
        problem = claimant.try_claim("s", 96).problem
        assert len(answer.output) == 8
    assert problem is not None and problem.code is ProblemCode.UNSUPPORTED
    assert "prefix caching" in problem.message
