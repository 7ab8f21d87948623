"""Backends: each lowers a portable graph to what it runs, and opens it as a `Session`; the runtime knows only those."""
