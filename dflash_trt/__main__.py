"""`python -m dflash_trt`."""

from dflash_trt.cli.main import main

main()
