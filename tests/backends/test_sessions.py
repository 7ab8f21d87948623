"""Sessions of ONNX Runtime and torch: the same results, caches updated in place, errors that say what is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from export.small_pair import Graph, assert_same, random_inputs, run_passes, small_pair

from dflash_trt.backends.base import bucket, numpy_dtype
from dflash_trt.backends.onnxruntime import OrtSession
from dflash_trt.backends.torch import TorchSession
from dflash_trt.checkpoint.spec import TargetSpec
from dflash_trt.errors import BackendError
from dflash_trt.export.contract import drafter_graph
from dflash_trt.modeling.load import load_drafter

VOCAB = 320
ROLES, BACKENDS = ("target", "drafter"), ("onnxruntime", "torch")


def session(backend: str, role: str = "target") -> Any:
    graph = small_pair().graph(role)
    return graph.ort() if backend == "onnxruntime" else graph.reference()


def arrays(cache: Any) -> list[np.ndarray]:
    return [np.asarray(buffer) for buffer in cache.buffers]


def fill(cache: Any, seed: int = 0) -> list[np.ndarray]:
    """Random contents; returns copies of them."""
    rng = np.random.default_rng(seed)
    for buffer in arrays(cache):  # shares memory with a torch buffer, too
        buffer[...] = rng.standard_normal(buffer.shape)
    return [buffer.copy() for buffer in arrays(cache)]


@pytest.mark.parametrize("role", ROLES)
def test_both_give_the_same(role: str) -> None:
    assert_same(run_passes(session("onnxruntime", role), VOCAB), run_passes(session("torch", role), VOCAB), 1e-4)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("role", ROLES)
def test_only_what_is_asked_for_comes_back(backend: str, role: str) -> None:
    opened = session(backend, role)
    inputs = random_inputs(opened.graph, 0, 0, VOCAB, 2, 4)
    names = [spec.name for spec in opened.graph.outputs]
    whole = opened.run(inputs, names, opened.new_cache(2, 12))
    for wanted in ([], names[1:2], names[:1], [names[2], names[0]]):
        cache = opened.new_cache(2, 12)
        some = opened.run(inputs, wanted, cache)
        assert list(some) == wanted
        for name in wanted:
            np.testing.assert_allclose(np.asarray(some[name]), np.asarray(whole[name]), rtol=1e-5, atol=1e-5)
        assert all(buffer.any() for buffer in arrays(cache))
    for name in set(names) - {"context_features"}:
        assert isinstance(whole[name], np.ndarray)


@pytest.mark.parametrize("backend", BACKENDS)
def test_features_go_from_session_to_session(backend: str) -> None:
    """`context_features` of the target go into the drafter as they come."""
    target, drafter = (session(backend, role) for role in ROLES)
    inputs = random_inputs(target.graph, 0, 0, VOCAB, 1, 4)
    features = target.run(inputs, ["context_features"], target.new_cache(1, 12))["context_features"]
    drafting = random_inputs(drafter.graph, 1, 0, VOCAB, 1, 4)
    outs = []
    for given in (features, np.asarray(features), features[:, :]):
        cache = drafter.new_cache(1, 12)
        outs.append(drafter.run(drafting | {"context_features": given}, ["logits"], cache)["logits"])
    np.testing.assert_array_equal(outs[0], outs[1])
    np.testing.assert_array_equal(outs[0], outs[2])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("role", ROLES)
def test_passes_on_one_cache_leave_earlier_results_alone(backend: str, role: str) -> None:
    """Of any number of rows and tokens, and whatever is asked for; each gives what it gives on a cache of its own."""
    opened = session(backend, role)
    names = [spec.name for spec in opened.graph.outputs]
    shared = opened.new_cache(3, 12)
    passes = [(1, 4, names), (1, 4, names), (1, 3, names[::-1]), (2, 4, names)]
    for _ in range(2):
        found, expected = [], []
        for seed, (rows, tokens, wanted) in enumerate(passes):
            inputs = random_inputs(opened.graph, seed, 0, VOCAB, rows, tokens)
            found.append(opened.run(inputs, wanted, shared.rows(0, rows)))
            expected.append(opened.run(inputs, wanted, opened.new_cache(rows, 12)))
        for one, other in zip(found, expected, strict=True):
            for name in names:
                np.testing.assert_array_equal(np.asarray(one[name]), np.asarray(other[name]), err_msg=name)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("role", ROLES)
def test_inputs_of_any_layout(backend: str, role: str) -> None:
    """Strided, reversed, broadcast, read-only: numpy's views are fine, and nothing is read after it was freed."""
    opened = session(backend, role)
    inputs = random_inputs(opened.graph, 0, 0, VOCAB, 3, 4)
    plain = {name: np.ascontiguousarray(array).copy() for name, array in inputs.items()}
    strided, backward, frozen = {}, {}, {}
    for name, array in plain.items():
        wide = np.zeros((*array.shape[:-1], array.shape[-1] * 2), array.dtype)
        wide[..., ::2] = array
        strided[name] = wide[..., ::2]
        backward[name] = np.flip(np.flip(array, -1).copy(), -1)
        frozen[name] = array.copy()
        frozen[name].flags.writeable = False
    names = [spec.name for spec in opened.graph.outputs]
    expected = opened.run(plain, names, opened.new_cache(3, 12))
    for views in (strided, backward, frozen):
        found = opened.run(views, names, opened.new_cache(3, 12))
        for name in names:
            np.testing.assert_array_equal(np.asarray(found[name]), np.asarray(expected[name]), err_msg=name)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("role", ROLES)
