"""One face for three TensorRTs, as far as it builds: with fakes in the shapes of 10 and 11, and with TensorRT-RTX."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import rtx as real
from backends.fake_builder import FakeConfig, rtx, tensorrt
from backends.fake_engine import Enumeration
from onnx import TensorProto, helper

from dflash_trt.backends import tensorrt_api
from dflash_trt.backends.parser_version import Flavour
from dflash_trt.backends.tensorrt_api import FLAGS, TensorRT, load
from dflash_trt.errors import BackendError
from dflash_trt.ops import OPSET

Stub = Callable[[Flavour, str], None]


@pytest.fixture(scope="module")
def api() -> TensorRT:
    """TensorRT-RTX, where it is there."""
    real.tensorrt_rtx()
    return load("tensorrt-rtx")


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stub]:
    """Puts a package with this text in a TensorRT's place."""
    name = "stub_" + re.sub(r"\W", "_", tmp_path.name)

    def put(flavour: Flavour, text: str) -> None:
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setitem(tensorrt_api.MODULES, flavour, name)
        importlib.invalidate_caches()

    yield put
    sys.modules.pop(name, None)


# --- finding one


@pytest.mark.parametrize(
    ("flavour", "name", "extra"),
    [("tensorrt", "TensorRT", "tensorrt"), ("tensorrt-rtx", "TensorRT-RTX", "rtx")],
)
def test_one_that_is_not_installed(
    flavour: Flavour, name: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(tensorrt_api.MODULES, flavour, "a_tensorrt_that_nobody_has")
    assert not tensorrt_api.installed(flavour)
    with pytest.raises(BackendError) as caught:
        load(flavour)
    expected = f"--backend {flavour}: {name} is not installed. pip install 'dflash-trt[{extra}]'"
    assert str(caught.value) == expected


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("raise ImportError('libnvinfer.so.10: cannot open shared object file')", "libnvinfer.so.10: cannot open"),
        ("raise OSError('libcuda.so.1: no such file')", "libcuda.so.1: no such file"),
        ("raise RuntimeError('no driver\\nat all')", "no driver at all"),
        ("import a_binding_that_nobody_has", "No module named 'a_binding_that_nobody_has'"),
        ("", "has no attribute '__version__'"),
    ],
    ids=["library", "driver", "anything", "bindings", "namespace"],
)
def test_one_that_is_installed_and_does_not_work(stub: Stub, text: str, told: str) -> None:
    stub("tensorrt", text)
    assert tensorrt_api.installed("tensorrt")
    with pytest.raises(BackendError) as caught:
        load("tensorrt")
    assert "TensorRT is installed but cannot be imported: " in caught.value.what
    assert told in caught.value.what
    assert caught.value.mend == "pip install 'dflash-trt[tensorrt]'"


@pytest.mark.parametrize(
    ("flavour", "version", "oldest"),
    [
        ("tensorrt", "10.13.3.9", "10.14"),
        ("tensorrt", "8.6.1", "10.14"),
        ("tensorrt", "9.99.0", "10.14"),
        ("tensorrt-rtx", "1.6.0.7", "1.7"),
    ],
)
def test_one_that_is_too_old(stub: Stub, flavour: Flavour, version: str, oldest: str) -> None:
    stub(flavour, f"__version__ = {version!r}")
    with pytest.raises(BackendError, match=f"{re.escape(version)} is too old: {re.escape(oldest)} is the first"):
        load(flavour)


@pytest.mark.parametrize(
    ("flavour", "version", "release"),
    [
        ("tensorrt", "10.14.1.48", (10, 14)),
        ("tensorrt", "10.100.0", (10, 100)),
        ("tensorrt", "11.0.0", (11, 0)),
        ("tensorrt-rtx", "1.7.1.116", (1, 7)),
        ("tensorrt-rtx", "2.0.0.1", (2, 0)),
    ],
)
def test_one_that_will_do(stub: Stub, flavour: Flavour, version: str, release: tuple[int, int]) -> None:
    stub(flavour, f"__version__ = {version!r}")
    found = load(flavour)
    assert (found.flavour, found.version, found.parser.release) == (flavour, version, release)
    assert (found.parser.flavour, str(found)) == (flavour, f"{tensorrt_api.NAMES[flavour]} {version}")


def test_the_real_one(api: TensorRT) -> None:
    assert api.trt is real.tensorrt_rtx()
    assert (api.name, api.parser.flavour) == ("TensorRT-RTX", "tensorrt-rtx")
    assert str(api) == f"TensorRT-RTX {api.trt.__version__}"


