"""Which tensors an engine is given at all."""

import contextlib

import pytest

from miles.core import StructureError
from miles.engine import EngineClient
from miles.engine.params import Parameter
from tests.engine.conftest import TOKEN


@pytest.mark.parametrize(("given", "known", "fits"), [
    ("bfloat16", "float32", True), ("float32", "float16", True), ("float8_e4m3fn", "float8_e4m3fn", True), ("uint8", "uint8", True), ("int64", "int32", True),
    ("bfloat16", "float8_e4m3fn", False), ("float8_e4m3fn", "bfloat16", False), ("float8_e5m2", "float8_e4m3fn", False), ("int32", "uint8", False),
    ("uint8", "float8_e4m3fn", False), ("int8", "uint8", False), ("float32", "int32", False), ("int32", "bfloat16", False), ("bool", "uint8", False),
])
def test_a_tensor_is_of_the_parameters_dtype_or_of_one_that_the_engine_converts(tiny_moe, given, known, fits):
    client = EngineClient("http://nobody", TOKEN, tiny_moe, max_context=64)
    client.parameters = {"w": Parameter((2, 3), known)}
    with contextlib.nullcontext() if fits else pytest.raises(StructureError, match=f"w is {given}"):
        client.check_tensors({"w": ((2, 3), given)})
