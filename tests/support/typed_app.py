"""An app with a model for each type of hint; each returns its input."""

from typing import Annotated, Any, TypedDict

import msgspec
import numpy.typing as npt
from PIL import Image

import qinfer

Array = npt.NDArray[Any]


@qinfer.model
def text(x: str) -> str:
    return x


@qinfer.model
def texts(x: list[str]) -> list[str]:
    return x


@qinfer.model
def raw(x: bytes) -> bytes:
    return x


@qinfer.model
def whole(x: int) -> int:
    return x


@qinfer.model
def real(x: float) -> float:
    return x


@qinfer.model
def truth(x: bool) -> bool:  # noqa: FBT001  an input
    return x


@qinfer.model
def vector(x: Annotated[Array, "FP32", 2]) -> Annotated[Array, "FP32", 2]:
    return x


@qinfer.model
def small(x: Annotated[Array, "INT8", -1]) -> Annotated[Array, "INT8", -1]:
    return x


@qinfer.model
def half(x: Annotated[Array, "FP16"]) -> Annotated[Array, "FP16"]:
    return x


@qinfer.model
def brain(x: Annotated[Array, "BF16", 2]) -> Annotated[Array, "BF16", 2]:
    return x


@qinfer.model
def picture(x: Image.Image) -> str:
    return f"{x.width}x{x.height}"


class Review(msgspec.Struct):
    x: str
    stars: Annotated[int, msgspec.Meta(ge=1)] = 3


class Rated(TypedDict):
    output: str
    stars: int


@qinfer.model
def record(review: Review) -> Rated:
    return {"output": review.x, "stars": review.stars}


@qinfer.model
def perhaps(x: str | None = None, twice: bool = True) -> str:  # noqa: FBT001, FBT002  an input
    return "nothing" if x is None else f"{x} again" if twice else x
