"""docker-compose.yml: valid, and every command, port, variable and path in it is there in the code."""

import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

import qinfer
from qinfer.core.processes import PREFIX
from qinfer.core.settings import Settings, load_settings
from qinfer.observe import tracing
from tests.support.deploy.deployments import (
    DEPLOY,
    ROOT,
    SECRETS,
    MissingVariable,
    assert_runs,
    compose,
    environment_of,
    is_look_at_health,
    stages,
    tool,
    variables_of,
    with_bases,
)

OVERRIDES = sorted(path.name for path in (DEPLOY / "compose").glob("*.yml"))
FILES = [ROOT / "docker-compose.yml", *(DEPLOY / "compose" / name for name in OVERRIDES)]
SERVICES: dict[str, Any] = compose()["services"]
OURS = {name: service for name, service in SERVICES.items() if "QINFER_REDIS__URL" in service.get("environment", {})}
ONE_SHOT = {"store-bucket", "models-sync"}
MADE_BY_THE_OPERATOR = {"./models", "./deploy/compose/keys"}
DEFAULTS = Settings()


def command_of(service: dict[str, Any]) -> list[str]:
    return [str(word) for word in service["command"]]


def seconds(text: str) -> float:
    return float(text.removesuffix("s"))


def image_environment() -> dict[str, str]:
    return environment_of(with_bases(stages(DEPLOY / "docker" / "Dockerfile"), "runtime"))


def test_files_fit_the_schema() -> None:
    """Docker's schema of compose files knows everything in them."""
    program = Path(sys.executable).with_name("check-jsonschema")

    found = subprocess.run(
        [program, "--builtin-schema", "vendor.compose-spec", *FILES], capture_output=True, text=True, check=False
    )

    assert found.returncode == 0, found.stdout


