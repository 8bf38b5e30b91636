"""`--input name=VALUE` becomes the tensor that the model asks for, or an error that says what to do."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from qinfer.cli.client import as_json_object, fill, random, read_inputs, read_sequence, zeros
from qinfer.client import InferResult, TensorMetadata
from qinfer.client.model_flows import as_array
from qinfer.errors import InvalidRequest
from qinfer.tensors import DATATYPES, from_numpy, to_numpy
from qinfer.wire.kserve_client import decode_response, encode_request

IMAGE = TensorMetadata(name="image", datatype="FP32", shape=(-1, 3))
IDS = TensorMetadata(name="ids", datatype="INT64", shape=(2,))
TEXT = TensorMetadata(name="text", datatype="BYTES", shape=(-1, 1))


def test_json_text_gets_datatype_and_batch_dimension() -> None:
    """A flat list for a model with a batch dimension is one row of it."""
    (tensor,) = read_inputs(["image=[1, 2, 3]"], [IMAGE], "m")

    assert (tensor.datatype, tensor.shape) == ("FP32", (1, 3))
    assert to_numpy(tensor).tolist() == [[1.0, 2.0, 3.0]]


def test_array_with_batch_dimension_stays_as_it_is() -> None:
    """Nothing is added to what is complete."""
    (tensor,) = read_inputs(["image=[[1, 2, 3], [4, 5, 6]]"], [IMAGE], "m")

    assert tensor.shape == (2, 3)


def test_one_number_gets_all_dimensions_of_one_element() -> None:
    (tensor,) = read_inputs(["x=3"], [TensorMetadata(name="x", datatype="FP32", shape=(-1, 1))], "m")

    assert (tensor.shape, to_numpy(tensor).tolist()) == ((1, 1), [[3.0]])


def test_fixed_first_dimension_gets_no_batch_dimension() -> None:
    """Without a variable first dimension there is no batch."""
    (tensor,) = read_inputs(["ids=[7, 8]"], [IDS], "m")

    assert (tensor.datatype, tensor.shape) == ("INT64", (2,))


def test_npy_file_is_cast(tmp_path: Path) -> None:
    """Numpy saves float64 by default; the model's FP32 is what is sent."""
    np.save(tmp_path / "image.npy", np.array([0.5, 1.5, 2.5]))

    (tensor,) = read_inputs([f"image={tmp_path}/image.npy"], [IMAGE], "m")

    assert to_numpy(tensor).tolist() == [[0.5, 1.5, 2.5]]


def test_json_file_is_read(tmp_path: Path) -> None:
    """A value that ends in .json is a file."""
    (tmp_path / "text.json").write_text('["grüße"]')

    (tensor,) = read_inputs([f"text={tmp_path}/text.json"], [TEXT], "m")

    assert to_numpy(tensor).tolist() == [["grüße".encode()]]


def test_zeros_fill_variable_dimensions_with_one() -> None:
    """`zeros` needs no file for a first try."""
    (tensor,) = read_inputs(["image=zeros"], [IMAGE], "m")

    assert to_numpy(tensor).tolist() == [[0.0, 0.0, 0.0]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], r"model 'm' needs --input .* image \(FP32 \[-1, 3\]\), ids \(INT64 \[2\]\)"),
        (["imagge=[1]"], r"no input 'imagge'; its inputs are: image"),
        (["image"], "expected name=VALUE, such as image=zeros"),
        (["image=zeros", "image=zeros"], "given twice"),
        (["image=nothing.npy"], r"nothing\.npy can't be read: No such file"),
        (["image=nothing.json"], r"nothing\.json can't be read: No such file"),
        (["image=[1, 2"], "or JSON text"),
        (["image=[[1, 2], [3]]"], "can't be read as FP32"),
        (['image=["a"]'], "can't be read as FP32"),
        (['ids=["a", 2]'], 'can\'t be read as INT64: "a" instead of an integer'),
        (["ids=[1.5, 2]"], "can't be read as INT64: 1.5 instead of an integer"),
        (["ids=[[1], [2, 3]]"], "can't be read as INT64: lists of different lengths instead of an integer"),
        (["ids=[18446744073709551615, 0]"], "can't be read as INT64: .*too large"),
        (["image=[1e39, 0, 0]"], r"can't be read as FP32: 1e\+39 does not fit"),
        (["image=[null, 0, 0]"], "can't be read as FP32: its elements are not numbers"),
    ],
)
def test_bad_option_says_what_to_do(options: list[str], message: str) -> None:
    """Every mistake has its own message."""
    with pytest.raises(InvalidRequest, match=message):
        read_inputs(options, [IMAGE, IDS], "m")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ('[["a"], ["b", "c"]]', "input 'text' can't be read as BYTES: lists of different lengths"),
        ("[[null]]", "BYTES: null instead of a text"),
        ("[[true]]", "BYTES: true instead of a text"),
        ('[[{"a": 1}]]', "BYTES: {.a.: 1} instead of a text"),
    ],
)
def test_what_is_no_text_is_refused(value: str, message: str) -> None:
    """Python's way to write it is nobody's input."""
    with pytest.raises(InvalidRequest, match=message):
        read_inputs([f"text={value}"], [TEXT], "m")


