"""The prompts a build checks itself with: code, prose, lists, and text that copies identifiers from further back."""

from __future__ import annotations

from dflash_trt.runtime.engine import Engine
from dflash_trt.runtime.limits import Limits

PROBES = (
    "import os\nimport sys\n\n\ndef main(argv):\n    ",
    "class Node:\n    def __init__(self, value):\n        self.value = value\n        self.next = None\n\n    def ",
    "The history of the city begins with a small settlement on the river, where",
    "Question: A train travels 60 miles in 1.5 hours. What is its speed?\nAnswer: To find the speed, we",
    "def test_parse_header_returns_none(self):\n    header_value_xq17 = parse_header('xq17')\n    self.assertIsNone(",
    "1. apples\n2. bananas\n3. cherries\n4. ",
    "for name in sorted(names):\n    if name not in seen:\n        seen.add(name)\n        ",
    '{"id": 1, "name": "alpha"}\n{"id": 2, "name": "beta"}\n{"id": 3, "name": ',
)


def probe_prompts(engine: Engine) -> list[list[int]]:
    """The probes as tokens, cut so that half of the longest sequence is left to decode."""
    longest = _longest(engine.limits)
    return [ids[:longest] for ids in map(engine.tokenizer.encode, PROBES) if ids]


def room_behind_probes(limits: Limits) -> int:
    """The tokens that fit behind each of the prompts."""
    return limits.max_seq_len - _longest(limits)


def _longest(limits: Limits) -> int:
    return min(limits.max_input_len, max(1, limits.max_seq_len // 2))
