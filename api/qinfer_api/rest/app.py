"""The FastAPI application: every route, and the error replies they share."""

from fastapi import FastAPI
from starlette.exceptions import HTTPException

import qinfer
from qinfer.errors import QinferError
from qinfer_api.jobs.routes import job_routes
from qinfer_api.labeling.routes import label_studio_routes
from qinfer_api.requests.routes import request_routes
from qinfer_api.rest.generate import generate_routes
from qinfer_api.rest.infer import infer_routes
from qinfer_api.rest.openapi import document_of
from qinfer_api.rest.repository import repository_routes
from qinfer_api.rest.server import model_routes, server_routes, settings_routes, statistics_routes
from qinfer_api.rest.services import Services, on_defect, on_qinfer_error, on_unknown_route, restricted
from qinfer_api.rest.shared_memory import shared_memory_routes
from qinfer_api.scaling.routes import backlog_routes

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
    inference = restricted(services, "inference")
    busiest_first = (infer_routes, generate_routes, request_routes, job_routes, label_studio_routes)
    others = (statistics_routes, backlog_routes, model_routes, server_routes, repository_routes, settings_routes)
    routers = [(routes(services), inference) for routes in busiest_first]
    routers += [(routes(services), []) for routes in others]
    routers.append((shared_memory_routes(services), restricted(services, "shared-memory")))
    for router, dependencies in routers:
        app.include_router(router, dependencies=dependencies)
    app.openapi = document_of(app, [router for router, _ in routers])  # type: ignore[method-assign]  # as FastAPI documents it
    return app