def test_pickled_array_is_refused(tmp_path: Path) -> None:
    """A .npy file of objects would run code when it is read."""
    np.save(tmp_path / "evil.npy", np.array([{}], dtype=object), allow_pickle=True)

    with pytest.raises(InvalidRequest, match=r"not a \.npy file"):
        read_inputs([f"image={tmp_path}/evil.npy"], [IMAGE], "m")


@pytest.mark.parametrize("make", [zeros, random])
@pytest.mark.parametrize("datatype", list(DATATYPES))
def test_every_datatype_can_be_filled(datatype: str, make: object) -> None:
    """`bench` needs data for any model."""
    wanted = TensorMetadata(name="x", datatype=datatype, shape=(-1, 2))

    (tensor,) = fill([wanted], zeros if make is zeros else random)

    assert (tensor.datatype, tensor.shape) == (datatype, (1, 2))


def test_request_and_answer_share_the_binary_layout() -> None:
    """JSON, then the tensors' bytes in order."""
    tensors = [from_numpy("a", np.arange(3, dtype="<i4")), from_numpy("b", np.array([b"x", b"yz"], dtype=object))]
    body, length = encode_request(tensors, outputs=["out"])
    reply = body[:length].replace(b'"inputs"', b'"model_name":"m","model_version":"1","outputs"', 1)
    reply = reply.replace(b',"outputs":[{"name":"out"}]', b"")

    answer, _ = decode_response(reply + body[length:], len(reply))

    assert [to_numpy(t).tolist() for t in answer.outputs] == [[0, 1, 2], [b"x", b"yz"]]


def test_answer_in_json_is_read_too() -> None:
    """A server may answer in JSON whatever was asked."""
    reply = (
        b'{"model_name":"m","model_version":"2","outputs":['
        b'{"name":"y","datatype":"FP32","shape":[1,2],"data":[0.5,1.5]},'
        b'{"name":"s","datatype":"BYTES","shape":[1],"data":["hi"]}]}'
    )

    answer, _ = decode_response(reply, None)

    assert as_json_object(InferResult(answer)) == {
        "model": "m",
        "version": "2",
        "outputs": {
            "y": {"datatype": "FP32", "shape": [1, 2], "data": [[0.5, 1.5]]},
            "s": {"datatype": "BYTES", "shape": [1], "data": ["hi"]},
        },
    }


def test_bool_from_json() -> None:
    """True and false are BOOL; 2 is not."""
    assert as_array("x", "BOOL", [True, 0]).tolist() == [True, False]
    with pytest.raises(InvalidRequest, match="2 does not fit"):
        as_array("x", "BOOL", [2])


@pytest.mark.parametrize(
    ("wire", "value"),
    [
        ("UINT64", [1, 2**63 + 1]),
        ("UINT64", [2**64 - 1, 0]),
        ("INT64", [2**53 + 1, 1.0]),
        ("INT8", []),
        ("UINT8", 5),
        ("FP32", [math.inf, 0.5]),
    ],
)
def test_numbers_stay_the_numbers_that_were_given(wire: str, value: object) -> None:
    """Numpy makes floats of a list with a number that no INT64 holds."""
    assert as_array("x", wire, value).tolist() == value


@pytest.mark.parametrize(
    ("wire", "array"),
    [
        ("UINT64", np.array([2.0**64])),
        ("UINT8", np.array([-1])),
        ("FP16", np.array([70_000.0])),
        ("FP32", np.array([1j])),
    ],
)
def test_arrays_of_another_dtype_fit_or_are_refused(wire: str, array: npt.NDArray[Any]) -> None:
    """No element becomes another number silently."""
    with pytest.raises(InvalidRequest, match=f"can't be read as {wire}"):
        as_array("x", wire, array)


def test_an_empty_file_is_named(tmp_path: Path) -> None:
    """Of a download that failed, for instance."""
    (tmp_path / "empty.npy").touch()

    with pytest.raises(InvalidRequest, match=r"/empty\.npy is not a \.npy file"):
        read_inputs([f"image={tmp_path}/empty.npy"], [IMAGE], "m")


@pytest.mark.parametrize(("given", "read"), [("7", 7), ("007", 7), ("call-7", "call-7"), ("٣", "٣")])
def test_decimal_digits_are_a_number_as_id_of_a_sequence(given: str, read: int | str) -> None:
    assert read_sequence(given, start=False, end=True) == {"sequence_id": read, "sequence_end": True}


def test_flags_of_a_sequence_need_its_id() -> None:
    assert read_sequence("", start=False, end=False) == {}
    with pytest.raises(InvalidRequest, match="need --sequence-id"):
        read_sequence("", start=True, end=False)
