"""Packages for TensorRT-LLM's `--custom_module_dirs`, which the export copies: they import nothing of dflash_trt."""
