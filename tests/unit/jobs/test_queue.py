"""Where the bulk tasks are sent, and what happens when they can't be."""

import socket
import subprocess
import sys
import time

import pytest
from pydantic import SecretStr

from qinfer.core.settings import BulkSettings, RedisSettings, Settings
from qinfer.errors import BrokerUnavailable, SettingsError
from qinfer.jobs.tasks import Broker, BulkTasks, broker_of


def settings(
    url: str = "redis://queue:6379/0", broker: str = "", *, timeout_s: float = 0.4, **redis: object
) -> Settings:
    options = {"url": SecretStr(url), "connect_timeout_s": timeout_s, **redis}
    return Settings(redis=RedisSettings(**options), bulk=BulkSettings(broker_url=SecretStr(broker)))


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis://queue/3", "redis://queue:6379/3"),
        ("redis://[::1]:7000", "redis://[::1]:7000/0"),
        ("redis://:p%40ss@queue", "redis://:p%40ss@queue:6379/0"),
        ("redis://me:p%2Fss@queue", "redis://me:p%2Fss@queue:6379/0"),
        ("unix:///var/run/a%20b/redis.sock?db=2", "redis+socket:///var/run/a%20b/redis.sock?virtual_host=2"),
        ("unix://me:secret@/run/redis.sock", "redis+socket://me:secret@/run/redis.sock?virtual_host=0"),
    ],
)
def test_the_redis_of_the_requests_is_the_broker(url: str, expected: str) -> None:
    """One URL is enough for one node, whatever its form."""
    assert broker_of(settings(url)) == Broker(expected, {}, {})


def test_tls_is_verified_unless_the_url_says_otherwise() -> None:
    """Celery's own default for such a URL is to trust everyone."""
    assert broker_of(settings("rediss://queue")).tls == {"ssl_cert_reqs": "required"}
    assert broker_of(settings("rediss://queue?ssl_cert_reqs=none")).tls == {"ssl_cert_reqs": "none"}


def test_sentinels_are_asked_for_the_primary() -> None:
    """Each is named, with the service, and their own password."""
    url = "rediss+sentinel://:node@first:26380,second/queue/1"

    broker = broker_of(settings(url, sentinel_password=SecretStr("theirs")))

    assert broker.url == "sentinel://:node@first:26380/1;sentinel://:node@second:26379/1"
    assert broker.transport["master_name"] == "queue"
    assert broker.transport["sentinel_kwargs"]["password"] == "theirs"
    assert broker.transport["sentinel_kwargs"]["ssl"] is True
    assert broker.tls == {"ssl_cert_reqs": "required"}


def test_a_cluster_needs_another_redis_for_celery() -> None:
    """The message names the variable; with it all is fine."""
    with pytest.raises(SettingsError, match="QINFER_BULK__BROKER_URL is not set"):
        broker_of(settings(cluster=True))

    assert broker_of(settings(broker="redis://other", cluster=True)).url == "redis://other:6379/0"


def test_a_wrong_url_names_its_own_variable_and_no_secret() -> None:
    """Two variables have such URLs."""
    with pytest.raises(SettingsError, match=r"^QINFER_BULK__BROKER_URL: ") as error:
        broker_of(settings(broker="amqp://me:secret@queue"))

    assert "secret" not in error.value.message


def test_a_broker_that_is_away_is_reported_at_once_and_without_its_url() -> None:
    """The caller answers 503 with this text."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    tasks = BulkTasks(settings(f"redis://me:secret@127.0.0.1:{port}/0"))

    for _ in range(2):
        with pytest.raises(BrokerUnavailable) as error:
            tasks.request_plan("job")

        assert "secret" not in error.value.message
        assert "127.0.0.1" not in error.value.message
        assert error.value.__cause__ is None


def test_a_broker_that_does_not_answer_costs_no_more_than_the_timeout() -> None:
    """It accepts the connection and says nothing; the margin is for a machine that does much else."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        tasks = BulkTasks(settings(f"redis://127.0.0.1:{silent.getsockname()[1]}/0", timeout_s=1.0))
        tasks.check()  # which loads the libraries
        began_s = time.monotonic()

        with pytest.raises(BrokerUnavailable):
            tasks.finalise("job")

        assert time.monotonic() - began_s < 5.0


def test_celery_is_loaded_with_the_first_task_only() -> None:
    """A gateway without jobs neither pays for it nor needs it."""
    code = "import sys, qinfer.jobs.tasks as q; from qinfer.core.settings import Settings; q.BulkTasks(Settings())\n"
    code += "assert not {'celery', 'kombu', 'pyarrow'} & sys.modules.keys()"

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_missing_celery_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The extra is optional."""
    monkeypatch.setitem(sys.modules, "celery", None)

    with pytest.raises(SettingsError, match=r"pip install 'qinfer-ml\[bulk\]'"):
        BulkTasks(settings()).check()