# --- what it can do


def test_what_differs() -> None:
    assert (tensorrt().takes_plugins, tensorrt().compiles_ahead, tensorrt().compute_capabilities) == (True, False, ())
    assert (rtx().takes_plugins, rtx().compiles_ahead) == (False, True)
    assert rtx().compute_capabilities == (75, 80, 86, 89, 120, 121)


def test_what_the_real_one_compiles_for(api: TensorRT) -> None:
    assert {80, 86, 89, 120} <= set(api.compute_capabilities)
    assert all(cc > 70 for cc in api.compute_capabilities)


def test_dtypes_have_the_names_of_the_contract(api: TensorRT) -> None:
    names = {name: api.dtype(value) for name, value in api.trt.DataType.__members__.items()}
    wanted = {
        "FLOAT": "float32", "HALF": "float16", "BF16": "bfloat16", "INT32": "int32", "INT64": "int64", "BOOL": "bool",
        "INT8": "int8", "FP8": "fp8",
    }  # fmt: skip
    assert {name: names[name] for name in wanted} == wanted
    assert len(set(names.values())) == len(names)


def test_messages(api: TensorRT) -> None:
    for face in (api, tensorrt()):
        logger, messages = face.logger()
        assert messages.last_error() == "no reason was given"
        severity = face.trt.ILogger.Severity
        for level in ("INTERNAL_ERROR", "ERROR", "WARNING", "INFO", "VERBOSE"):
            logger.log(getattr(severity, level), f"{level}\n  in two lines ")
        assert messages.errors == ["INTERNAL_ERROR\n  in two lines ", "ERROR\n  in two lines "]
        assert messages.last_error() == "ERROR in two lines"


# --- strong typing


@pytest.mark.parametrize(
    ("version", "creation", "asked"),
    [
        ("10.14.1.48", ("EXPLICIT_BATCH", "STRONGLY_TYPED", "PREFER_AOT_PYTHON_PLUGINS"), 0b10),
        ("11.1.0.106", ("STRONGLY_TYPED", "PREFER_AOT_PYTHON_PLUGINS"), 0b1),
        ("11.9.0.1", ("PREFER_AOT_PYTHON_PLUGINS", "PREFER_JIT_PYTHON_PLUGINS"), 0),
        ("11.9.0.1", (), 0),
    ],
)
def test_networks_are_strongly_typed(version: str, creation: tuple[str, ...], asked: int) -> None:
    face = tensorrt(version, creation=creation)
    face.network(face.trt.Builder(face.logger()[0]))
    assert face.trt.networks == [asked]


def test_the_networks_of_the_real_one(api: TensorRT) -> None:
    network = api.network(api.trt.Builder(api.logger()[0]))
    assert network.get_flag(api.trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)


# --- flags


@pytest.mark.parametrize("name", FLAGS)
def test_a_flag_that_a_version_lacks(name: str) -> None:
    face = tensorrt("11.9.0.1", flags=("DEBUG", "TF32", *(flag for key, flag in FLAGS.items() if key != name)))
    config = FakeConfig()
    with pytest.raises(BackendError) as caught:
        face.set_flags(config, list(FLAGS), plugins=False)
    option = f"--{name.replace('_', '-')}"
    assert str(caught.value) == f"{option}: TensorRT 11.9.0.1 has no such builder flag. Leave it out"
    assert config.flags == {"TF32"}
    face.set_flags(config, [other for other in FLAGS if other != name], plugins=False)
    assert config.flags == {"TF32", *FLAGS.values()} - {FLAGS[name]}


@pytest.mark.parametrize("plugins", [True, False])
@pytest.mark.parametrize(
    ("previews", "there"),
    [
        (("PROFILE_SHARING_0806", "ALIASED_PLUGIN_IO_10_03"), True),
        (("ALIASED_PLUGIN_IO_10_03", "RUNTIME_ACTIVATION_RESIZE_10_10"), True),
        (("RUNTIME_ACTIVATION_RESIZE_10_10",), False),
        ((), False),
    ],
)
def test_plugins_that_write_into_inputs_have_their_preview(
    previews: tuple[str, ...], there: bool, plugins: bool
) -> None:
    config = FakeConfig()
    tensorrt(previews=previews).set_flags(config, [], plugins=plugins)
    assert config.previews == ({"ALIASED_PLUGIN_IO_10_03"} if plugins and there else set())


