"""The wire format: messages survive encoding and decoding, and invalid bytes are harmless errors."""

import resource

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from rlox.envs.remote import Message, ProtocolError, decode, encode
from rlox.envs.remote.codec import _write_beginning

DTYPES = ["bool", "int8", "uint8", "int16", "int32", "int64", "uint64", "float16", "float32", "float64"]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
ARRAYS = st.dictionaries(
    st.text(min_size=1, max_size=12),
    st.sampled_from(DTYPES).flatmap(
        lambda kind: hnp.arrays(kind, hnp.array_shapes(min_dims=0, max_side=4, min_side=0))
    ),
    max_size=4,
)
MESSAGES = st.tuples(st.text(max_size=12), st.dictionaries(st.text(max_size=8), JSON, max_size=4), ARRAYS)


def same(one, other):
    assert (one.kind, one.fields) == (other.kind, other.fields)
    assert list(one.arrays) == list(other.arrays)
    for name, array in one.arrays.items():
        there = other.arrays[name]
        assert (there.dtype, there.shape, there.tobytes()) == (array.dtype, array.shape, array.tobytes())


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(MESSAGES)
def test_messages_are_decoded_to_views_of_the_bytes(parts):
    data = encode(*parts)
    found = decode(data)
    same(Message(*parts), found)
    assert all(array.size == 0 or not array.flags.writeable for array in found.arrays.values())
    assert encode(found.kind, found.fields, found.arrays) == data


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(MESSAGES, st.data())
def test_damaged_bytes_are_a_message_or_a_protocol_error(parts, draw):
    data = bytearray(encode(*parts))
    if draw.draw(st.booleans()):
        del data[draw.draw(st.integers(0, len(data) - 1)) :]
    for _ in range(draw.draw(st.integers(0, 3))):
        if data:
            data[draw.draw(st.integers(0, len(data) - 1))] = draw.draw(st.integers(0, 255))
    try:
        found = decode(bytes(data))
    except ProtocolError:
        return
    assert decode(encode(found.kind, found.fields, found.arrays)).kind == found.kind


@settings(max_examples=50, deadline=None)
@given(st.binary(max_size=200))
def test_random_bytes_are_errors(data):
    with pytest.raises(ProtocolError):
        decode(data)


def claimed(shape, dtype="float64", data=b""):
    """A message whose header claims an array of the given shape, with the body `data`."""
    return _write_beginning("step", (("x", dtype, shape),), "{}") + data


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (claimed((2**30,)), "must have its 8,589,934,592 bytes"),
        (claimed((2**30, 2**30, 2**30, 2**30)), "must have its"),
        (claimed((2**31,)), "shape of at most"),
        (claimed((0, 2**30, 2**30, 2**30, 2**30)), "must be an array"),
        (claimed((-1,)), "shape of at most"),
        (claimed((1,) * 9, data=b"\0" * 8), "shape of at most"),
        (claimed((1,), "object", b"\0" * 8), "one of the dtypes"),
        (claimed((1,), "bool", b"\2"), "must contain only 0 and 1"),
        (claimed((1,), data=b"\0" * 9), "1 more bytes"),
        (_write_beginning("k", (), "[" * 50 + "]" * 50), "nested deeper"),
        (_write_beginning("k", (), "[]"), "fields must be an object"),
        (_write_beginning("k", (), '{"a":' + "9" * 5000 + "}"), "at most 20 digits"),
        (_write_beginning("k", (("x", "int8", (0,)), ("x", "int8", (0,))), "{}"), "the names of arrays must differ"),
        (b"rlox\3\0\0\0" + b"\0" * 8, "have version 2"),
        (b"rlox\2\0\0\0\xff\xff\xff\x7f", "the head must have at most"),
        (encode("k", None, {"x": np.zeros(100)}), "at most 500 bytes"),
    ],
    ids=range(16),
)
def test_claimed_sizes_are_checked_before_allocation(data, message):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ProtocolError, match=message):
        decode(data, 500 if "500" in message else 2**20)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20_000  # KiB


@pytest.mark.parametrize(
    "array", [np.array(["a"]), np.array([object()]), np.zeros((1,) * 9), np.zeros(2, "complex128")]
)
def test_only_arrays_of_plain_numbers_can_be_sent(array):
    with pytest.raises(ProtocolError, match="x must"):
        encode("k", None, {"x": array})


def test_numbers_of_another_byte_order_keep_their_values():
    assert decode(encode("k", None, {"x": np.arange(3, dtype=">i4")})).arrays["x"].tolist() == [0, 1, 2]
