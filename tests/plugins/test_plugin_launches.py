"""What the plugins launch, recorded by a stand-in CUDA runtime, against the rules written again in `launches`."""

from __future__ import annotations

import itertools
import struct

import native
import pytest
from plugins.c_api import check_the_c_api
from plugins.launches import (
    FAKE,
    KV_INJECTIONS,
    PROGRAMS_PER_SM,
    SMS,
    STAIRCASES,
    KvInjection,
    Staircase,
    Variants,
    events,
    splits_by_rule,
)

from dflash_trt.plugins.kernels import tiling


def test_staircase_attention_launches_what_the_rules_say(built: native.Built) -> None:
    splits = set()
    for case in STAIRCASES:
        lines = built.drive(case.commands())
        assert not events(lines, "log")
        assert events(lines, "launch") == case.expected(events(lines, "enqueue")[0]), case
        assert events(lines, "enqueue")[0]["status"] == 0
        splits.add(len(events(lines, "launch")))
    assert splits == {1, 2}  # one split, and several with a merge


@pytest.mark.parametrize("sms", [1, 28, 108, 148, 256])
def test_splits_follow_the_device(built: native.Built, sms: int) -> None:
    for case in (Staircase(), Staircase(queries=70, capacity=32768)):
        lines = built.drive(case.commands(), devices=f"90:{sms}")
        assert events(lines, "launch") == case.expected(events(lines, "enqueue")[0], sms)


def test_splits_follow_the_rule_over_many_shapes(built: native.Built) -> None:
    """Enough of them that every constant of the rule decides some."""
    shapes = itertools.product((1, 2, 3, 8), (1, 16, 70), range(96, 16_384, 832))
    cases = [Staircase(batch=b, queries=q, capacity=c, heads=8, kv_heads=2, dim=64) for b, q, c in shapes]
    for sms in (56, SMS):
        lines = built.drive([command for case in cases for command in case.commands()], devices=f"90:{sms}")
        enqueued, launched = events(lines, "enqueue"), events(lines, "launch")
        assert launched == [e for case, line in zip(cases, enqueued, strict=True) for e in case.expected(line, sms)]


def test_the_rules_are_those_of_the_kernels() -> None:
    """plugins/kernels launches by the same, from Python."""
    assert tiling.PROGRAMS_PER_SM == PROGRAMS_PER_SM
    for programs, capacity, columns, slots in itertools.product(
        (1, 8, 33, 264, 500), (1, 64, 4096, 40_000), (32, 128), (56, 264)
    ):
        expected = splits_by_rule(programs, capacity, columns, slots)
        assert tiling.choose_splits(programs, capacity, columns, slots) == expected


def test_kv_injection_launches_what_the_rules_say(built: native.Built) -> None:
    for case in KV_INJECTIONS:
        lines = built.drive(case.commands())
        assert not events(lines, "log")
        assert events(lines, "launch") == case.expected(events(lines, "enqueue")[0]), case


def test_nothing_to_do_is_no_launch(built: native.Built) -> None:
    for case in (Staircase(queries=0), Staircase(batch=0), KvInjection(rows=0), KvInjection(batch=0)):
        lines = built.drive(case.commands())
        assert events(lines, "enqueue")[0]["status"] == 0, lines
        assert not events(lines, "launch")


def test_kernels_are_loaded_once_per_device_and_before_enqueue(built: native.Built) -> None:
    case = Staircase()
    setup = [case.create(), *case.tensors(), "shape_change"]
    capture = ["setenv FAKE_CUDART_CAPTURING 1", "enqueue", "enqueue", "setenv FAKE_CUDART_CAPTURING 0"]
    lines = built.drive(
        [*setup, *capture, "clone", "enqueue", *setup, "enqueue", "device 1", *setup, "enqueue"], "90:132,90:132"
    )
    assert [e["status"] for e in events(lines, "enqueue")] == [0] * 5
    assert len(events(lines, "launch")) == 10  # context and merge
    assert [e["device"] for e in events(lines, "load_library")] == [0, 0, 1, 1]
    context = FAKE.choose("staircase_context", 90, "fp16", 128, "", 64)
    assert context.shared_bytes > 48 * 1024
    maximum_dynamic_shared_memory = 8
    preferred_carveout, percent = 9, 100
    asked = [(maximum_dynamic_shared_memory, context.shared_bytes), (preferred_carveout, percent)]
    assert events(lines, "set_attribute") == [
        {"event": "set_attribute", "symbol": context.symbol, "attribute": attribute, "value": value}
        for attribute, value in asked
    ] * 2


def test_small_shared_memory_is_not_asked_for(built: native.Built) -> None:
    assert not events(built.drive(KvInjection().commands()), "set_attribute")


@pytest.mark.parametrize("capability", [80, 86, 87, 89])
def test_every_device_of_generation_8_runs_the_cubins_for_80(built: native.Built, capability: int) -> None:
    lines = built.drive(Staircase().commands(), devices=f"{capability}:{SMS}")
    assert events(lines, "launch") == Staircase().expected(events(lines, "enqueue")[0], cc=80)


# ---- With the compiled kernels, where they are


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> native.Built:
    return native.build_with_real_kernels(tmp_path_factory.mktemp("real"))


def test_the_compiled_kernels_are_launched_by_the_same_rules(real: native.Built) -> None:
    variants = Variants(real.variants)
    for cc in sorted({v.compute_capability for v in real.variants}):
        for staircase in [*STAIRCASES, Staircase(dim=96), Staircase(dim=96, dtype="bf16", window=3, queries=128)]:
            lines = real.drive(staircase.commands(), devices=f"{cc}:{SMS}")
            assert not events(lines, "log"), staircase
            expected = staircase.expected(events(lines, "enqueue")[0], cc=cc, variants=variants)
            assert events(lines, "launch") == expected, staircase
        for injection in KV_INJECTIONS:
            lines = real.drive(injection.commands(), devices=f"{cc}:{SMS}")
            expected = injection.expected(events(lines, "enqueue")[0], cc=cc, variants=variants)
            assert events(lines, "launch") == expected, injection
        check_the_c_api(real, variants, cc)


def test_the_compiled_kernels_take_the_arguments_that_are_passed(real: native.Built) -> None:
    sizes = {"P": 8, "i": 4, "f": 4}
    for variant in real.variants:
        found = parameter_sizes(
            (real.library.parent / "generated" / "cubins" / variant.file).read_bytes(), variant.symbol
        )
        assert found == [sizes[kind] for kind in native.SIGNATURES[variant.kernel]], variant


def parameter_sizes(cubin: bytes, symbol: str) -> list[int]:
    """From section .nv.info.<symbol>: records of kind 0x17 have a parameter's ordinal, offset and size."""
    table, entry_size, count, names_index = struct.unpack_from("<Q", cubin, 40) + struct.unpack_from("<HHH", cubin, 58)
    sections = [struct.unpack_from("<IIQQQQ", cubin, table + i * entry_size) for i in range(count)]
    names = sections[names_index][4]
    (info,) = [
        cubin[offset : offset + size]
        for name, _, _, _, offset, size in sections
        if cubin[names + name :].startswith(f".nv.info.{symbol}\0".encode())
    ]
    parameters = {}
    position = 0
    while position < len(info):
        form, kind, size = struct.unpack_from("<BBH", info, position)
        position += 4
        if form == 4:  # a sized record; in the others the size field is the value
            if kind == 0x17:
                _, ordinal, _, packed = struct.unpack_from("<IHHI", info, position)
                parameters[ordinal] = packed >> 18
            position += size
    return [parameters[i] for i in range(len(parameters))]
