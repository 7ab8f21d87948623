"""Prompts to train drafters on, and others of the same kinds to measure them with.

Six kinds: code (from the docstrings of Python's standard library), explanations, lists, word problems, rewriting of
given text, and formatting of records. What is held out differs in substance: other modules of the library, other
topics, other numbers and names.
"""

from __future__ import annotations

import ast
import random
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

HELD_OUT_SHARE = 12  # one module, topic or thing in so many is held out
HELD_OUT_PROMPTS = 24  # of each kind


@dataclass(frozen=True)
class Prompt:
    """`chat`: put into the chat template as a user's message; else the model just goes on writing."""

    kind: str
    text: str
    chat: bool


def _parts(text: str, separator: str | None = None) -> list[str]:
    """What a text of several lines lists."""
    return [" ".join(part.split()) for part in text.split(separator)]


def training_prompts(counts: dict[str, int], seed: int) -> list[Prompt]:
    """So many different prompts of each kind, mixed."""
    rng = random.Random(seed)
    prompts = [prompt for kind, count in counts.items() for prompt in _some(kind, count, rng, held_out=False)]
    rng.shuffle(prompts)
    return prompts


def held_out_prompts(kind: str, seed: int) -> list[Prompt]:
    """Those that no training sees."""
    return _some(kind, HELD_OUT_PROMPTS, random.Random(f"{kind} {seed}"), held_out=True)


def _some(kind: str, count: int, rng: random.Random, *, held_out: bool) -> list[Prompt]:
    found: dict[str, Prompt] = {}
    make = KINDS[kind](rng, held_out)
    for _ in range(20 * count):
        prompt = next(make)
        found.setdefault(prompt.text, prompt)
        if len(found) == count:
            break
    return list(found.values())


def _part(things: list[str], *, held_out: bool, share: int = HELD_OUT_SHARE) -> list[str]:
    """One in `share` of the things, in the order of their names, or the others."""
    return [thing for number, thing in enumerate(sorted(things)) if (number % share == 0) == held_out]


def _code(rng: random.Random, held_out: bool) -> Iterator[Prompt]:
    library = Path(sysconfig.get_paths()["stdlib"])
    files = {path.stem: path for path in library.glob("*.py")} | {
        f"{path.parent.name}.{path.stem}": path
        for path in library.glob("[a-z]*/*.py")
        if "test" not in path.parent.name and not path.parent.name.endswith("-packages")
    }
    functions = [found for name in _part(list(files), held_out=held_out) for found in _functions(files[name])]
    while True:
        name, arguments, summary = rng.choice(functions)
        style = rng.randrange(4)
        if style == 0:
            yield Prompt("code", f"Write a Python function `{name}({arguments})`. {summary}", True)
        elif style == 1:
            yield Prompt("code", f"Write a Python function for this and explain it: {summary}", True)
        else:
            yield Prompt("code", f'def {name}({arguments}):\n    """{summary}"""\n', False)


