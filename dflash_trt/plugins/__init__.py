"""The operators' GPU faces: kernels in the Triton language and the TensorRT plugin library.

Their sources are the folder `plugins/` of a checkout; a wheel carries the same files inside this package. Importing
this package imports nothing of them.
"""

from pathlib import Path

_PACKAGED = Path(__file__).parent
SOURCES = _PACKAGED if (_PACKAGED / "kernels").is_dir() else _PACKAGED.parents[1] / "plugins"
"""The folder with kernels/, tensorrt/ and CMakeLists.txt."""

__path__ = [str(_PACKAGED), str(SOURCES)]