@pytest.mark.parametrize("names", [[], ["refit"], ["weight_streaming"], ["refit", "weight_streaming"]])
def test_the_flags_of_the_real_one(api: TensorRT, names: Sequence[str]) -> None:
    config = api.trt.Builder(api.logger()[0]).create_builder_config()
    flags = {name: getattr(api.trt.BuilderFlag, flag) for name, flag in FLAGS.items()}
    api.set_flags(config, names, plugins=False)
    assert {name for name, flag in flags.items() if config.get_flag(flag)} == set(names)
    assert config.get_flag(api.trt.BuilderFlag.REQUIRE_USER_ALLOCATION) == ("weight_streaming" not in names)


def test_passes_of_rtx_allocate_nothing_and_others_are_not_asked() -> None:
    for face, asked in ((rtx(), True), (tensorrt(), False), (tensorrt(flags=("REQUIRE_USER_ALLOCATION",)), False)):
        config = FakeConfig()
        face.set_flags(config, [], plugins=False)
        assert ("REQUIRE_USER_ALLOCATION" in config.flags) == asked


# --- compute capabilities


def test_compute_capabilities_are_named_in_order() -> None:
    config = FakeConfig()
    rtx().set_compute_capabilities(config, (120, 86))
    assert config.capabilities == ["SM120", "SM86"]


def test_compute_capabilities_of_the_real_one(api: TensorRT) -> None:
    config = api.trt.Builder(api.logger()[0]).create_builder_config()
    api.set_compute_capabilities(config, (120, 86))
    assert config.num_compute_capabilities == 2
    named = [config.get_compute_capability(index) for index in range(2)]
    assert named == [api.trt.ComputeCapability.SM120, api.trt.ComputeCapability.SM86]


@pytest.mark.parametrize(("asked", "unknown"), [((90,), "90"), ((86, 90, 5), "90, 5"), ((900,), "900")])
def test_compute_capabilities_it_does_not_know(api: TensorRT, asked: tuple[int, ...], unknown: str) -> None:
    config = api.trt.Builder(api.logger()[0]).create_builder_config()
    with pytest.raises(BackendError) as caught:
        api.set_compute_capabilities(config, asked)
    assert caught.value.where == "--compute-capability"
    assert caught.value.what == f"{api} cannot compile ahead of time for {unknown}"
    assert caught.value.mend == f"There are: {', '.join(map(str, api.compute_capabilities))}"
    assert config.num_compute_capabilities == 0


def test_tensorrt_compiles_for_the_gpu_at_hand() -> None:
    config = FakeConfig()
    with pytest.raises(BackendError, match=r"ahead of time for 86\. There are: only the GPU at hand"):
        tensorrt().set_compute_capabilities(config, (86,))
    assert config.capabilities == []


# --- attention


def attention_model(nodes: int) -> bytes:
    """Attention nodes one behind the other, with other layers between them."""
    shape = [2, 4, 8, 64]
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT16, shape) for name in ("q", "k", "v")]
    made, last = [], "q"
    for number in range(nodes):
        made.append(helper.make_node("Attention", [last, "k", "v"], [f"a{number}"], name=f"attention_{number}"))
        made.append(helper.make_node("Tanh", [f"a{number}"], [f"t{number}"], name=f"tanh_{number}"))
        last = f"t{number}"
    made.append(helper.make_node("Neg", [last], ["y"], name="neg"))
    output = helper.make_tensor_value_info("y", TensorProto.FLOAT16, shape)
    graph = helper.make_graph(made, "attentions", inputs, [output])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=11).SerializeToString()


@pytest.mark.parametrize("nodes", [0, 1, 3])
def test_every_attention_of_a_network(api: TensorRT, nodes: int) -> None:
    parser = real.Parser()
    assert parser.errors(attention_model(nodes)) == []
    found = list(api.attentions(parser.network))
    assert len(found) == nodes
    for attention in found:
        assert isinstance(attention, api.trt.IAttention)
        attention.decomposable = True
    assert all(attention.decomposable for attention in api.attentions(parser.network))


def test_a_version_without_attention_layers() -> None:
    face = tensorrt()
    face.trt.LayerType = Enumeration(CONVOLUTION=0)
    layer = SimpleNamespace(type=face.trt.LayerType.CONVOLUTION)
    network = SimpleNamespace(num_layers=2, get_layer=lambda index: layer)
    assert list(face.attentions(network)) == []
