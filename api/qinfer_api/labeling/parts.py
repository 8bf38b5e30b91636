"""The parts of Label Studio's side, made and put together; the gateway's composition root calls it."""

from qinfer.core.settings import LabelingSettings, Settings
from qinfer.errors import SettingsError
from qinfer.observe.stats import ModelCounts
from qinfer.queue.redis import Delivery
from qinfer_api.auth import Auth
from qinfer_api.dispatcher import Dispatcher
from qinfer_api.labeling.files import Files, targets_of
from qinfer_api.labeling.intake import Intake
from qinfer_api.labeling.mappings import MappingBook
from qinfer_api.labeling.predict import Predictor
from qinfer_api.labeling.pusher import Pusher
from qinfer_api.labeling.service import Labeling
from qinfer_api.labeling.status import Statuses
from qinfer_api.labeling.studio import LabelStudio, check_address
from qinfer_api.requests.service import AsyncRequests

_ORDER_S = 20.0  # of tasks ordered by one call; what is left goes on with the next


class LabelingParts:
    """One per gateway.

    Args:
        settings: The gateway's settings.
        delivery: The queue.
        dispatcher: Takes infer requests.
        requests: Takes asynchronous ones.
        counts: What this gateway adds to the models' statistics.
        auth: Which rates tenants have; `None` = none.

    Attributes:
        labeling: The use case.
        pusher: The role; `None` = nothing is pushed from here.

    Raises:
        SettingsError: A mapping can't be read, a file host is none, or Label Studio's URL or token is wrong.
    """

    def __init__(
        self,
        settings: Settings,
        delivery: Delivery,
        dispatcher: Dispatcher,
        requests: AsyncRequests,
        counts: ModelCounts,
        auth: Auth | None,
    ) -> None:
        own = settings.labeling
        book = check_labeling(own)
        self._studio = LabelStudio(own) if own.url else None
        self._files = Files(own, settings.stores, self._studio)
        intake = Intake(
            settings,
            tasks=delivery.label_tasks,
            requests=requests,
            book=book,
            files=self._files,
            studio=self._studio,
            counts=counts,
            auth=auth,
        )
        self.labeling = Labeling(
            dispatcher=dispatcher,
            requests=requests,
            catalog=requests.catalog,
            book=book,
            studio=self._studio,
            predictor=Predictor(dispatcher, self._files, own.predict_timeout_s),
            intake=intake,
            statuses=Statuses(delivery.label_tasks, delivery.requests),
            order_s=_ORDER_S,
        )
        self.pusher: Pusher | None = None
        if self._studio is not None:
            self.pusher = Pusher(settings, delivery, intake, book, self._studio)

    async def close(self) -> None:
        """Closes the HTTP clients."""
        await self._files.close()
        if self._studio is not None:
            await self._studio.close()


def check_labeling(settings: LabelingSettings) -> MappingBook:
    """Reads the mappings, and checks the other settings; nothing is opened.

    Raises:
        SettingsError: A mapping can't be read, a file host is none, or Label Studio's URL or token is wrong.
    """
    if settings.url:
        check_address(settings)
        if not settings.mappings:
            raise SettingsError("QINFER_LABELING__URL is set, and QINFER_LABELING__MAPPINGS, which it needs, is not")
    targets_of(settings)
    return MappingBook(settings.mappings)
