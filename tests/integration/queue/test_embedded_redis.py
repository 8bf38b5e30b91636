"""The private Redis of `qinfer up`: what survives what, and who may have the directory."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import redis

from qinfer.errors import BrokerUnavailable, SettingsError
from qinfer.queue.embedded import EmbeddedRedis, find_redis_server, memory_bytes
from tests.support.servers.servers import matrix, redis_6_2, system_redis, wait_until

SUPERVISOR = """
import sys, time
from pathlib import Path
from qinfer.queue.embedded import EmbeddedRedis
server = EmbeddedRedis(Path(sys.argv[1]))
server.start()
print(server.process.pid, flush=True)
time.sleep(600)
"""


def client(server: EmbeddedRedis) -> redis.Redis:
    return redis.Redis.from_url(server.url, protocol=2)


@pytest.fixture(params=["redis-system", *matrix("redis-6.2")])
def binary(request: pytest.FixtureRequest) -> Path:
    return redis_6_2() if request.param == "redis-6.2" else system_redis()


def test_it_is_durable_private_and_never_evicts(tmp_path: Path, binary: Path) -> None:
    """Append-only file each second, no eviction, no TCP port, a directory for its owner only."""
    with EmbeddedRedis(tmp_path / "data", binary) as server, client(server) as redis_client:
        config = redis_client.config_get("*")

        wanted = {"appendonly": "yes", "appendfsync": "everysec", "maxmemory-policy": "noeviction", "port": "0"}
        assert {name: config[name] for name in wanted} == wanted
        assert (tmp_path / "data").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("given", [0, 2**26])
def test_its_memory_has_a_limit(tmp_path: Path, given: int) -> None:
    """Half of what there is, or what is given: above that it refuses writes, and is not killed by the kernel."""
    with EmbeddedRedis(tmp_path, max_memory_bytes=given) as server, client(server) as redis_client:
        assert redis_client.config_get("maxmemory") == {"maxmemory": str(given or memory_bytes() // 2)}


@pytest.mark.parametrize(
    ("name", "text", "limit"),
    [
        ("sys/fs/cgroup/memory.max", "1048576\n", 2**20),
        ("sys/fs/cgroup/memory.max", "max\n", None),
        ("sys/fs/cgroup/memory/memory.limit_in_bytes", "2097152\n", 2**21),
        ("sys/fs/cgroup/memory/memory.limit_in_bytes", f"{2**63 - 4096}\n", None),
    ],
)
def test_the_memory_of_a_cgroup_is_all_there_is(tmp_path: Path, name: str, text: str, limit: int | None) -> None:
    (tmp_path / name).parent.mkdir(parents=True)
    (tmp_path / name).write_text(text)

    assert memory_bytes(tmp_path) == (limit or memory_bytes(tmp_path / "none"))


def test_always_syncs_each_write(tmp_path: Path, binary: Path) -> None:
    """As `qinfer up --durability always` asks for it."""
    with EmbeddedRedis(tmp_path, binary, durability="always") as server, client(server) as redis_client:
        assert redis_client.config_get("appendfsync") == {"appendfsync": "always"}


def test_data_survives_stop_and_start(tmp_path: Path, binary: Path) -> None:
    """An orderly end loses nothing."""
    with EmbeddedRedis(tmp_path, binary) as server, client(server) as redis_client:
        redis_client.set("key", "value")

    with EmbeddedRedis(tmp_path, binary) as server, client(server) as redis_client:
        assert redis_client.get("key") == b"value"


def test_a_killed_server_starts_again_with_its_data(tmp_path: Path) -> None:
    """What a supervisor does when the process ended: `start` again."""
    with EmbeddedRedis(tmp_path) as server:
        with client(server) as redis_client:
            redis_client.set("key", "value")
        assert server.process is not None
        server.process.kill()
        server.process.wait()

        server.start()

        with client(server) as redis_client:
            assert redis_client.get("key") == b"value"


def test_the_server_of_a_killed_supervisor_is_ended_and_its_data_kept(tmp_path: Path) -> None:
    """Never two servers on one append-only file."""
    with subprocess.Popen([sys.executable, "-c", SUPERVISOR, str(tmp_path)], stdout=subprocess.PIPE) as supervisor:
        assert supervisor.stdout is not None
        orphan = int(supervisor.stdout.readline())
        server = EmbeddedRedis(tmp_path)
        with client(server) as redis_client:
            redis_client.set("key", "value")
        supervisor.kill()

    with server, client(server) as redis_client:
        assert redis_client.get("key") == b"value"
        assert redis_client.info("server")["process_id"] != orphan
        wait_until(lambda: not _is_alive(orphan))


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (ProcessLookupError, FileNotFoundError):
        return False
    return state != "Z"


def test_the_server_of_a_killed_supervisor_ends_by_itself(tmp_path: Path) -> None:
    """When the programs that use it have had the time to drain."""
    program = SUPERVISOR.replace("(sys.argv[1]))", "(sys.argv[1]), orphan_s=0.1)")
    with subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE) as supervisor:
        assert supervisor.stdout is not None
        pid = int(supervisor.stdout.readline())
        supervisor.kill()

    wait_until(lambda: not Path(f"/proc/{pid}").exists() or _is_zombie(pid))


def _is_zombie(pid: int) -> bool:
    """A container without an init reaps no orphans."""
    return ") Z " in Path(f"/proc/{pid}/stat").read_text()


def test_a_second_supervisor_is_told_who_has_the_directory(tmp_path: Path) -> None:
    """With the process id; and the first goes on."""
    with EmbeddedRedis(tmp_path) as first:
        with pytest.raises(SettingsError, match=f"another qinfer is using .* \\(pid {os.getpid()}\\)"):
            EmbeddedRedis(tmp_path).start()

        with client(first) as redis_client:
            assert redis_client.ping()


def test_a_stale_socket_does_not_matter(tmp_path: Path) -> None:
    """A machine that lost power leaves one."""
    (tmp_path / "redis").mkdir(mode=0o700)
    (tmp_path / "redis" / "redis.sock").touch()

    with EmbeddedRedis(tmp_path) as server, client(server) as redis_client:
        assert redis_client.ping()


def test_a_long_path_gets_its_socket_elsewhere(tmp_path: Path) -> None:
    """The system takes 107 bytes only."""
    deep = tmp_path / ("d" * 120)

    with EmbeddedRedis(deep) as server, client(server) as redis_client:
        assert redis_client.ping()
        assert (deep / "redis" / "redis.log").exists()


def test_a_server_that_can_not_start_shows_its_log(tmp_path: Path) -> None:
    """A broken append-only file, and the reason with the error."""
    (tmp_path / "redis" / "appendonlydir").mkdir(mode=0o700, parents=True)
    (tmp_path / "redis").chmod(0o700)
    (tmp_path / "redis" / "appendonlydir" / "appendonly.aof.manifest").write_text("nonsense\n")

    with pytest.raises(BrokerUnavailable, match=r"(?s)log ends with.*manifest"):
        EmbeddedRedis(tmp_path, system_redis()).start()


def test_newer_data_is_not_hidden_by_an_older_server(tmp_path: Path) -> None:
    """6.2 would not see the files of 7.0 and start empty."""
    with EmbeddedRedis(tmp_path, system_redis()):
        pass

    with pytest.raises(SettingsError, match="Redis 7 or newer"):
        EmbeddedRedis(tmp_path, redis_6_2()).start()
    with EmbeddedRedis(tmp_path, system_redis()):  # the older one kept nothing locked
        pass


def test_who_has_the_directory_is_told_before_what_could_read_it(tmp_path: Path) -> None:
    """It is of no use to look for another Redis then."""
    with (
        EmbeddedRedis(tmp_path, system_redis()),
        pytest.raises(SettingsError, match="another qinfer is using"),
    ):
        EmbeddedRedis(tmp_path, redis_6_2()).start()


def test_the_newest_server_on_path_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """An activated environment puts the wheel's before the system's, whose files it can't read."""
    older, newer = redis_6_2(), system_redis()
    monkeypatch.setenv("PATH", f"{older.parent}{os.pathsep}{newer.parent}")

    assert find_redis_server() == newer


def test_the_wheels_server_is_found_when_there_is_none_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without Redis still runs the demo."""
    monkeypatch.setenv("PATH", "")

    assert find_redis_server() == redis_6_2()


def test_interrupting_the_terminal_leaves_the_server_to_its_supervisor(tmp_path: Path) -> None:
    """It is in a session of its own, so that workers can drain first."""
    with EmbeddedRedis(tmp_path) as server:
        assert server.process is not None
        assert os.getsid(server.process.pid) != os.getsid(0)
