"""The DFlare graph: equal to the module in ONNX Runtime, shares as a constant, one product for all layers' context."""

from __future__ import annotations

import math
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from export.small_pair import LAYERS, POSITIONS, TAPS, Graph, Kind, assert_same, convert_file, run_passes, small_pair
from export.test_weights import inode, stored
from makers import make_drafter, make_target
from safetensors.numpy import load_file

from dflash_trt.backends.lowering import lower_onnxruntime
from dflash_trt.backends.onnxruntime import OrtSession
from dflash_trt.checkpoint.drafter import read_drafter
from dflash_trt.checkpoint.target import read_target
from dflash_trt.checkpoint.tensors import TensorFolder
from dflash_trt.export.contract import drafter_graph
from dflash_trt.export.trace import trace
from dflash_trt.export.weights import PlacedWeights, place_drafter, place_target
from dflash_trt.modeling.load import drafter_tables, load_drafter, meta_drafter, target_tables

VOCAB = 320
FUSION, SHARES = "layer_fusion_weights", "fusion_shares"
DFLARE = Kind(system="dflare")


def drafter() -> Graph:
    return small_pair(DFLARE).drafter


def checkpoint_file() -> Path:
    return small_pair(DFLARE).drafter_checkpoint.path / "model.safetensors"


def softmax(weights: np.ndarray) -> np.ndarray:
    grown = np.exp(weights.astype(np.float64))
    return grown / grown.sum(axis=1, keepdims=True)


def lowered(graph: Graph) -> ir.Model:
    """As the pipeline lowers it, the check of in-place caches included."""
    return lower_onnxruntime(graph.portable())


@pytest.fixture(scope="module")
def lowered_file() -> Path:
    file = drafter().folder / "lowered.onnx"
    ir.save(lowered(drafter()), file)
    return file


def test_the_lowered_graph_equals_the_module(lowered_file: Path) -> None:
    graph = drafter()
    session = OrtSession(lowered_file, graph.spec, threads=1)
    assert_same(run_passes(session, VOCAB), run_passes(graph.reference(), VOCAB), 1e-4)


def test_the_portable_graph_equals_the_module() -> None:
    graph = drafter()
    assert_same(run_passes(graph.ort("portable.onnx"), VOCAB), run_passes(graph.reference(), VOCAB), 1e-4)


def test_one_graph_for_every_batch_and_length(lowered_file: Path) -> None:
    graph = drafter()
    ours, reference = OrtSession(lowered_file, graph.spec, threads=1), graph.reference()
    for batch, sizes in ((1, (1,)), (1, (7, 1)), (2, (1, 1, 2)), (3, (2, 6, 1))):
        assert_same(run_passes(ours, VOCAB, batch, sizes), run_passes(reference, VOCAB, batch, sizes), 1e-4)


def test_shares_are_a_constant_and_fusion_weights_no_part_of_the_graph() -> None:
    graph, weights = drafter(), load_file(checkpoint_file())[FUSION]
    assert np.abs(softmax(weights) - 1 / len(TAPS)).max() > 0.05  # nothing that a plain mean would pass for
    initializers = lowered(graph).graph.initializers
    assert FUSION not in initializers
    shares = initializers[SHARES]
    assert (shares.dtype, tuple(shares.shape or ())) == (ir.DataType.FLOAT, (LAYERS, len(TAPS)))
    assert isinstance(shares.const_value, ir.ExternalTensor)
    assert shares.const_value.location == "tables.safetensors"
    values = np.frombuffer(stored(graph.placed, SHARES), np.float32).reshape(LAYERS, len(TAPS))
    np.testing.assert_allclose(values, softmax(weights), rtol=1e-6)
    np.testing.assert_allclose(values.sum(axis=1), 1, rtol=1e-6)


def test_initialisers_have_the_names_of_the_checkpoint() -> None:
    pair = small_pair(DFLARE)
    named = set(pair.drafter.traced.graph.initializers) & set(pair.drafter.placed.entries)
    shared = {f"target.{name}" for name in ("model.embed_tokens.weight", "lm_head.weight")}
    own = set(pair.drafter_checkpoint.tensors) - {FUSION} | {SHARES, "rope_cos", "rope_sin"}
    # of a tied pair the graph names one of the two shared tensors
    assert own | shared >= named >= own


