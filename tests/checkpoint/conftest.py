"""One pair of checkpoints made for the session; each test that asks gets its own copy to break."""

import shutil
from pathlib import Path

import pytest
from makers import make_drafter, make_target


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """target (Qwen3, tied), untied (Qwen3), llama (untied) and drafter (for target) in one folder."""
    folder = tmp_path_factory.mktemp("made")
    make_target(folder / "target")
    make_target(folder / "untied", tie=False)
    make_target(folder / "llama", family="llama", tie=False)
    make_drafter(folder / "drafter", folder / "target", taps=[0, 2, 3], block_size=8, layers=2)
    return folder


def _copied(made: Path, tmp_path: Path, name: str) -> Path:
    return Path(shutil.copytree(made / name, tmp_path / name))


@pytest.fixture
def target_dir(made: Path, tmp_path: Path) -> Path:
    return _copied(made, tmp_path, "target")


@pytest.fixture
def untied_dir(made: Path, tmp_path: Path) -> Path:
    return _copied(made, tmp_path, "untied")


@pytest.fixture
def llama_dir(made: Path, tmp_path: Path) -> Path:
    return _copied(made, tmp_path, "llama")


@pytest.fixture
def drafter_dir(made: Path, tmp_path: Path) -> Path:
    return _copied(made, tmp_path, "drafter")
