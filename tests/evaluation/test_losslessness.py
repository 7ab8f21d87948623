"""Judging two outputs that differ works with engines of one capacity and short passes, too."""

from __future__ import annotations

import numpy as np
import pytest
from backends.fake_engine import over_fakes
from engines import torch_engine
from makers import make_drafter, make_target

from dflash_trt.evaluation.losslessness import compare_outputs, last_logits
from dflash_trt.runtime.engine import Engine


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    folder = tmp_path_factory.mktemp("pair")
    make_target(folder / "target")
    make_drafter(folder / "drafter", folder / "target", taps=[0, 2, 3])
    return torch_engine(folder / "target", folder / "drafter", block_size=8)


def test_last_logits_of_more_than_a_chunk(engine: Engine) -> None:
    tokens = np.random.default_rng(0).integers(0, 300, engine.limits.max_seq_len - 1).tolist()
    assert len(tokens) > engine.limits.prefill_chunk
    fixed = over_fakes(engine)
    assert fixed.target.fixed_shapes
    np.testing.assert_allclose(last_logits(fixed, tokens), last_logits(engine, tokens), atol=1e-4)


def test_outputs_that_differ_are_judged(engine: Engine) -> None:
    fixed = over_fakes(engine)
    prompt = [1, 2, 3]
    output = fixed.generate(prompt, max_tokens=8).token_ids
    changed = [*output[:5], (output[5] + 1) % 300, *output[6:]]
    comparison = compare_outputs(fixed, prompt, output, changed)
    assert (comparison.verdict, comparison.position) == ("different", 5)
    assert comparison == compare_outputs(engine, prompt, output, changed)
