"""The OpenAPI document: what FastAPI makes of the routes, corrected where it does not know this gateway.

FastAPI says of every route with a parameter that it validates and answers 422; here the routes read what they are
given themselves, and answer as `responses` says.
"""

from collections.abc import Callable
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

_OF_VALIDATION = ("HTTPValidationError", "ValidationError")
_VERSION = {"type": "integer", "minimum": 1, "maximum": 2**63 - 1}


def document_of(app: FastAPI) -> Callable[[], dict[str, Any]]:
    """Returns what takes the place of `app.openapi`: a function that makes the document once."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            made = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
            app.openapi_schema = _corrected(made)
        return app.openapi_schema

    return openapi


def _corrected(document: dict[str, Any]) -> dict[str, Any]:
    for operations in document["paths"].values():
        for operation in operations.values():
            operation["responses"].pop("422", None)
            for parameter in operation.get("parameters", ()):
                if (parameter["in"], parameter["name"]) == ("path", "version"):
                    parameter["schema"] = _VERSION
    for name in _OF_VALIDATION:
        document.get("components", {}).get("schemas", {}).pop(name, None)
    return document
