"""What `qinfer up` checks before it starts anything."""

import socket
from pathlib import Path

import pytest

from qinfer.cli.local import machine
from qinfer.cli.local.machine import (
    CHOSEN_PORTS,
    GatewayAddress,
    check_repository,
    child_environment,
    claim_ports,
    gateway_addresses,
    local_url,
    share_cpus,
)
from qinfer.core.settings import GrpcSettings, Settings
from qinfer.core.settings_sections import ConsoleSettings, MetricsSettings
from qinfer.errors import SettingsError


def test_missing_repository_shows_what_one_looks_like(tmp_path: Path) -> None:
    """A newcomer learns the layout from the error."""
    with pytest.raises(SettingsError, match=r"(?s)nowhere does not exist.*--model-repository DIR.*config\.pbtxt"):
        check_repository(str(tmp_path / "nowhere"))


def test_repository_that_is_a_file_is_refused(tmp_path: Path) -> None:
    """A model file is not a repository."""
    (tmp_path / "model.onnx").touch()

    with pytest.raises(SettingsError, match="is not a directory"):
        check_repository(str(tmp_path / "model.onnx"))


def test_port_zero_becomes_a_real_port() -> None:
    """The number is told to people before the gateway binds it; meanwhile no outgoing connection can get it."""
    ports = claim_ports([GatewayAddress("127.0.0.1", 0), GatewayAddress("127.0.0.1", 0, "--grpc-port")], lambda: False)

    assert len(set(ports)) == 2
    assert all(port in CHOSEN_PORTS for port in ports)


def test_port_zero_is_any_port_where_all_the_others_are_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the kernel chooses."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setattr(machine, "CHOSEN_PORTS", [port])

        assert claim_ports([GatewayAddress("127.0.0.1", 0)], lambda: False)[0] not in {0, port}


def test_port_in_use_names_it_and_another() -> None:
    """The message has the port and what to do."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]

        with pytest.raises(SettingsError, match=rf"port {port} .* is in use.*--grpc-port"):
            claim_ports([GatewayAddress("127.0.0.1", port, "--grpc-port")], lambda: False)


def test_port_that_becomes_free_is_taken() -> None:
    """The gateway of an `up` that was killed lets go of it soon."""
    taken = socket.create_server(("127.0.0.1", 0))
    port = taken.getsockname()[1]

    def released() -> bool:
        taken.close()
        return True

    assert claim_ports([GatewayAddress("127.0.0.1", port)], released) == [port]


def test_address_of_another_machine_is_refused() -> None:
    """192.0.2.0/24 is nobody's (RFC 5737)."""
    with pytest.raises(SettingsError, match=r"of 192\.0\.2\.1 can't be bound"):
        claim_ports([GatewayAddress("192.0.2.1", 0)], lambda: False)


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:8000"),
        ("0.0.0.0", "http://127.0.0.1:8000"),
        ("::1", "http://[::1]:8000"),
        ("localhost", "http://localhost:8000"),
    ],
)
def test_url_can_be_pasted(host: str, url: str) -> None:
    """An address that means "all" is none to connect to."""
    assert local_url(host, 8000) == url


@pytest.mark.parametrize(
    ("cpus", "processes", "shares"),
    [
        ([0, 1, 2, 3], 1, [()]),
        ([0, 1, 2, 3], 2, [(0, 1), (2, 3)]),
        ([0, 1, 2, 3, 4], 2, [(0, 1), (2, 3, 4)]),
        ([4, 7], 2, [(4,), (7,)]),
        ([4, 7], 3, [(4,), (7,), (4,)]),
        ([], 2, [(), ()]),
    ],
)
def test_cores_are_shared(cpus: list[int], processes: int, shares: list[tuple[int, ...]]) -> None:
    """Several workers with a thread per core each would only disturb one another."""
    assert share_cpus(cpus, processes) == shares


def test_a_console_of_its_own_has_an_address() -> None:
    console = ConsoleSettings(host="127.0.0.2", port=8003)
    settings = Settings(grpc=GrpcSettings(enabled=False), metrics=MetricsSettings(enabled=False), console=console)

    assert gateway_addresses(settings) == [
        GatewayAddress("127.0.0.1", 8000),
        GatewayAddress("127.0.0.2", 8003, "--console-port"),
    ]
    off = settings.model_copy(update={"console": ConsoleSettings(enabled=False, port=8003)})
    assert gateway_addresses(off) == [GatewayAddress("127.0.0.1", 8000)]


def test_child_settings_replace_variables_of_any_case() -> None:
    """pydantic-settings reads names in any case: two spellings would leave the choice to chance."""
    base = {"PATH": "/bin", "qinfer_http__port": "1", "QINFER_HTTP__PORT": "2"}

    assert child_environment(base, {"QINFER_HTTP__PORT": "3"}) == {"PATH": "/bin", "QINFER_HTTP__PORT": "3"}
