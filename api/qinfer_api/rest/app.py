"""The FastAPI application: every route, and the error replies they share."""

from fastapi import FastAPI
from starlette.exceptions import HTTPException

import qinfer
from qinfer.errors import QinferError
from qinfer_api.rest.events import event_routes
from qinfer_api.rest.infer import infer_routes
from qinfer_api.rest.models import model_routes
from qinfer_api.rest.requests import request_routes
from qinfer_api.rest.server import server_routes
from qinfer_api.rest.services import Services, on_defect, on_qinfer_error, on_unknown_route

_ABOUT = """
A durable, queue-backed inference server that speaks NVIDIA Triton's protocol (KServe v2): every request is an entry of
a Redis Stream, which workers batch and execute.

Errors are always `{"error": "<what happened, the value, what to do>"}`.
"""


def build_app(services: Services) -> FastAPI:
    """Builds the application.

    Paths match exactly: `/v2/` is not `/v2`, as with Triton (reference §1.1).
    """
    app = FastAPI(
        title="qinfer",
        version=qinfer.__version__,
        description=_ABOUT,
        redirect_slashes=False,
        exception_handlers={
            QinferError: on_qinfer_error,
            HTTPException: on_unknown_route,
            Exception: on_defect,
        },
    )
    for routes in (
        infer_routes,
        request_routes,
        model_routes,
        server_routes,
        event_routes,
    ):  # matched in this order: the busiest first
        app.include_router(routes(services))
    return app
