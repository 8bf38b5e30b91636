"""Shadows: requests that one target answers and another executes as well, behind online work.

A shadow waits in its model version's shadow lane, which workers read while idle. It bypasses response cache and quotas.
Abandoned shadows are removed, and workers drop those of dead workers.
"""

from collections.abc import Callable

from qinfer.core.messages import OutgoingRequest
from qinfer.errors import QinferError, UnsupportedFeature
from qinfer.models.catalog import ServedVersion
from qinfer.models.validate import validate
from qinfer.queue.entries import shadow_lane
from qinfer.submission.pending import Inner, PendingCall
from qinfer.submission.submit import Submission
from qinfer.traffic.endpoints import why_no_shadow


def submit_shadow(
    submission: Submission,
    served: ServedVersion,
    request: OutgoingRequest,
    sink: Inner,
    monotonic_s: Callable[[], float],
) -> PendingCall:
    """Puts a copy of a request into a shadow lane."""
    spec = served.spec
    if reason := why_no_shadow(spec):
        raise UnsupportedFeature(reason)
    validate(request, spec)
    lane = shadow_lane(spec.name, served.version, served.lane.partition)
    request.id, request.version, request.partition = submission.new_id(served), served.version, lane.partition
    request.generation, request.timeout_s, request.queue_timeout_s = served.generation, spec.default_timeout_s, 0.0
    now_s = monotonic_s()
    pending = PendingCall(request.id, request.client_id, spec.name, served.version, sink, now_s)
    submission.pending.add(pending, now_s + spec.default_timeout_s)
    try:
        submission.enqueue(pending, request, lane)
    except QinferError:
        submission.pending.remove(pending)
        raise
    return pending
