"""Values as JSON documents: what is written is read again, and what is no such value is refused, field by field."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import pytest
from geometry import qwen3_drafter
from traces import make_branch, make_step, make_trace

from dflash_trt.documents import DocumentError, parse, to_json, to_values
from dflash_trt.export.contract import drafter_graph
from dflash_trt.runtime.branching import PassCosts
from dflash_trt.runtime.limits import Limits

SPEC = qwen3_drafter(4096, 12288, 2, architecture="DFlashDraftModel", system="dflash", taps=(1, 9, 17))
TRACE = make_trace([make_step((2, 3, 4), (2, 3, 9), [make_branch(0, (8, 8, 8), 0.5)])])
LIMITS = Limits(max_batch_size=1, max_seq_len=64, max_input_len=63, block_size=8, prefill_chunk=16)
VALUES = (
    SPEC,
    drafter_graph(SPEC, "bfloat16"),
    TRACE,
    LIMITS,
    PassCosts(draft=((1, 0.5), (8, 1.0)), redraft=(), verify=((1, 2.0),)),
)


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_a_value_survives(value: Any) -> None:
    values = to_values(value)
    assert json.loads(to_json(value)) == json.loads(json.dumps(values))
    assert parse(type(value), json.loads(to_json(value)), "thing") == value
    assert list(values) == [field.name for field in dataclasses.fields(value)]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_values_are_frozen(value: Any) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(value, dataclasses.fields(value)[0].name, None)


def edited(edit: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    values = json.loads(to_json(SPEC))
    edit(values)
    return values


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda v: v.update(colour="red"), "colour is no field of a spec"),
        (lambda v: v["rope"].update(colour="red"), "rope.colour is no field of a spec"),
        (lambda v: v["policies"][1].update(colour="red"), "policies[1].colour is no field of a spec"),
        (lambda v: v.pop("taps"), "taps is missing"),
        (lambda v: (v.pop("taps"), v.pop("rope")), "rope is missing (and 1 more)"),
        (lambda v: v.update(head_dim="many"), "head_dim should be a valid integer"),
        (lambda v: v.update(head_dim=1.5), "head_dim should be a valid integer"),
        (lambda v: v.update(system="dfly"), "system should be 'dflash' or 'dflare'"),
        (lambda v: v["taps"].append(None), "taps[3] should be a valid integer"),
    ],
)
def test_what_is_no_such_value_is_refused(edit: Callable[[dict[str, Any]], Any], message: str) -> None:
    with pytest.raises(DocumentError) as caught:
        parse(type(SPEC), edited(edit), "spec")
    assert message in str(caught.value)


@pytest.mark.parametrize("values", [None, 3, [], "text"])
def test_something_else_is_refused(values: Any) -> None:
    with pytest.raises(DocumentError):
        parse(Limits, values, "thing")
