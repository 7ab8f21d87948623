"""What verification decodes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import dflash_trt
from dflash_trt.bundle import read_info
from dflash_trt.evaluation.probes import PROBES
from dflash_trt.evaluation.verify import SETTINGS, verify
from dflash_trt.runtime.device_decode import DeviceDecodeBatch
from dflash_trt.runtime.engine import Engine


def of_one_row(engine: Engine) -> Engine:
    limits = replace(engine.limits, max_batch_size=1)
    return Engine(
        engine.target, engine.drafter, engine.tokenizer, limits, mask_token_id=engine.mask_token_id,
        eos_token_ids=engine.eos_token_ids, vocab_size=engine.vocab_size,
    )  # fmt: skip


@pytest.mark.parametrize("whole", [True, False])
def test_whole_device_steps_are_verified_of_one_row_too(
    torch_bundle: Path, monkeypatch: pytest.MonkeyPatch, whole: bool
) -> None:
    """They leave no trace, so that a run with one does not have them."""
    runs = []
    run = DeviceDecodeBatch.run
    monkeypatch.setattr(DeviceDecodeBatch, "run", lambda self: (runs.append(len(self.sequences)), run(self)))
    info, engine = read_info(torch_bundle), of_one_row(dflash_trt.load(torch_bundle))
    engine.device_step = whole
    report = verify(torch_bundle, info, engine)
    (check,) = (check for check in report.checks if check.name == "losslessness")
    decoded = len(PROBES) * len(SETTINGS)
    assert check.status == "passed"
    assert sum(check.measured.values()) == (2 * decoded if whole else decoded)
    greedy = [settings for settings in SETTINGS if settings["temperature"] == 0]
    assert runs == ([1] * len(PROBES) * len(greedy) if whole else [])