@pytest.mark.parametrize("layers", [1, 3])
def test_one_product_for_the_context_of_all_layers(layers: int, tmp_path: Path) -> None:
    """Products: the fusion, the context's keys and values, 7 in each layer (q, k, v, o, gate, up, down), the head."""
    make_target(tmp_path / "t")
    make_drafter(tmp_path / "d", tmp_path / "t", list(TAPS), 4, layers=layers, kind="dflare")
    own, target = read_drafter(tmp_path / "d").spec, read_target(tmp_path / "t").spec
    model = trace(meta_drafter(own, target, POSITIONS, "float32"), drafter_graph(own, "float32"))
    products = [node for node in model.graph if node.op_type in ("MatMul", "Gemm", "Einsum", "Conv")]
    assert {node.op_type for node in products} == {"MatMul"}
    assert len(products) == 2 + 7 * layers + 1
    features = next(value for value in model.graph.inputs if value.name == "context_features")
    fed = [node for node in products if features in _inputs_above(node) and not _reads_a_cache(node)]
    fusion, context = fed
    assert [value.name for value in fusion.inputs if value and value.is_initializer()] == [SHARES]
    weights = {f"layers.{i}.self_attn.{name}_proj_target.weight" for i in range(layers) for name in ("k", "v")}
    assert weights <= {value.name for value in _inputs_above(context)}
    for value in context.inputs:
        assert value is not None
        assert value.shape is not None
        assert value.shape[0] == layers


def _inputs_above(node: ir.Node) -> set[ir.Value]:
    """All values that a node's outputs follow from, other than through a shape."""
    seen: set[ir.Value] = set()
    queue = list(node.inputs)
    while queue:
        value = queue.pop()
        if value is None or value in seen:
            continue
        seen.add(value)
        producer = value.producer()
        if producer is not None and producer.op_type != "Shape":
            queue += producer.inputs
    return seen


def _reads_a_cache(node: ir.Node) -> bool:
    return any(value.name and value.name.startswith("past_") for value in _inputs_above(node))


def test_onnxruntime_concatenates_the_projections_once(lowered_file: Path, tmp_path: Path) -> None:
    """They stay apart in the file; what runs has one constant of them all."""
    projections = {f"layers.{i}.self_attn.{name}_proj_target.weight" for i in range(LAYERS) for name in ("k", "v")}
    model = ir.load(lowered_file)
    concat = [node for node in model.graph if projections & {value.name for value in node.inputs if value}]
    assert [node.op_type for node in concat] == ["Concat"]
    assert {model.graph.initializers[name].const_value.location for name in projections} == {"model.safetensors"}  # type: ignore[union-attr]

    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    options.log_severity_level = 3
    onnxruntime.InferenceSession(str(lowered_file), options, providers=["CPUExecutionProvider"])
    optimized = onnx.load(tmp_path / "optimized.onnx", load_external_data=False).graph
    constants = {tensor.name: tuple(tensor.dims) for tensor in optimized.initializer}
    assert not projections & constants.keys()
    stacked = [name for name, shape in constants.items() if shape == (LAYERS, 2 * 2 * 16, 32)]
    readers = Counter(node.op_type for node in optimized.node if set(stacked) & set(node.input))
    assert (len(stacked), readers) == (1, {"MatMul": 1})


def test_checker_accepts_the_graph(lowered_file: Path, tmp_path: Path) -> None:
    """On a copy: onnx refuses external data with several hard links, which is how bundles hold weights."""
    shutil.copytree(lowered_file.parent, tmp_path / "copy")
    onnx.checker.check_model(str(tmp_path / "copy" / lowered_file.name), full_check=True)


# --- weights ---

SIZE = 3  # layers and taps: an odd number of fusion weights


