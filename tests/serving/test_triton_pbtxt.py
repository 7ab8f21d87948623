"""Protobuf's text format against protobuf itself, by Triton's definitions."""

from __future__ import annotations

import pytest
from google.protobuf import text_format
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.grpc import model_config_pb2

from dflash_trt.serving.pbtxt import PbtxtError, Word, dump, parse

TEXT = st.text(st.characters(codec="utf-8"), max_size=30)


@given(name=TEXT, dims=st.lists(st.integers(-1, 2**40), min_size=1, max_size=4), optional=st.booleans(), value=TEXT)
def test_protobuf_reads_what_is_written_and_we_read_the_same(name, dims, optional, value):
    message = {
        "name": name,
        "max_batch_size": 3,
        "input": [{"name": "a", "data_type": Word("TYPE_FP16"), "dims": dims, "optional": optional}, {"name": "b"}],
        "model_transaction_policy": {"decoupled": optional},
        "parameters": [{"key": "k", "value": {"string_value": value}}],
    }
    text = dump(message)
    config = text_format.Parse(text, model_config_pb2.ModelConfig())
    assert (config.name, config.max_batch_size) == (name, 3)
    assert [port.name for port in config.input] == ["a", "b"]
    assert list(config.input[0].dims) == dims
    assert config.input[0].data_type == model_config_pb2.TYPE_FP16
    assert config.input[0].optional == config.model_transaction_policy.decoupled == optional
    assert config.parameters["k"].string_value == value
    read = parse(text)
    assert (read["name"], read["max_batch_size"]) == ([name], [3])
    assert read["input"][0] == {
        "name": ["a"],
        "data_type": [Word("TYPE_FP16")],
        "dims": dims,
        "optional": ["true" if optional else "false"],
    }
    assert read["parameters"] == [{"key": ["k"], "value": [{"string_value": [value]}]}]


def test_reads_other_ways_of_writing():
    text = """
    # a comment
    name: "x"   # another
    input [ { name: "a" dims: [ 1, 2 ], data_type: TYPE_BOOL }, { name: "b" } ]
    parameters: { key: "k", value: { string_value: "v" } }
    cost: -1.5
    """
    read = parse(text)
    assert [port["name"] for port in read["input"]] == [["a"], ["b"]]
    assert read["input"][0]["dims"] == [1, 2]
    assert (read["name"], read["cost"]) == (["x"], [-1.5])
    assert read["parameters"][0]["value"][0]["string_value"] == ["v"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('name: "x"\ninput {', "ends where } should be"),
        ("dims: [1, 2", "ends where ] should be"),
        ("name:", "ends where the value of name should be"),
        ('name: "x"\n}', "line 2: } where a field's name should be"),
        ("\n\nname: }", "line 3: } where the value of name should be"),
        ('name: "x', "line 1 is not"),
        ("name: ${placeholder}", "line 1 is not"),
        ('1: "x"', "line 1: 1 where a field's name should be"),
    ],
)
def test_says_where_it_is_wrong(text, said):
    with pytest.raises(PbtxtError, match=said.replace("$", r"\$")):
        parse(text)
