"""Kernels in the Triton language, one file per operator, each with the function that launches it.

They are compiled when first launched (torch on CUDA) or ahead of time (`dflash_trt.plugins.aot`, for the TensorRT
plugins). With TRITON_INTERPRET=1 in the environment before triton is imported, the same source runs on a CPU.
"""
