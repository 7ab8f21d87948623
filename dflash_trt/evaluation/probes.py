"""The prompts a build checks itself with: code, prose, lists, and text that copies identifiers from further back."""

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
