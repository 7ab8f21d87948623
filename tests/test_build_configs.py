"""The shipped build configurations: they parse, and describe the pairs they are named after."""

from __future__ import annotations

from pathlib import Path

import pytest

from dflash_trt.checkpoint import drafter as drafters
from dflash_trt.checkpoint.spec import AttentionPolicy, DrafterSpec, RopeSpec
from dflash_trt.config import BuildConfig
from dflash_trt.errors import PairError, UsageError

CONFIGS = sorted((Path(__file__).parents[1] / "build_configs").glob("*.yaml"))
PARAMETERS = {
    "qwen3-4b-dflash-b16": 537_427_200,
    "qwen3-8b-dflash-b16": 1_048_626_432,
    "qwen3-8b-d2sd-b16": 1_048_626_432,
    "qwen3-4b-dflare-b16": 743_221_055,
}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_parses(path):
    config = BuildConfig.from_options(path, target=Path("t"), drafter=Path("d"), output=Path("b"))
    assert config.output == Path("b")
    assert config.block_size is None or config.block_size == config.expect.drafter["block_size"]


@pytest.mark.parametrize("name", PARAMETERS)
def test_describes_the_published_drafter(name):
    """The expected fields make a drafter of the published size."""
    path = Path(__file__).parents[1] / "build_configs" / f"{name}.yaml"
    config = BuildConfig.from_options(path, target=Path("t"), drafter=Path("d"), output=Path("b"))
    target, drafter = config.expect.target, config.expect.drafter
    spec = DrafterSpec(
        architecture="DFlashDraftModel",
        hidden_size=drafter["hidden_size"],
        intermediate_size=target["intermediate_size"],
        num_layers=drafter["num_layers"],
        num_heads=target["num_heads"],
        num_kv_heads=target["num_kv_heads"],
        head_dim=target["head_dim"],
        vocab_size=target["vocab_size"],
        rms_norm_eps=1e-6,
        max_position_embeddings=40960,
        rope=RopeSpec(theta=1e6, rotary_dim=target["head_dim"]),
        policies=(AttentionPolicy(causal=False),) * drafter["num_layers"],
        qk_norm=True,
        dtype="bfloat16",
        system=drafter["system"],
        block_size=drafter["block_size"],
        mask_token_id=drafter["mask_token_id"],
        taps=tuple(drafter["taps"]),
        num_target_layers=target["num_layers"],
        target_hidden_size=target["hidden_size"],
    )
    assert drafters.parameter_count(spec) == PARAMETERS[name]
    assert config.expect.vp_drafter == (drafter if "d2sd" in name else {})


def test_paths_are_relative_to_the_file(tmp_path):
    (tmp_path / "c.yaml").write_text("target: t\ndrafter: d\noutput: b\n")
    config = BuildConfig.from_options(tmp_path / "c.yaml")
    assert config.target == tmp_path / "t"
    assert BuildConfig.from_options(tmp_path / "c.yaml", target=Path("x")).target == Path("x")


def test_an_unknown_field_is_named(tmp_path):
    (tmp_path / "c.yaml").write_text("target: t\ndrafter: d\noutput: b\nmax_sequence: 3\n")
    with pytest.raises(UsageError, match="max_sequence"):
        BuildConfig.from_options(tmp_path / "c.yaml")


def test_a_checkpoint_the_configuration_was_not_written_for_is_refused(tmp_path):
    from makers import make_drafter, make_target

    make_target(tmp_path / "t")
    make_drafter(tmp_path / "d", tmp_path / "t", taps=[1])
    from dflash_trt.checkpoint.drafter import read_drafter
    from dflash_trt.checkpoint.target import read_target

    config = BuildConfig.from_options(
        target=tmp_path / "t", drafter=tmp_path / "d", output=tmp_path / "b", expect={"drafter": {"taps": [2]}}
    )
    specs = {"target": read_target(tmp_path / "t").spec, "drafter": read_drafter(tmp_path / "d").spec}
    with pytest.raises(PairError, match=r"taps = \[1\].*\[2\]"):
        config.check_expected(specs)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("drafer: d", ("no build option drafer", "Did you mean drafter?")),  # named before what is then missing
        ("max_seq_len: 512", ("target: is missing", "--target")),
        ("max_seq_len: 1", ("max_seq_len: 1 must be greater than or equal to 2",)),
        ("- 1", ("must be a mapping", "max_seq_len: 1024")),
    ],
)
def test_a_faulty_configuration_is_explained(tmp_path, text, words):
    (tmp_path / "c.yaml").write_text(text + "\n")
    with pytest.raises(UsageError) as raised:
        BuildConfig.from_options(tmp_path / "c.yaml")
    assert all(word in str(raised.value) for word in words), raised.value
