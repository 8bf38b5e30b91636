"""How bulk jobs look: ids, and how far they are."""

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qinfer.core.messages import IdFactory
from qinfer.errors import InvalidRequest, JobNotFound
from qinfer.jobs.job import JobSpec, Output, encode_spec
from qinfer.jobs.queue.records import JobRecord
from qinfer_api.jobs.records import (
    JobRowCounts,
    chosen_id,
    inner_id,
    job_path,
    keyed_id,
    progress_of,
    shown_job,
    shown_job_id,
)
from qinfer_api.requests.records import WebhookBody

SPEC = JobSpec(model="m", inputs=("s3://b/in",), output=Output("s3://b/out"), metadata={"who": "me"})


def record(**fields: object) -> JobRecord:
    known = {"id": "j", "model": "m", "version": 3, "state": "running", "spec": encode_spec(SPEC), "created_at": 90.0}
    return JobRecord(**{**known, **fields})  # type: ignore[arg-type]  # a table of fields


def test_a_shard_that_is_put_off_tells_why_the_job_waits() -> None:
    """Unless the whole job waits for something else, or is over."""
    assert shown_job(record(put_off="full"), 100.0).waiting == "full"
    assert shown_job(record(put_off="full", waiting="no worker"), 100.0).waiting == "no worker"
    assert shown_job(record(put_off="full", state="cancelled"), 100.0).waiting is None


# --- ids ---


def test_ids_of_tenants_can_not_meet() -> None:
    """What two tenants call alike are two jobs; each sees what it chose."""
    inside = [chosen_id("nightly", tenant) for tenant in ("acme", "other", "")]

    assert len(set(inside)) == 3
    assert [shown_job_id(record(id=i, tenant=t)) for i, t in zip(inside, ("acme", "other", ""), strict=True)] == [
        "nightly"
    ] * 3
    assert job_path(record(id=inside[0], tenant="acme")) == "/v1/jobs/nightly"


def test_keys_of_tenants_can_not_meet() -> None:
    """A key always makes the same id, in the form of the server's own."""
    ids = {keyed_id("k", tenant) for tenant in ("acme", "other", "")} | {keyed_id("k1", "")}

    assert len(ids) == 4
    assert keyed_id("k", "acme") in ids
    assert keyed_id("b", "a") != keyed_id("", "ab")
    assert all(inner_id(job_id, "acme") == job_id for job_id in ids)


def test_an_id_of_the_server_is_looked_up_as_it_is() -> None:
    """Whoever asks; whose it is shows the record."""
    made = IdFactory().ulid()

    assert inner_id(made, "acme") == made
    with pytest.raises(InvalidRequest, match=made):
        chosen_id(made, "acme")


@pytest.mark.parametrize("job_id", ["", "a/b", "a b", "ü", "x@acme", "x" * 129, "..", ".", "a\n"])
def test_other_ids_are_refused(job_id: str) -> None:
    """When a job is created; nobody can have one elsewhere."""
    with pytest.raises(InvalidRequest):
        chosen_id(job_id, "acme")
    with pytest.raises(JobNotFound):
        inner_id(job_id, "acme")


