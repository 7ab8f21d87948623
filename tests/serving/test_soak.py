"""Hundreds of requests under load on one server: every answer right, no slot lost, memory flat."""

from __future__ import annotations

import http.client
import json
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from triton_server import ROOT, TritonServer, serving

import dflash_trt
from dflash_trt.config import BuildConfig
from dflash_trt.pipeline import build
from dflash_trt.serving.repository import Options, write_repository

WARM_UP, REQUESTS, CLIENTS = 250, 650, 12
PROMPTS = [json.loads(line)["prompt"] for line in (ROOT / "examples/tiny/heldout.jsonl").read_text().splitlines()]
GROWTH = 1.05


class Case(NamedTuple):
    """A request, and the text that is right; None: it is to be refused."""

    request: dict[str, Any]
    text: str | None


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("soak") / "bundle"
    build(BuildConfig.from_options(
        target=ROOT / "examples/tiny/target", drafter=ROOT / "examples/tiny/dflash",
        vp_drafter=ROOT / "examples/tiny/vp_drafter", branches=2, max_batch_size=4, max_seq_len=512, verify=False,
        output=folder,
    ))  # fmt: skip
    return folder


@pytest.fixture(scope="module")
def cases(bundle: Path) -> list[Case]:
    """Of all lengths, greedy and sampled, and some that cannot be served; the right texts are token-by-token ones."""
    engine, draw = dflash_trt.load(bundle, threads=1), random.Random(0)
    cases = []
    for number in range(40):
        prompt = PROMPTS[number] * draw.choice([1, 1, 2])
        sampling = {"temperature": 0.8, "seed": number} if number % 3 == 0 else {}
        tokens = draw.randint(1, 48)
        plain = engine.generate(prompt, speculation=False, max_tokens=tokens, **sampling)
        cases.append(Case({"text_input": prompt, "max_tokens": tokens, **sampling}, plain.text))
    wrong = [
        {"text_input": PROMPTS[0] * 100, "max_tokens": 5},
        {"text_input": PROMPTS[1], "max_tokens": 0},
        {"text_input": PROMPTS[2], "max_tokens": 5, "temperature": -1.0},
        {"text_input": "", "max_tokens": 5},
    ]
    return [*cases, *(Case(request, None) for request in wrong)]


def post(server: TritonServer, endpoint: str, body: dict[str, Any]) -> tuple[http.client.HTTPConnection, Any]:
    connection = http.client.HTTPConnection(server.http, timeout=120)
    connection.request("POST", f"/v2/models/ensemble/{endpoint}", json.dumps(body))
    return connection, connection.getresponse()


def pieces(response: Any) -> list[dict[str, Any]]:
    lines = response.read().decode().splitlines()
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]


def ask(server: TritonServer, case: Case, kind: str) -> str:
    """Sends one request; returns what came of it."""
    endpoint = "generate" if kind == "whole" else "generate_stream"
    connection, response = post(server, endpoint, {**case.request, "stream": kind != "whole"})
    try:
        if case.text is None:
            assert response.status == 400, response.read()
            assert b"error" in response.read()
            return "refused"
        assert response.status == 200, response.read()
        if kind == "left":
            response.readline()  # the first piece, then it is gone
            return "left"
        answers = [json.loads(response.read())] if kind == "whole" else pieces(response)
        assert not [answer for answer in answers if "error" in answer]
        assert "".join(answer["text_output"] for answer in answers) == case.text
        return "right"
    except TimeoutError as error:
        metrics = [line for line in server.metric_text().splitlines() if line.startswith(("dflash_trt_", "nv_inf"))]
        error.add_note("\n".join([f"{kind}: {case.request}", *metrics, server.log()[-4000:]]))
        raise
    finally:
        connection.close()


@pytest.mark.slow
def test_a_soak(bundle: Path, cases: list[Case], tmp_path: Path, record_property: Any) -> None:
    write_repository(bundle, tmp_path / "repository", Options(threads=1))
    draw = random.Random(1)
    order = [(draw.choice(cases), draw.choice(["whole", "whole", "stream", "left"])) for _ in range(REQUESTS)]
    with serving(tmp_path / "repository", tmp_path / "server") as server:

        def load(part: list[tuple[Case, str]]) -> tuple[list[str], int, int]:
            """What came of each, and the memory, own and shared, once nothing is going on."""
            with ThreadPoolExecutor(CLIENTS) as clients:
                found = list(clients.map(lambda one: ask(server, *one), part))
            quiet = threading.Event()
            while server.metric("dflash_trt_slots_in_use") or server.metric("dflash_trt_queue_depth"):
                assert not quiet.wait(0.1)
            return found, sum(server.memory().values()), server.shared_memory()

        first, warm, warm_shared = load(order[:WARM_UP])
        rest, end, end_shared = load(order[WARM_UP:])
        found = first + rest
        assert len(found) == REQUESTS
        refused = sum(case.text is None for case, _ in order)
        assert found.count("refused") == refused
        outcomes = {
            outcome: server.metric("dflash_trt_requests_total", outcome=outcome)
            for outcome in ("finished", "failed", "cancelled", "refused")
        }
        assert outcomes["failed"] == 0
        assert 0 < outcomes["refused"] < refused  # the others were refused before they came to the engine
        assert outcomes["finished"] >= found.count("right")
        assert outcomes["finished"] + outcomes["cancelled"] >= found.count("right") + found.count("left")
        assert server.metric("dflash_trt_slots") == 4
    record_property(
        "figure",
        f"soak: {REQUESTS} requests, {found.count('right')} right, {refused} refused, {found.count('left')} left; "
        f"memory {warm / 1e6:.0f} -> {end / 1e6:.0f} MB after {WARM_UP} and all, shared {end_shared / 1e6:.0f} MB",
    )
    assert end <= GROWTH * warm
    assert end_shared <= GROWTH * warm_shared
