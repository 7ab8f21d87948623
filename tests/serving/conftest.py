"""Bundles of the trained checkpoints, for real servers; the random pair's, and their models in this process."""

from __future__ import annotations

import fcntl
import functools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from models_here import FakeServer

    import dflash_trt

CONFIGS = Path(__file__).parents[2] / "build_configs"
FILES = {"dflash": "tiny.yaml", "dflare": "tiny-dflare.yaml", "d2sd": "tiny-d2sd.yaml"}


@pytest.fixture(scope="session")
def tiny_bundle(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`tiny_bundle("d2sd")`: four sequences at once, not verified; built once, for all workers of a test run."""
    import dflash_trt

    folder = tmp_path_factory.getbasetemp()
    folder = (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "tiny-bundles"
    folder.mkdir(exist_ok=True)

    def build(system: str) -> Path:
        output = folder / system
        with (folder / f"{system}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not output.exists():
                dflash_trt.build(config=CONFIGS / FILES[system], output=output, verify=False)
        return output

    return build


@pytest.fixture(scope="session")
def tiny_engine(tiny_bundle: Callable[[str], Path]) -> Callable[[str], dflash_trt.Engine]:
    """`tiny_engine("d2sd")`: the bundle, in this process."""
    import dflash_trt

    return functools.cache(lambda system: dflash_trt.load(tiny_bundle(system), threads=1))


@pytest.fixture(scope="session")
def dflare_bundle(pair: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The random pair's target with a DFlare drafter."""
    from makers import make_drafter

    import dflash_trt

    folder = tmp_path_factory.mktemp("dflare")
    make_drafter(folder / "drafter", pair.target, taps=[0, 2, 3], kind="dflare", seed=4)
    checkpoints = {"target": pair.target, "drafter": folder / "drafter"}
    dflash_trt.build(**checkpoints, output=folder / "bundle", max_seq_len=96, max_batch_size=2, verify=False)
    return folder / "bundle"


@pytest.fixture(scope="session")
def random_bundles(bundle: Path, dflare_bundle: Path, d2sd_bundle: Path) -> dict[str, Path]:
    """The random pair's bundles by system."""
    return {"dflash": bundle, "dflare": dflare_bundle, "d2sd": d2sd_bundle}


@pytest.fixture(scope="session")
def random_engines(random_bundles: dict[str, Path]) -> dict[str, dflash_trt.Engine]:
    """Each of them in this process."""
    import dflash_trt

    return {system: dflash_trt.load(folder, threads=1) for system, folder in random_bundles.items()}


@pytest.fixture(params=["single", "ensemble"])
def layout(request: pytest.FixtureRequest) -> str:
    """Of a repository."""
    return request.param


@pytest.fixture
def repository_of(tmp_path: Path) -> Callable[..., Path]:
    """Writes one: `repository_of(bundle, "single", max_queue=3)`."""
    from dflash_trt.serving.repository import Options, write_repository

    def write(bundle: Path, layout: str, **options: Any) -> Path:
        folder = tmp_path / f"repository-{layout}"
        write_repository(bundle, folder, Options(**{"layout": layout, "threads": 1, "speculation": "on"} | options))
        return folder

    return write


@pytest.fixture
def models(repository_of: Callable[..., Path], bundle: Path, layout: str) -> Iterator[FakeServer]:
    """The models of `bundle` in this process, in both layouts."""
    from models_here import serving_here

    with serving_here(repository_of(bundle, layout)) as server:
        yield server
