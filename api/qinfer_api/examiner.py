"""Looks at the inputs and output of new jobs in processes of their own, `qinfer.bulk.examiner`.

What a file does to the process that parses it, it does not do to the gateway. A process is started ahead of the first
job and looks at one after the other; a second one is started when two jobs come at once, and what died is replaced. No
job waits for a start while a process lives that it can wait for.
"""

import asyncio
import logging
import sys
from collections import deque
from collections.abc import Mapping, Sequence

from qinfer import errors
from qinfer.bulk.examiner import DEFECT, Answer, Hello, Job
from qinfer.bulk.job import JobSpec
from qinfer.children import packed
from qinfer.errors import InvalidRequest, Overloaded, QinferError
from qinfer.repository.spec import ModelSpec
from qinfer.settings import PREFIX, Settings
from qinfer_api.examiner_child import Child, ChildEnded

logger = logging.getLogger(__name__)

PROCESSES = 2
"""So many jobs are looked at at once; further ones wait in line."""
COMMAND = (sys.executable, "-P", "-m", "qinfer.bulk.examiner")

_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "ARROW_DEFAULT_MEMORY_POOL": "system"}
"""Native libraries then take memory for what they do, not for each core."""
_CLASSES = {
    name: kind for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, QinferError)
}


class Examiner:
    """Looks at jobs, for one gateway.

    Args:
        settings: Which stores jobs may use, and how much memory a process.
        environment: The gateway's, where drivers of stores find their credentials; qinfer's own settings, some of which
            are secret, are not handed on.
        command: What is started instead of `COMMAND`.
    """

    def __init__(self, settings: Settings, environment: Mapping[str, str], command: Sequence[str] = ()) -> None:
        self._hello = Hello(settings.stores.allow, settings.bulk.max_examine_bytes)
        self._is_wanted = settings.bulk.enabled and bool(settings.stores.allow)
        self._inherited = {name: value for name, value in environment.items() if not name.startswith(PREFIX)}
        self._command = command or COMMAND
        self._count = 0
        """Processes that there are, one that starts and those that end included."""
        self._is_starting = False
        self._idle: list[Child] = []
        self._line: deque[asyncio.Future[Child]] = deque()
        self._tasks = asyncio.TaskGroup()
        self._is_over = False

    async def run(self, up: asyncio.Event) -> None:
        """Looks after the processes until it is cancelled; starts one once `up` is set, where there can be jobs."""
        async with self._tasks:
            try:
                await up.wait()
                if self._is_wanted:
                    self._prepare()
                await asyncio.Event().wait()
            finally:
                self._is_over = True
                self._turn_away("Server exiting")

    async def __call__(self, spec: JobSpec, model: ModelSpec) -> None:
        """Looks at a job; who is cancelled meanwhile ends the process that does.

        Args:
            spec: What is asked for.
            model: Its model's configuration.

        Raises:
            QinferError: As `qinfer.bulk.intake.examine`.
            InvalidRequest: The process died of it, too.
            UnsupportedFeature: A library is missing that reads the inputs.
            Overloaded: No process can be started now, or the gateway is shutting down.
        """
        job, answer = packed(Job(spec, model)), None
        while answer is None:
            child = await self._next()
            try:
                answer = await child.ask(job)
            except ChildEnded as ended:
                raise self._told(ended, spec) from None
            except BaseException:
                child.kill()
                raise
        self._free(child)
        _raise(answer)

    async def _next(self) -> Child:
        """Waits for a process that is idle."""
        if self._is_over:
            raise Overloaded("Server exiting")
        if self._idle:
            return self._idle.pop()
        self._prepare()
        turn: asyncio.Future[Child] = asyncio.get_running_loop().create_future()
        self._line.append(turn)
        try:
            return await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self._free(turn.result())
            raise

    def _free(self, child: Child) -> None:
        """Gives a process to who is first in line."""
        if child.has_ended:
            return
        while self._line:
            turn = self._line.popleft()
            if not turn.done():
                turn.set_result(child)
                return
        self._idle.append(child)

    def _turn_away(self, reason: str) -> None:
        """Tells all in line that there is no process for them."""
        while self._line:
            turn = self._line.popleft()
            if not turn.done():
                turn.set_exception(Overloaded(reason))

    def _prepare(self) -> None:
        """Starts a process, unless one is idle or starts, or there are as many as there may be."""
        if not (self._idle or self._is_starting or self._count == PROCESSES or self._is_over):
            self._count += 1
            self._is_starting = True
            self._tasks.create_task(self._live())

    async def _live(self) -> None:
        """Runs a process. Until it has ended it counts, also where it was killed and does not end."""
        child, reason = None, ""
        try:
            child = await Child.start(self._command, self._inherited | _ENVIRONMENT)
            await child.greet(self._hello)
            self._is_starting = False
            self._free(child)
            if self._line:
                self._prepare()
            await child.wait()
        except OSError as error:  # no memory, or too many processes or files
            reason = str(error.strerror)
        except ChildEnded as ended:
            reason = ended.how
        finally:
            if child is not None:
                await child.end()
            self._count -= 1
            self._is_starting = self._is_starting and not reason
        output = child.output if child is not None else ""
        if reason:
            logger.error("the process that looks at jobs can't be started", extra={"how": reason, "output": output})
            if not self._count:  # else those in line wait for the others
                self._turn_away(f"the process that looks at jobs can't be started now ({reason}); try again")
        elif child in self._idle:
            self._idle.remove(child)
        elif child is not None:
            logger.warning("the process that looked at a job ended", extra={"how": child.how, "output": output})
            self._prepare()

    def _told(self, ended: ChildEnded, spec: JobSpec) -> QinferError:
        """Returns what its end means for the job that a process was at."""
        if self._is_over:
            return Overloaded("Server exiting")
        more = f" and {len(spec.inputs) - 1} more" if len(spec.inputs) > 1 else ""
        return InvalidRequest(
            f"the inputs can't be read, '{spec.inputs[0]}'{more}: the process that read them died ({ended.how}); "
            "is a file damaged?"
        )


def _raise(answer: Answer) -> None:
    """Raises the error that a process told of, if it did."""
    if answer.error == DEFECT:
        raise RuntimeError(f"a defect in the process that looks at jobs\n{answer.message}")
    if answer.error:
        raise _CLASSES.get(answer.error, QinferError)(answer.message)