class Placed:
    """A pair placed for one precision, its drafter's file in another dtype where asked."""

    def __init__(self, root: Path, stored_as: str, dtype: str, keep: tuple[str, ...] = ()) -> None:
        make_target(root / "ck_target", num_hidden_layers=SIZE)
        make_drafter(root / "ck_drafter", root / "ck_target", list(range(SIZE)), layers=SIZE, kind="dflare")
        self.source = root / "ck_drafter" / "model.safetensors"
        if stored_as != "float32":
            convert_file(self.source, stored_as, keep)
        self.checkpoint, self.target = read_drafter(root / "ck_drafter"), read_target(root / "ck_target")
        for role in ("target", "drafter"):
            (root / role).mkdir()
        own = self.checkpoint.tensors
        target = place_target(
            self.target.tensors, target_tables(self.target.spec, 16), dtype, root / "target", lambda count: None
        )
        tables = drafter_tables(self.checkpoint.spec, own, 16)
        self.drafter: PlacedWeights = place_drafter(own, tables, target, dtype, root / "drafter", lambda count: None)
        self.dtype = dtype

    def shares(self) -> np.ndarray:
        assert self.drafter.entries[SHARES].dtype == "F32"
        return np.frombuffer(stored(self.drafter, SHARES), np.float32).reshape(SIZE, SIZE)

    def shares_loaded_from_the_bundle(self) -> np.ndarray:
        """By the reference, which has the bundle's weights alone."""
        entries = [e for name, e in self.drafter.entries.items() if not name.startswith("target.")]
        files = {e.file for e in entries if e.file.name != "tables.safetensors"}
        in_order = sorted(files, key=lambda file: file.name == "weights.safetensors")
        tensors = TensorFolder.from_files(in_order, later_wins=True)
        module = load_drafter(self.checkpoint.spec, tensors, self.target.spec, self.target.tensors, 16, self.dtype)
        return module.get_buffer(SHARES).numpy()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("stored_as", ["float32", "bfloat16"])
def test_shares_are_those_of_the_checkpoint_at_every_precision(tmp_path: Path, stored_as: str, dtype: str) -> None:
    placed = Placed(tmp_path, stored_as, dtype)
    original = placed.checkpoint.tensors.read(FUSION)
    np.testing.assert_allclose(placed.shares(), softmax(original), rtol=1e-6)
    np.testing.assert_array_equal(placed.shares(), placed.shares_loaded_from_the_bundle())


@pytest.mark.parametrize(("stored_as", "dtype"), [("bfloat16", "float32"), ("float32", "bfloat16")])
def test_fusion_weights_are_never_converted(tmp_path: Path, stored_as: str, dtype: str) -> None:
    placed = Placed(tmp_path, stored_as, dtype)
    entry, original = placed.drafter.entries[FUSION], placed.checkpoint.tensors[FUSION]
    assert (entry.dtype, entry.shape) == (original.dtype, original.shape)
    assert stored(placed.drafter, FUSION) == placed.checkpoint.tensors.read(FUSION).tobytes()
    assert {placed.drafter.entries[name].dtype for name in placed.checkpoint.tensors if name != FUSION} != {entry.dtype}
    # among the converted tensors, none of which its odd size misaligns
    assert entry.file.name == "weights.safetensors"
    assert all(e.offset % (e.nbytes // math.prod(e.shape)) == 0 for e in placed.drafter.entries.values())


def test_fusion_weights_of_the_right_dtype_stay_in_their_file(tmp_path: Path) -> None:
    placed = Placed(tmp_path, "float32", "float32")
    entry = placed.drafter.entries[FUSION]
    assert inode(entry.file) == inode(placed.source)
    assert stored(placed.drafter, FUSION) == load_file(placed.source)[FUSION].tobytes()


def test_float32_fusion_weights_in_a_bfloat16_checkpoint(tmp_path: Path) -> None:
    """As training codes with float32 master weights may save them."""
    placed = Placed(tmp_path, "bfloat16", "bfloat16", keep=(FUSION,))
    assert placed.checkpoint.spec.dtype == "bfloat16"
    assert placed.drafter.entries[FUSION].dtype == "F32"
    np.testing.assert_array_equal(placed.shares(), placed.shares_loaded_from_the_bundle())


def test_a_bfloat16_checkpoint_runs_in_float32() -> None:
    graph = small_pair(Kind(system="dflare", stored="bfloat16")).drafter
    assert_same(run_passes(graph.ort(), VOCAB), run_passes(graph.reference(), VOCAB), 1e-4)
