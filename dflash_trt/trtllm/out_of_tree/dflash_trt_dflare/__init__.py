"""DFlare drafters (arXiv 2606.02091) for TensorRT-LLM's PyTorch backend: importing this registers them.

`trtllm-serve --custom_module_dirs FOLDER/dflash_trt_dflare` imports it. Written by `dflash-trt trtllm export`; see the
README beside it for what was run and what was not.
"""

from .modeling import DFlareForCausalLM

__all__ = ["DFlareForCausalLM"]