def test_caches_are_updated_where_they_are(backend: str, role: str) -> None:
    opened = session(backend, role)
    cache = opened.new_cache(2, 12)
    before, pointers = fill(cache), [buffer.__array_interface__["data"][0] for buffer in arrays(cache)]
    inputs = random_inputs(opened.graph, 0, 3, VOCAB, 2, 2)
    opened.run(inputs, [], cache)
    assert [buffer.__array_interface__["data"][0] for buffer in arrays(cache)] == pointers
    reach = 3 + 2 + (3 if role == "drafter" else 0)  # context, new rows or features, block
    for now, then in zip(arrays(cache), before, strict=True):
        np.testing.assert_array_equal(now[:, :, :3], then[:, :, :3])
        np.testing.assert_array_equal(now[:, :, reach:], then[:, :, reach:])
        assert (now[:, :, 3:5] != then[:, :, 3:5]).all()


def cache_copies(graph: Graph, capfd: pytest.CaptureFixture[str]) -> int:
    """How many caches ONNX Runtime copies in one pass: its TensorScatter logs when it cannot work in place."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 2
    opened = graph.ort()
    opened._session = onnxruntime.InferenceSession(
        str(graph.folder / "model.onnx"), options, providers=["CPUExecutionProvider"]
    )
    cache = opened.new_cache(2, 24)
    inputs = random_inputs(graph.spec, 0, 2, VOCAB, 2, 4)
    capfd.readouterr()
    opened.run(inputs, [], cache)
    return capfd.readouterr().err.count("in-place optimization not activated")


def test_the_target_copies_no_cache(capfd: pytest.CaptureFixture[str]) -> None:
    assert cache_copies(small_pair().target, capfd) == 0


def test_the_drafter_copies_no_cache(capfd: pytest.CaptureFixture[str]) -> None:
    assert cache_copies(small_pair().drafter, capfd) == 0


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("role", ROLES)
def test_a_pass_on_a_row_changes_that_row_alone(backend: str, role: str) -> None:
    opened = session(backend, role)
    cache = opened.new_cache(3, 12)
    before = fill(cache)
    alone = opened.new_cache(1, 12)
    for buffer, whole in zip(arrays(alone), before, strict=True):
        buffer[...] = whole[1:2]
    inputs = random_inputs(opened.graph, 0, 2, VOCAB, 1, 3)
    name = opened.graph.outputs[0].name
    view = cache.rows(1, 2)
    assert (view.batch, view.capacity) == (1, 12)
    found, expected = opened.run(inputs, [name], view)[name], opened.run(inputs, [name], alone)[name]
    np.testing.assert_array_equal(found, expected)
    for now, then, single in zip(arrays(cache), before, arrays(alone), strict=True):
        np.testing.assert_array_equal(now[[0, 2]], then[[0, 2]])
        np.testing.assert_array_equal(now[1:2], single)
        assert (now[1] != then[1]).any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_new_caches_are_zero_and_shaped_as_the_contract(backend: str) -> None:
    opened = session(backend)
    cache = opened.new_cache(3, 7)
    assert (cache.batch, cache.capacity) == (3, 7)
    assert [buffer.shape for buffer in arrays(cache)] == [(3, 2, 7, 16)] * len(opened.graph.past())
    assert not any(buffer.any() for buffer in arrays(cache))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("start", "stop"), [(2, 3), (0, 2), (1, 3), (0, 3)])
def test_rows_share_memory(backend: str, start: int, stop: int) -> None:
    cache = session(backend).new_cache(3, 5)
    fill(cache)
    view = cache.rows(start, stop)
    assert (view.batch, view.capacity) == (stop - start, 5)
    for part, whole in zip(arrays(view), arrays(cache), strict=True):
        assert np.shares_memory(part, whole)
        part[...] = 7
        assert [(whole[row] == 7).all() for row in range(3)] == [start <= row < stop for row in range(3)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_row_is_copied_or_cleared_alone(backend: str) -> None:
    cache = session(backend).new_cache(3, 5)
    before = fill(cache)
    cache.copy_row(2, 0, 3)
    for now, then in zip(arrays(cache), before, strict=True):
        np.testing.assert_array_equal(now[0, :, :3], then[2, :, :3])
        np.testing.assert_array_equal(now[0, :, 3:], then[0, :, 3:])
        np.testing.assert_array_equal(now[1:], then[1:])
    cache.clear_row(1)
    for now, then in zip(arrays(cache), before, strict=True):
        assert not now[1].any()
        np.testing.assert_array_equal(now[2], then[2])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("capacity", [3, 5, 9])
def test_resized_keeps_slots(backend: str, capacity: int) -> None:
    cache = session(backend).new_cache(2, 5)
    before, resized = fill(cache), cache.resized(capacity)
    kept = min(5, capacity)
    assert (resized.batch, resized.capacity) == (2, capacity)
    for new, old, then in zip(arrays(resized), arrays(cache), before, strict=True):
        np.testing.assert_array_equal(new[:, :, :kept], then[:, :, :kept])
        assert not new[:, :, kept:].any()
        assert not np.shares_memory(new, old)
        np.testing.assert_array_equal(old, then)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("sources", "destination"),
    [
        ([4, 6, 7, 9], 4),  # a path of a tree, from its root on
        ([5, 6, 7], 4),  # overlapping by one
        ([4, 5, 6], 4),  # nothing to do
        ([8], 2),
        ([2, 3, 4], 3),  # towards the end, overlapping
        ([], 4),
    ],
)
def test_move(backend: str, sources: list[int], destination: int) -> None:
    cache = session(backend).new_cache(2, 12)
    before = fill(cache)
    cache.move(1, sources, destination)
    for now, then in zip(arrays(cache), before, strict=True):
        expected = then.copy()
        for step, source in enumerate(sources):
            expected[1, :, destination + step] = then[1, :, source]
        np.testing.assert_array_equal(now, expected)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("role", ROLES)
def test_wrong_input_names_are_refused(backend: str, role: str) -> None:
    opened = session(backend, role)
    inputs, cache = random_inputs(opened.graph, 0, 0, VOCAB, 1, 2), opened.new_cache(1, 8)
    lacking = {name: array for name, array in inputs.items() if name != "context_len"}
    for wrong in (lacking, inputs | {"extra": np.zeros(1)}, lacking | {"context_length": inputs["context_len"]}, {}):
        with pytest.raises(ValueError, match="context_len"):
            opened.run(wrong, [], cache)
    assert not any(buffer.any() for buffer in arrays(cache))


def test_a_missing_or_damaged_model_is_a_backend_error(tmp_path: Path) -> None:
    graph = small_pair().target
    (tmp_path / "empty.onnx").touch()
    (tmp_path / "text.onnx").write_text("no model at all")
    whole = (graph.folder / "model.onnx").read_bytes()
    (tmp_path / "cut.onnx").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "no_weights.onnx").write_bytes(whole)
    for name in ("missing", "empty", "text", "cut", "no_weights"):
        with pytest.raises(BackendError, match=f"{name}.onnx"):
            OrtSession(tmp_path / f"{name}.onnx", graph.spec)


def test_a_model_for_a_newer_opset_is_a_backend_error(tmp_path: Path) -> None:
    graph = small_pair().target
    model = onnx.load(graph.folder / "model.onnx", load_external_data=False)
    model.opset_import[0].version = 999
    file = graph.folder / "newer.onnx"
    file.write_bytes(model.SerializeToString())
    with pytest.raises(BackendError, match="opset"):
        OrtSession(file, graph.spec)


def test_torch_takes_numpy_bfloat16() -> None:
    """The contract's dtype in numpy is ml_dtypes', which torch does not know."""
    pair = small_pair()
    drafter, target = pair.drafter_checkpoint, pair.target_checkpoint
    module = load_drafter(drafter.spec, drafter.tensors, target.spec, target.tensors, 32, "bfloat16")
    opened = TorchSession(module, drafter_graph(drafter.spec, "bfloat16"))
    inputs = random_inputs(opened.graph, 0, 0, VOCAB, 2, 4)
    assert inputs["context_features"].dtype == ml_dtypes.bfloat16
    tensor = torch.from_numpy(inputs["context_features"].astype(np.float32)).bfloat16()
    outs = [
        opened.run(inputs | {"context_features": features}, ["logits"], opened.new_cache(2, 12))["logits"]
        for features in (inputs["context_features"], tensor)
    ]
    np.testing.assert_array_equal(*outs)


@pytest.mark.parametrize("backend", BACKENDS)
def test_stack_joins_pieces_cuts_and_pads(backend: str) -> None:
    opened = session(backend)
    rng = np.random.default_rng(0)
    given = [rng.standard_normal((size, 6)).astype(np.float32) for size in (1, 3, 5)]
    whole = [torch.from_numpy(array) for array in given] if backend == "torch" else given
    features = [[array[:1], array[1:2], array[2:]] for array in whole]
    stacked = np.asarray(opened.stack(features, 3))
    assert stacked.shape == (3, 3, 6)
    for row, array in zip(stacked, given, strict=True):
        np.testing.assert_array_equal(row[: len(array)], array[:3])
        assert not row[len(array) :].any()


@pytest.mark.parametrize(
    ("needed", "limit", "expected"),
    [
        (1, 4096, 128),
        (128, 4096, 128),
        (129, 4096, 256),
        (700, 4096, 768),
        (1500, 4096, 1536),
        (1500, 1510, 1510),
        (10, 40, 40),
    ],
)
def test_buckets(needed: int, limit: int, expected: int) -> None:
    assert bucket(needed, limit) == expected
    assert session("torch").capacity_for(needed, limit) == expected


def test_numpy_dtypes() -> None:
    assert numpy_dtype("bfloat16") == ml_dtypes.bfloat16
    assert numpy_dtype("float32") == np.float32
    assert isinstance(small_pair().target_checkpoint.spec, TargetSpec)
