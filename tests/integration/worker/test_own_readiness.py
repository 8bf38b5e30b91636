"""A model's own `is_ready` as checks of readiness see it: by a real worker process, and a gateway's view of it."""

from pathlib import Path

import pytest

from qinfer.core.settings import LimitSettings, RepositorySettings, Settings
from qinfer.models.catalog import Catalog
from qinfer.models.control import ModelControl
from qinfer.models.state import State
from qinfer.testing import eventually
from qinfer.traffic.routing import Endpoints
from qinfer.wire.bodies import ModelIndexEntry
from qinfer_api.about import is_model_ready, is_server_ready
from tests.support.hanging import outcome
from tests.support.python_models import execute, write_model
from tests.support.worker_processes import worker_processes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(60)]

ECHO = "return [reply(x(request)) for request in requests]"


async def test_checks_of_readiness_and_the_index_say_what_the_model_says(tmp_path: Path) -> None:
    """Requests execute meanwhile, and the server is ready."""
    no = tmp_path / "no"
    body = f"def is_ready(self): return not os.path.exists({str(no)!r})"
    write_model(tmp_path / "repository", execute(ECHO, body), "moody", dims=1)
    async with worker_processes(tmp_path) as pool:
        await pool.worker()
        catalog = Catalog(pool.store, LimitSettings())
        control = ModelControl(None, pool.store, pool.delivery, RepositorySettings(), catalog.refresh)

        async def is_ready() -> bool:
            await catalog.refresh()
            return is_model_ready(Endpoints(catalog), "moody", 0)

        async def says_no() -> bool:
            return not await is_ready()

        assert await is_ready()
        no.touch()
        await eventually(says_no, 20.0, "a model that says no")

        assert await control.index() == [
            ModelIndexEntry(name="moody", version="1", state=State.READY, reason="its is_ready returned False")
        ]
        assert is_server_ready(Settings(), catalog, draining=False)
        assert outcome((await pool.answered(pool.submit(4.0, "moody")))[0]) == 4.0
        no.unlink()
        await eventually(is_ready, 20.0, "a model that says yes")


async def test_an_is_ready_that_hangs_keeps_no_requests_waiting(tmp_path: Path) -> None:
    """The model is not ready then, and answers all the same."""
    hangs = tmp_path / "hangs"
    body = f"def is_ready(self): return not os.path.exists({str(hangs)!r}) or time.sleep(10**6)"
    write_model(tmp_path / "repository", execute(ECHO, body), "moody", dims=1)
    async with worker_processes(tmp_path) as pool:
        await pool.worker()
        catalog = Catalog(pool.store, LimitSettings())
        hangs.touch()
        answers = [outcome((await pool.answered(pool.submit(4.0, "moody")))[0]) for _ in range(3)]

        async def says_no() -> bool:
            await catalog.refresh()
            return not is_model_ready(Endpoints(catalog), "moody", 0)

        await eventually(says_no, 30.0, "a model that gives no answer")
        answers += [outcome((await pool.answered(pool.submit(5.0, "moody")))[0])]

    assert answers == [4.0] * 3 + [5.0]
