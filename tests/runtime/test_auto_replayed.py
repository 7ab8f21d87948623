"""`--drafts auto` and `--branches auto` against every fixed setting, on what SmolLM2's drafters said.

Held-out prompts, six of each set, 120 tokens each (`scripts/record_drafts.py`); costs of passes as of two machines.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest
from runtime.replay import Machine, Setting, load, seconds_per_token

from dflash_trt.runtime.adaptive_drafting import Experience
from dflash_trt.runtime.branching import PassCosts

RECORDED = Path(__file__).parent / "smollm2_drafts.npz"
MILLISECONDS = {
    "EPYC": (
        {1: 6.2, 3: 6.5, 6: 7.1, 8: 7.9},
        {1: 6.0, 4: 6.8, 8: 8.0, 12: 8.4, 16: 9.7},
        {1: 20.8, 2: 22.0, 4: 23.2, 6: 24.3, 8: 27.0, 12: 28.9, 16: 34.0, 21: 41.6},
    ),
    "Xeon": (
        {1: 7.0, 4: 8.0, 8: 9.3},
        {1: 7.0, 4: 8.0, 8: 9.3, 16: 12.0},
        {1: 23.4, 4: 28.0, 8: 33.3, 12: 36.5, 16: 40.0, 21: 45.0},
    ),
}
FIXED = [Setting(drafts) for drafts in range(8)] + [Setting(7, 2)]
SEEDS = range(2)


@cache
def decoded(machine: str) -> dict[str, dict[str, np.ndarray]]:
    """Seconds per token [seeds], by set and by setting: "auto", "branches", or the number of a fixed one.

    Outputs are decoded twice: what was learnt of one set serves the next, and the sets follow one another.
    """
    draft, redraft, verify = (
        tuple((tokens, seconds / 1000) for tokens, seconds in points.items()) for points in MILLISECONDS[machine]
    )
    costs = PassCosts(draft=draft, redraft=redraft, verify=verify)
    found: dict[str, dict[str, list[float]]] = {}
    for seed in SEEDS:
        here = Machine(costs, seed)
        known = Experience(costs), Experience(costs)
        autos = {"auto": Setting("auto", 0, known[0]), "branches": Setting("auto", "auto", known[1])}
        for name, outputs in load(RECORDED).items():
            settings = {str(number): setting for number, setting in enumerate(FIXED)} | autos
            for label, setting in settings.items():
                twice = outputs * 2 if label in autos else outputs
                found.setdefault(name, {}).setdefault(label, []).append(seconds_per_token(twice, here, setting))
    return {name: {label: np.array(runs) for label, runs in by.items()} for name, by in found.items()}


@pytest.mark.parametrize("auto", ["auto", "branches"])
@pytest.mark.parametrize("machine", MILLISECONDS)
def test_auto_loses_at_most_3_percent_to_the_best_fixed_setting_of_each_set(machine: str, auto: str) -> None:
    for name, by in decoded(machine).items():
        best = np.min([by[str(number)] for number in range(len(FIXED))], axis=0)
        assert (by[auto] <= 1.03 * best).all(), (name, best / by[auto])


@pytest.mark.parametrize("auto", ["auto", "branches"])
@pytest.mark.parametrize("machine", MILLISECONDS)
def test_auto_beats_every_fixed_setting_over_all_sets(machine: str, auto: str) -> None:
    total = {label: sum(by[label] for by in decoded(machine).values()) for label in decoded(machine)["math"]}
    assert (total[auto] < np.min([total[str(number)] for number in range(len(FIXED))], axis=0)).all()


def test_a_set_that_drafts_pay_in_and_one_that_they_do_not() -> None:
    """Else the two tests above would show little."""
    by = decoded("Xeon")
    assert (by["records"]["0"] > 1.8 * by["records"]["7"]).all()
    assert (by["explain"]["0"] < by["explain"]["7"]).all()
