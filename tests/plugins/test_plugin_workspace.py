"""The workspace the plugins ask for holds every shape of a profile, on any device."""

from __future__ import annotations

import itertools

import native
from plugins.launches import FAKE, PROGRAMS_PER_SM, SMS, KvInjection, Staircase, ceil_div, events, splits_by_rule


def workspace(built: native.Built, cases: list[dict[str, str]], devices: str = f"90:{SMS}") -> list[int]:
    commands = []
    for ranges in cases:
        b, q, c = ranges["batch"], ranges["queries"], ranges["capacity"]
        cache = f"input fp16 {b},8,{c},128"
        commands += [Staircase().create(), "tensors", f"input fp16 {b},32,{q},128", cache, cache, f"input int64 {b}"]
        commands += [f"input bool {b},{q},{q}", f"input int64 {b},{q}", f"output fp16 {b},{q},4096", "workspace"]
    return [line["bytes"] for line in events(built.drive(commands, devices), "workspace")]


def needed(batch: int, queries: int, capacity: int, sms: int) -> int:
    rows = 4 * queries
    context = FAKE.choose("staircase_context", 90, "fp16", 128, "", rows)
    slots = sms * PROGRAMS_PER_SM[context.tile_rows]
    programs = batch * 8 * ceil_div(rows, context.tile_rows)
    splits = splits_by_rule(programs, capacity, context.tile_columns, slots)
    return 0 if splits == 1 else batch * 8 * splits * rows * (128 + 1) * 4


def test_the_workspace_holds_any_shape_of_the_profile_on_any_device(built: native.Built) -> None:
    """Of the profile's ranges only the upper ends count, but a smaller shape may need more."""
    ranges = [(1, 16, 4096), (8, 70, 4096), (4, 128, 32768), (1, 1, 512), (2, 16, 64)]
    found = workspace(built, [{"batch": f"1..{b}", "queries": f"1..{q}", "capacity": str(c)} for b, q, c in ranges])
    for (batch, queries, capacity), bytes_given in zip(ranges, found, strict=True):
        shapes = itertools.product(
            range(1, batch + 1), {1, 2, 4, 5, 16, 17, 32, 33, 64, 70, 128, queries}, (1, 7, 28, 108, 132, 148, 200)
        )
        most = max(needed(b, q, capacity, sms) for b, q, sms in shapes if q <= queries)
        assert most <= bytes_given <= 4 * most, (batch, queries, capacity)


def test_the_workspace_grows_with_the_profile(built: native.Built) -> None:
    batches = [{"batch": f"1..{b}", "queries": "1..70", "capacity": "4096"} for b in (1, 2, 4, 8)]
    queries = [{"batch": "1..2", "queries": f"1..{q}", "capacity": "4096"} for q in (1, 4, 16, 70, 128)]
    for cases in (batches, queries):
        found = workspace(built, cases)
        assert found == sorted(found)


def test_the_workspace_for_a_range_of_capacities_is_that_of_the_finest_split(built: native.Built) -> None:
    dynamic, more_queries_than_possible = workspace(
        built,
        [
            {"batch": "1..2", "queries": "1..16", "capacity": "64..32768"},
            {"batch": "1..2", "queries": "1..4096", "capacity": "64..32768"},
        ],
    )
    assert dynamic == 2 * 8 * 64 * (4 * 16) * (128 + 1) * 4
    assert more_queries_than_possible == 2 * 8 * 64 * (4 * 128) * (128 + 1) * 4


def test_kv_injection_needs_no_workspace(built: native.Built) -> None:
    case = KvInjection()
    lines = built.drive([case.create(), *case.tensors(), "workspace"])
    assert lines[-1] == {"event": "workspace", "bytes": 0}