def _functions(file: Path) -> Iterator[tuple[str, str, str]]:
    """Name, arguments and the docstring's first paragraph of the functions in a file."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8", errors="replace"))):
        if isinstance(node, ast.FunctionDef) and (text := ast.get_docstring(node)):
            summary = " ".join(text.split("\n\n")[0].split())
            names = [argument.arg for argument in node.args.args]
            if 20 <= len(summary) <= 240 and not node.name.startswith("__"):
                yield node.name, ", ".join(names), summary


TOPICS = _parts(
    """
    photosynthesis; gravity; the water cycle; plate tectonics; vaccines; black holes; DNA; evolution; inflation;
    supply and demand; the stock market; compound interest; mortgages; insurance; taxes; democracy; the French
    Revolution; the Roman Empire; the Cold War; the Industrial Revolution; the Renaissance; the printing press; the
    internet; search engines; machine learning; neural networks; databases; operating systems; compilers;
    encryption; blockchain; cloud computing; recursion; sorting algorithms; hash tables; binary search; linked
    lists; version control; unit testing; object-oriented programming; functional programming; regular expressions;
    APIs; HTTP; the Pythagorean theorem; prime numbers; probability; statistics; calculus; linear algebra; vectors;
    logarithms; fractions; percentages; the scientific method; atoms; chemical reactions; acids and bases; the
    periodic table; electricity; magnetism; sound waves; light; the solar system; the Moon; tides; earthquakes;
    volcanoes; hurricanes; climate change; renewable energy; solar panels; wind turbines; nuclear power; batteries;
    electric cars; airplanes; bridges; the heart; the brain; the immune system; digestion; sleep; nutrition;
    exercise; meditation; stress; allergies; antibiotics; viruses; bacteria; cells; bees; whales; elephants;
    dinosaurs; birds; trees; coral reefs; rainforests; deserts; rivers; oceans; mountains; music theory; jazz;
    classical music; painting; photography; poetry; Shakespeare; novels; grammar; storytelling; public speaking;
    time management; teamwork; leadership; budgeting; cooking; baking bread; coffee; tea; gardening; composting;
    chess; football; swimming; yoga; cycling; travel; maps; languages; philosophy; ethics; logic
    """,
    ";",
)

EXPLANATIONS = (
    "What is {}?",
    "Explain {} in simple terms.",
    "Explain {} to a ten-year-old.",
    "Why is {} important?",
    "How does {} work?",
    "Write a short paragraph about {}.",
    "What should a beginner know about {}?",
    "Tell me an interesting fact about {}.",
    "Write an introduction to an essay on {}.",
    "What are common misconceptions about {}?",
    "Summarize {} in three sentences.",
    "Give an example that makes {} clear.",
    "Describe the history of {}.",
    "Write a short story about {}.",
)


def _explain(rng: random.Random, held_out: bool) -> Iterator[Prompt]:
    topics = _part(TOPICS, held_out=held_out)
    while True:
        yield Prompt("explain", rng.choice(EXPLANATIONS).format(rng.choice(topics)), True)


THINGS = _parts(
    """
    benefits of {topic}; tips for learning about {topic}; key terms of {topic}; questions an interviewer may ask
    about {topic}; common mistakes with {topic}; book titles about {topic}; steps to get started with {topic}; facts
    about {topic}; reasons to study {topic}; ideas for a presentation on {topic}
    """,
    ";",
)

LISTS = (
    "List {n} {thing}.",
    "Give me {n} {thing}.",
    "Write a numbered list of {n} {thing}.",
    "Make a bullet list of {n} {thing}.",
    "What are {n} {thing}?",
)


def _lists(rng: random.Random, held_out: bool) -> Iterator[Prompt]:
    topics = _part(TOPICS, held_out=held_out)
    while True:
        thing = rng.choice(THINGS).format(topic=rng.choice(topics))
        yield Prompt("lists", rng.choice(LISTS).format(n=rng.randint(3, 10), thing=thing), True)


NAMES = _parts(
    """
    Anna Ben Carla David Emma Felix Grace Hugo Ines Jack Kira Liam Maya Noah Olga Paul Rosa Sam Tara Victor
    """
)
GOODS = _parts(
    """
    apples books pencils marbles stamps cookies cards coins shells tickets
    """
)
PROBLEMS = (
    "{a} has {x} {goods}. {b} gives {a} {y} more. How many {goods} does {a} have now?",
    "{a} has {x} {goods} and gives {y} to {b}. How many {goods} are left?",
    "A box holds {x} {goods}. How many {goods} are in {y} boxes?",
    "{a} buys {x} {goods} for {y} dollars each. How much does {a} pay?",
    "{a} shares {z} {goods} equally among {y} friends. How many does each friend get?",
    "What is {x} plus {y}? Show your work.",
    "What is {z} minus {x}? Show your work.",
    "Calculate {x} times {y} step by step.",
    "A train travels {x} miles per hour for {y} hours. How far does it go?",
    "{a} reads {x} pages a day. How many pages does {a} read in {y} days?",
    "The price of a coat is {z} dollars. It is reduced by {x} percent. What is the new price?",
    "A rectangle is {x} meters long and {y} meters wide. What is its area?",
)


def _math(rng: random.Random, held_out: bool) -> Iterator[Prompt]:
    while True:
        x, y = rng.randint(21, 80), rng.randint(2, 20)
        if (x * y % HELD_OUT_SHARE == 0) == held_out:
            a, b = rng.sample(NAMES, 2)
            fields = {"a": a, "b": b, "x": x, "y": y, "z": x * y + 100, "goods": rng.choice(GOODS)}
            yield Prompt("math", rng.choice(PROBLEMS).format(**fields), True)


CITIES = _parts(
    """
    Lisbon Oslo Madrid Vienna Dublin Prague Athens Rome Berlin Paris London Warsaw Helsinki Zurich Boston Denver
    """
)
JOBS = _parts(
    """
    teacher nurse carpenter engineer baker lawyer pilot farmer chemist designer plumber librarian
    """
)
SENTENCES = (
    "{a} lives in {c} and works as a {j}.",
    "{a} moved from {c} to {d} in {year}.",
    "The meeting with {a} in {c} starts at {h} o'clock.",
    "{a} and {b} met in {c} and opened a shop in {year}.",
    "The order of {x} {goods} for {a} was sent to {c} on Monday.",
    "{a}, a {j} from {c}, likes {goods} and collects {goods2}.",
    "After {x} years as a {j}, {a} went back to {c}.",
    "{b} wrote {a} a letter about the {goods} they found in {d}.",
    "{a} is {x} years old and studies in {c}.",
)
REWRITINGS = (
    "Repeat the following text exactly:\n\n{}",
    "Correct the grammar of this text:\n\n{}",
    "Rewrite the text in the past tense:\n\n{}",
    "Extract all names and places from the text as JSON:\n\n{}",
    "Turn the text into a bullet list:\n\n{}",
    "Summarize the text:\n\n{}",
    "Rewrite this as a formal letter:\n\n{}",
    "Make a table of the people in this text:\n\n{}",
    "Write the text again and replace every name with 'X':\n\n{}",
)


def _rewrite(rng: random.Random, held_out: bool) -> Iterator[Prompt]:
    names, cities = _part(NAMES, held_out=held_out, share=4), _part(CITIES, held_out=held_out, share=4)
    while True:
        sentences = []
        for sentence in rng.sample(SENTENCES, rng.randint(2, 5)):
            a, b = rng.sample(names, 2)
            c, d = rng.sample(cities, 2)
            goods, other = rng.sample(GOODS, 2)
            fields = {
                "a": a,
                "b": b,
                "c": c,
                "d": d,
                "j": rng.choice(JOBS),
                "year": rng.randint(1950, 2020),
                "h": rng.randint(1, 12),
            }
            sentences.append(sentence.format(**fields, x=rng.randint(20, 60), goods=goods, goods2=other))
        yield Prompt("rewrite", rng.choice(REWRITINGS).format(" ".join(sentences)), True)


FORMATS = (
    "Write these records as a JSON list:\n\n{}",
    "Write these records as a Markdown table:\n\n{}",
    "Write these records as CSV:\n\n{}",
    "Turn every record into a sentence:\n\n{}",
    "Write a Python list of dictionaries with these records:\n\n{}",
    "Sort these records by price and list them:\n\n{}",
    "Repeat these records, numbered:\n\n{}",
)


def _records(rng: random.Random, held_out: bool) -> Iterator[Prompt]:
    names, cities = _part(NAMES, held_out=held_out, share=4), _part(CITIES, held_out=held_out, share=4)
    while True:
        lines = [
            f"customer: {rng.choice(names)}, city: {rng.choice(cities)}, item: {rng.choice(GOODS)}, "
            f"price: {rng.randint(2, 99)}"
            for _ in range(rng.randint(2, 4))
        ]
        yield Prompt("records", rng.choice(FORMATS).format("\n".join(lines)), True)


KINDS: dict[str, Callable[[random.Random, bool], Iterator[Prompt]]] = {
    "code": _code,
    "explain": _explain,
    "lists": _lists,
    "math": _math,
    "rewrite": _rewrite,
    "records": _records,
}