# --- progress ---


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"state": "planning"}, (0.0, None, None)),
        ({"rows": 100, "started_at": 100.0}, (0.0, None, None)),
        ({"rows": 100, "rows_done": 40, "rows_failed": 10, "started_at": 100.0, "updated_at": 110.0}, (0.5, 5.0, 10.0)),
        ({"rows": 100, "rows_done": 50, "started_at": 112.0, "updated_at": 112.0}, (0.5, None, None)),
        ({"rows": 100, "rows_done": 40, "rows_scored": 10, "started_at": 100.0, "updated_at": 110.0}, (0.5, 5.0, 10.0)),
        ({"rows": 100, "rows_done": 35, "started_at": 100.0, "updated_at": 101.0}, (0.35, 5.0, 13.0)),
        ({"rows": 100, "rows_done": 99, "started_at": 100.0, "updated_at": 110.0}, (0.99, 9.9, 1.0)),
        ({"rows": 9, "rows_scored": 5, "started_at": 100.0, "updated_at": 110.0, "state": "failed"}, (0, None, None)),
        ({"rows": 100, "rows_done": 100, "started_at": 100.0, "updated_at": 110.0, "state": "finalizing"}, (1, 10, 0)),
        (
            {"rows": 9, "rows_done": 3, "started_at": 100.0, "updated_at": 999.0, "ended_at": 103.0, "state": "failed"},
            (3 / 9, 1.0, None),
        ),
        ({"state": "completed", "started_at": 100.0, "ended_at": 101.0}, (1.0, None, None)),
        (
            {
                "rows": 100,
                "rows_done": 50,
                "started_at": 1.0,
                "resumed_at": 90.0,
                "rows_before": 30,
                "updated_at": 110.0,
            },
            (0.5, 1.0, 50.0),
        ),
        (
            {"rows": 100, "rows_done": 3, "started_at": 1.0, "resumed_at": 9.0, "rows_before": 4, "updated_at": 11.0},
            (0.03, None, None),
        ),
        ({"rows": 10, "rows_done": 20, "started_at": 100.0, "updated_at": 110.0}, (1.0, 2.0, 1.0)),
    ],
    ids=[
        *("planning", "nothing", "half", "no time", "scored", "quiet", "last rows", "stopped", "finalizing"),
        *("failed", "no rows", "resumed", "less", "too many"),
    ],
)
def test_progress(fields: dict[str, object], expected: tuple[float, float | None, float | None]) -> None:
    """At second 112: share, rate and what is left, of the record alone."""
    assert progress_of(record(**fields), 112.0) == expected


@given(
    done=st.integers(0, 10**12),
    failed=st.integers(0, 10**12),
    rows=st.integers(0, 10**12),
    started=st.floats(0, 1e10),
    updated=st.floats(0, 1e10),
    now=st.floats(0, 1e10),
    state=st.sampled_from(["planning", "running", "finalizing", "completed", "failed", "cancelled"]),
)
def test_progress_makes_sense(
    *, done: int, failed: int, rows: int, started: float, updated: float, now: float, state: str
) -> None:
    """Whatever the record says; it never falls as rows are added, nor what is left while nothing moves."""
    before = record(rows=rows, rows_done=done, rows_failed=failed, started_at=started, updated_at=updated, state=state)
    found = progress_of(before, now)
    later = progress_of(before, now + 5)
    more = progress_of(record(rows=rows, rows_done=done + 1, rows_failed=failed, state=state), now)

    assert 0 <= found.share <= more.share <= 1
    assert found.rows_per_s is None or (found.rows_per_s > 0 and math.isfinite(found.rows_per_s))
    assert found.eta_s is None or later.eta_s is not None
    assert found.eta_s is None or later.eta_s is None or 0 <= found.eta_s <= later.eta_s < math.inf


def test_what_is_shown() -> None:
    """Counts are null until they are known; the manifest is where it will be read."""
    planned = shown_job(record(rows=0, shards=1), 100.0)
    completed = shown_job(record(state="completed", webhook="https://x/y", webhook_state="delivered"), 100.0)

    assert planned.rows == JobRowCounts(0, 0, 0, 0)
    assert shown_job(record(), 100.0).rows.total is None
    assert (planned.manifest_url, planned.webhook, planned.priority) == (None, None, "normal")
    assert completed.manifest_url == "s3://b/out/_manifest.json"
    assert completed.webhook == WebhookBody("https://x/y", "delivered")
    assert (completed.version, completed.metadata, bytes(completed.spec)) == (3, {"who": "me"}, encode_spec(SPEC))


def test_a_viewer_sees_no_messages_and_no_webhook() -> None:
    spec = encode_spec(msgspec.structs.replace(SPEC, webhook="https://x/secret"))
    failed = record(state="failed", error="row 7 is 'x'", webhook="https://x/secret", spec=spec)
    waiting = record(put_off="s3://b/secret is away", spec=spec)

    for one in (failed, waiting):
        assert b"secret" in msgspec.json.encode(shown_job(one, 100.0))
        shown = shown_job(one, 100.0, reads=False)
        assert b"secret" not in msgspec.json.encode(shown)
        assert (shown.error, shown.waiting, shown.webhook, shown.model) == (None, None, None, "m")
        assert msgspec.json.decode(shown.spec)["inputs"] == ["s3://b/in"]