@pytest.mark.parametrize("overrides", [(), tuple(OVERRIDES)])
def test_docker_compose_takes_them(overrides: tuple[str, ...], tmp_path: Path) -> None:
    """The program itself reads and merges them, without an engine."""
    program = tool("docker_compose", "docker-compose")
    variables = tmp_path / "env"
    variables.write_text("".join(f"{name}={value}\n" for name, value in SECRETS.items()))
    files = [word for name in overrides for word in ("-f", str(DEPLOY / "compose" / name))]

    found = subprocess.run(
        [program, "--env-file", variables, "-f", ROOT / "docker-compose.yml", *files, "config"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )

    assert found.returncode == 0, found.stderr
    merged = yaml.safe_load(found.stdout)["services"]["gateway"]["environment"]
    assert merged["QINFER_AUTH__MODE"] == ("keys" if "with-keys.yml" in overrides else "none")


@pytest.mark.parametrize("name", SECRETS)
def test_nothing_starts_without_a_password(name: str) -> None:
    """No default stands in for a secret, and the example has none either."""
    with pytest.raises(MissingVariable, match=name):
        compose(variables=SECRETS | {name: ""})

    assert f"\n{name}=\n" in (DEPLOY / "compose" / ".env.example").read_text()


def test_the_example_of_the_variables_is_true() -> None:
    """Each variable that it sets is one that is asked for."""
    lines = (DEPLOY / "compose" / ".env.example").read_text().splitlines()
    asked = set().union(*(variables_of(path.read_text()) for path in FILES))

    assert {line.partition("=")[0] for line in lines if line and not line.startswith("#")} <= asked


@pytest.mark.parametrize("overrides", [(), ("with-keys.yml",)])
@pytest.mark.parametrize("name", OURS)
def test_settings_are_settings(name: str, overrides: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each service starts with its variables and those of the image: all are known, and the values are accepted."""
    given = image_environment() | compose(*overrides)["services"][name]["environment"]
    for variable, value in given.items():
        if variable.startswith(PREFIX):
            monkeypatch.setenv(variable, value)

    settings = load_settings()

    assert settings.redis.url.get_secret_value() == f"redis://:{SECRETS['REDIS_PASSWORD']}@redis:6379/0"
    assert settings.stores.allow == ("s3://qinfer/data",)
    assert bool(settings.auth.keys_file) == (name == "gateway" and bool(overrides))


@pytest.mark.parametrize("name", [*OURS, "flower"])
def test_commands_run(name: str) -> None:
    """The command is a module of the code, or one that the command line knows; so is the health check."""
    command, check = command_of(SERVICES[name]), SERVICES[name].get("healthcheck", {})

    if name == "flower":
        importlib.import_module("flower.options")  # which defines them
        options = importlib.import_module("tornado.options").options

        assert command[:2] == ["celery", "flower"]
        assert {word.lstrip("-").partition("=")[0] for word in command[2:]} <= set(options)
    else:
        assert_runs(command)
    if "test" in check:
        assert check["test"][0] == "CMD"
        assert_runs(check["test"][1:])


def test_each_program_is_asked_how_it_is() -> None:
    """What serves has a check; all but gateways have their file looked at."""
    disabled = {name for name, service in SERVICES.items() if service.get("healthcheck") == {"disable": True}}
    checks = {name: service["healthcheck"]["test"][1:] for name, service in OURS.items() if name not in disabled}
    looks = {name for name, words in checks.items() if is_look_at_health(words)}

    assert disabled == {*ONE_SHOT, "autoscale"}
    assert looks == {"worker", "worker-gpu", "bulk", "bridge"}
    assert all("QINFER_WORKER__HEALTH_DIR" in SERVICES[name]["environment"] for name in looks)
    assert {name: checks[name][-1] for name in checks.keys() - looks} == {"gateway": "gateway"}
    assert all("healthcheck" in service for service in SERVICES.values())


@pytest.mark.parametrize("name", SERVICES)
def test_hardened(name: str) -> None:
    """Nothing runs as root, writes to its image, gains privileges, or takes all of the machine."""
    service = SERVICES[name]

    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["user"].partition(":")[0] not in ("", "0", "root")
    assert set(service["deploy"]["resources"]["limits"]) == {"cpus", "memory"}
    assert service["restart"] == ("no" if name in ONE_SHOT else "unless-stopped")


def test_two_cores_are_enough() -> None:
    """Docker refuses to start a container whose limit is above the number of the machine's CPUs."""
    limits = {name: float(service["deploy"]["resources"]["limits"]["cpus"]) for name, service in SERVICES.items()}
    example = dict(line.split("=") for line in (DEPLOY / "compose" / ".env.example").read_text().split() if "=" in line)

    assert max(limits.values()) <= 2
    assert {limits["worker"], limits["worker-gpu"]} == {float(example["WORKER_CPUS"])}
    assert limits["autoscale"] == float(example["AUTOSCALE_CPUS"])


def test_the_stores_log_fills_no_memory() -> None:
    """SeaweedFS logs into the temporary directory unless it is told not to, and ends when that is full."""
    assert command_of(SERVICES["store"])[:2] == ["-logtostderr=true", "server"]


@pytest.mark.parametrize("name", ["gateway", "worker", "worker-gpu", "autoscale"])
def test_traces_are_switched_on_in_the_variables(name: str) -> None:
    """Off without a collector; with one, gateways and workers are told of it, and of all that was set for the SDK."""
    given = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318", "OTEL_TRACES_SAMPLER": "parentbased_traceidratio"}
    environment = compose(variables=SECRETS | given)["services"][name]["environment"]

    assert not tracing.is_wanted(SERVICES[name]["environment"])
    assert tracing.is_wanted(environment)
    assert given.items() <= environment.items()


@pytest.mark.parametrize("name", SERVICES)
def test_images_are_pinned(name: str) -> None:
    """Each has a version; those that are built here, this one."""
    image, _, tag = SERVICES[name]["image"].rpartition(":")

    assert image
    assert any(character.isdigit() for character in tag)
    if "build" in SERVICES[name]:
        build = SERVICES[name]["build"]
        assert tag.startswith(qinfer.__version__)
        assert build["target"] in stages(ROOT / build["dockerfile"])


def test_there_may_be_several_bulk_workers() -> None:
    """One of them at a time looks for stuck jobs."""
    more = compose(variables=SECRETS | {"BULK_WORKERS": "3"})["services"]

    assert more["bulk"]["deploy"]["replicas"] == "3"


def test_only_three_are_published_and_on_loopback() -> None:
    """The gateway, Prometheus and Grafana; Redis and the store are in a network without a way out."""
    published = {name: service["ports"] for name, service in SERVICES.items() if "ports" in service}

    assert set(published) == {"gateway", "prometheus", "grafana"}
    assert all(port.startswith("127.0.0.1:") for ports in published.values() for port in ports)
    assert compose()["networks"]["back"] == {"internal": True}
    assert all(
        "front" not in SERVICES[name]["networks"] for name in ("redis", "store", "worker", "bulk", "models-sync")
    )


def test_ports_are_those_of_the_gateway() -> None:
    """What is published and scraped is where the gateway listens."""
    inside = {int(port.rpartition(":")[2]) for port in SERVICES["gateway"]["ports"]}
    scraped = (DEPLOY / "prometheus" / "prometheus.yml").read_text()

    assert inside == {DEFAULTS.http.port, DEFAULTS.grpc.port}
    assert f'"gateway:{DEFAULTS.metrics.port}"' in scraped
    assert f"port: {DEFAULTS.metrics.port}" in scraped


def test_hosts_are_services_that_can_be_reached() -> None:
    """Each host in a URL is a service in a network of who asks it."""
    asked = [("prometheus", "gateway"), ("grafana", "prometheus")]
    for name, service in SERVICES.items():
        urls = [urlsplit(value) for value in service.get("environment", {}).values() if "://" in value]
        asked += [(name, url.hostname or "") for url in urls if url.scheme in ("http", "redis")]

    assert {host for _, host in asked} == {"gateway", "prometheus", "redis", "store"}
    for name, host in asked:
        assert set(SERVICES[name]["networks"]) & set(SERVICES[host]["networks"]), f"{name} can't reach {host}"


def test_what_is_waited_for_comes() -> None:
    """A service waits for the health of one that has a check, or for the end of one that ends."""
    for service in SERVICES.values():
        for other, wait in service.get("depends_on", {}).items():
            ends = wait["condition"] == "service_completed_successfully"
            assert ends == (other in ONE_SHOT)
            assert ends or "test" in SERVICES[other]["healthcheck"]


def test_paths_are_there() -> None:
    """Mounted files are in the repository, volumes are declared, and settings name what is mounted."""
    for name, service in compose(*OVERRIDES)["services"].items():
        targets = []
        for volume in service.get("volumes", []):
            source, target = volume.removesuffix(":ro").split(":")
            targets.append(target)
            if source not in MADE_BY_THE_OPERATOR and source.startswith("."):
                assert (ROOT / source).exists(), f"{name}: {source}"
                assert volume.endswith(":ro"), f"{name}: {source} can be written"
            elif not source.startswith("."):
                assert source in compose()["volumes"]
        keys = [value for key, value in service.get("environment", {}).items() if key.endswith("KEYS_FILE")]
        files = [key_file.rpartition("/")[0] for key_file in keys]  # a file that is replaced is followed in a directory
        files += [word for word in command_of(service) if word.startswith("/etc/")] if name in OURS else []
        assert set(files) <= set(targets), name
        if name in OURS and name not in ("store-bucket", "bridge"):
            assert image_environment()["QINFER_REPOSITORY__PATH"] in targets, name


def test_workers_keep_their_files_in_a_volume() -> None:
    """Copies of models and unfinished parts are large: not in the memory that /tmp is."""
    written = image_environment()
    for name in ("worker", "worker-gpu", "autoscale"):
        assert "cache:/var/cache/qinfer" in SERVICES[name]["volumes"]
    assert written["QINFER_BULK__SPOOL_DIR"] == "/var/cache/qinfer"
    assert written["QINFER_REPOSITORY__CACHE_DIR"].startswith("/var/cache/qinfer/")


def test_only_workers_run_what_they_unpack() -> None:
    """Docker mounts a tmpfs `noexec`: a model.pt2 of AOTInductor has a library, which is loaded from /tmp."""
    run = {name for name, service in SERVICES.items() for each in service.get("tmpfs", []) if ",exec" in each}

    assert run == {"worker", "worker-gpu", "autoscale"}


def test_there_is_time_to_drain() -> None:
    """SIGKILL comes after what was in hand has ended, or was given back."""
    assert seconds(SERVICES["gateway"]["stop_grace_period"]) > DEFAULTS.http.drain_s
    for name in ("worker", "worker-gpu", "autoscale"):
        assert seconds(SERVICES[name]["stop_grace_period"]) > DEFAULTS.worker.drain_s


def test_the_gpu_worker_gets_gpus() -> None:
    """It is built for CUDA, asks for NVIDIA's runtime, and starts only when asked for; so do the other extras."""
    devices = SERVICES["worker-gpu"]["deploy"]["resources"]["reservations"]["devices"]
    profiles = {name: service["profiles"] for name, service in SERVICES.items() if "profiles" in service}

    assert devices == [{"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}]
    assert SERVICES["worker-gpu"]["build"]["dockerfile"].endswith("Dockerfile.cuda")
    assert profiles == {"worker-gpu": ["gpu"], "autoscale": ["autoscale"], "bridge": ["bridge"]}
