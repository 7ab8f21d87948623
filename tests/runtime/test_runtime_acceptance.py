"""The walk: lossless for any tree, never worse than a chain inside the tree, and lazy."""

import random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dflash_trt.runtime.acceptance import walk
from dflash_trt.runtime.sampling import History, Sampler, SamplingParams
from dflash_trt.runtime.tree import CandidateTree

VOCABULARY = 4


def next_token(prefix: tuple[int, ...], seed: int) -> int:
    """A deterministic random "language model"."""
    return random.Random(hash((seed, prefix))).randrange(VOCABULARY)


def rollout(prefix: tuple[int, ...], count: int, seed: int) -> list[int]:
    tokens: list[int] = []
    for _ in range(count):
        tokens.append(next_token((*prefix, *tokens), seed))
    return tokens


def drafted_tree(prefix: tuple[int, ...], seed: int, rng: random.Random, nodes: int) -> CandidateTree:
    """A random tree under `prefix[-1]` whose nodes often, but not always, carry what the model will say."""
    tokens, parents, paths = [prefix[-1]], [-1], [()]
    for _ in range(nodes):
        parent = rng.choice([rng.randrange(len(tokens)), len(tokens) - 1])
        right = next_token((*prefix, *paths[parent]), seed)
        token = right if rng.random() < 0.7 else rng.randrange(VOCABULARY)
        if all((p, t) != (parent, token) for p, t in zip(parents, tokens, strict=True)):
            tokens.append(token)
            parents.append(parent)
            paths.append((*paths[parent], token))
    return CandidateTree.from_parents(tokens, parents)


@given(st.integers(0, 10**6), st.integers(0, 30), st.booleans())
def test_emitted_tokens_equal_the_rollout(seed: int, nodes: int, chain: bool) -> None:
    rng = random.Random(seed)
    prefix: tuple[int, ...] = (1, 2, 3)
    for _ in range(4):
        tree = drafted_tree(prefix, seed, rng, nodes)
        if chain:
            drafts = [t if rng.random() < 0.8 else 0 for t in rollout(prefix, nodes, seed)]
            tree = CandidateTree.chain([prefix[-1], *drafts])
        result = walk(tree, lambda node, path, prefix=prefix: next_token((*prefix, *path), seed))
        assert result.tokens == rollout(prefix, len(result.tokens), seed)
        assert len(result.path) == len(result.tokens)
        assert [int(tree.tokens[node]) for node in result.path[1:]] == result.tokens[:-1]
        prefix += tuple(result.tokens)


@given(st.integers(0, 10**6), st.integers(0, 30))
def test_a_tree_accepts_at_least_what_its_chains_accept(seed: int, nodes: int) -> None:
    prefix = (5, 6)
    tree = drafted_tree(prefix, seed, random.Random(seed), nodes)

    def choose(node: int, path: tuple[int, ...]) -> int:
        return next_token((*prefix, *path), seed)

    accepted = len(walk(tree, choose).path) - 1
    chains = []
    for leaf in (node for node in range(len(tree)) if node not in tree.parents):
        nodes_up = [leaf]
        while nodes_up[-1]:
            nodes_up.append(int(tree.parents[nodes_up[-1]]))
        chains.append(len(walk(CandidateTree.chain(tree.tokens[nodes_up[::-1]]), choose).path) - 1)
    assert accepted == max(chains)


@given(st.integers(0, 10**6))
def test_only_nodes_on_the_path_are_evaluated(seed: int) -> None:
    prefix = (5, 6)
    tree = drafted_tree(prefix, seed, random.Random(seed), 20)
    asked = []

    def choose(node: int, path: tuple[int, ...]) -> int:
        asked.append(node)
        assert len(path) == tree.depths[node]
        return next_token((*prefix, *path), seed)

    assert walk(tree, choose).path == asked


def test_all_accepted_and_none_accepted() -> None:
    tree = CandidateTree.chain([0, 1, 2])
    assert walk(tree, lambda node, path: node + 1).tokens == [1, 2, 3]
    assert walk(tree, lambda node, path: 9).tokens == [9]
    assert walk(CandidateTree.chain([0]), lambda node, path: 4).path == [0]


@given(
    st.integers(0, 10**6),
    st.sampled_from([0.0, 0.7, 1.5]),
    st.sampled_from([0, 3]),
    st.sampled_from([1.0, 1.4]),
    st.sampled_from([0.0, 0.6]),
)
def test_speculation_with_the_real_sampler_equals_token_by_token(
    seed: int, temperature: float, top_k: int, repetition: float, frequency: float
) -> None:
    params = SamplingParams(
        temperature=temperature, top_k=top_k, repetition_penalty=repetition, frequency_penalty=frequency, seed=seed
    )
    sampler, prompt = Sampler(params), [1, 2, 3]

    def logits(prefix: tuple[int, ...]) -> np.ndarray:
        return np.random.default_rng([seed, *prefix[-3:]]).normal(size=6).astype(np.float32)

    plain, history = list(prompt), History(prompt)
    while len(plain) < 24:
        plain.append(sampler.choose(logits(tuple(plain)), len(plain), history))
        history.extend(plain[-1:])

    rng = random.Random(seed)
    tokens, history = list(prompt), History(prompt)
    while len(tokens) < 24:
        drafts = [t if rng.random() < 0.8 else 0 for t in plain[len(tokens) : len(tokens) + 5]]
        tree = CandidateTree.chain([tokens[-1], *drafts])

        def choose(node: int, path: tuple[int, ...], tree=tree, base=tuple(tokens), history=history) -> int:
            position = len(base) + int(tree.depths[node])
            return sampler.choose(logits((*base, *path)), position, history, path)

        emitted = walk(tree, choose).tokens
        tokens += emitted
        history.extend(emitted)
    assert tokens[:24] == plain
