import interpreter  # noqa: F401 - before a test imports kernels
