"""The preparation of `qinfer up`, and its summary; run by `deployment.Preparer`, because it imports much."""

import contextlib
import importlib.util
import json
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.text import Text

from qinfer import __version__
from qinfer.cli.client import GatewayClient, concrete, zeros
from qinfer.cli.local.deployment import Launch, Ports, Sections, StartProgress, SupervisionPlan, UpOptions
from qinfer.cli.local.machine import (
    check_repository,
    child_environment,
    gateway_addresses,
    local_url,
    repository_places,
)
from qinfer.cli.overview import ModelRow, Overview, run_overview, run_start, with_url
from qinfer.client import ModelMetadata, TensorMetadata
from qinfer.client.flows import sequence_parameters
from qinfer.client.model_flows import model_path
from qinfer.core.api_keys import check_exposure, own_console_host, why_no_console
from qinfer.core.processes import BULK_WORKER, GATEWAY, PREFIX, WORKER, model_environment, program_environment
from qinfer.core.settings import Settings, load_settings
from qinfer.core.store_urls import normalised
from qinfer.errors import BrokerUnavailable, QinferError, SettingsError
from qinfer.jobs.tasks import broker_of
from qinfer.models.state import State
from qinfer.queue.embedded import make_private
from qinfer.storage.local import local_path, sync_path
from qinfer.tensors import element_count

_FOR_JOBS = ("celery", "pyarrow")


class Preparation:
    """The part that reads settings, and uses Redis and the gateway."""

    def __init__(self, options: UpOptions) -> None:
        settings = load_settings()
        self._options = replace(options, settings=completed(options, settings))
        self.settings = with_sections(settings, self._options.settings)
        self._payloads = local_path(self._options.settings["limits"].get("payload_url", ""))
        self._overview = Overview(models=(), lanes=(), workers=())

    def check_settings(self) -> SupervisionPlan:
        """Checks settings; returns those for supervision."""
        settings = self.settings
        environment = model_environment(os.environ, settings.worker.model_env)
        if self._options.apps:
            from qinfer.functions.repository import write_repository

            options = self._options
            write_repository(options.apps, options.functions, environment, is_dev=options.is_dev)
        for place in settings.repository.path.split(","):
            check_repository(place)
        check_exposure(settings.auth, settings.http.host)
        return SupervisionPlan(
            addresses=gateway_addresses(settings),
            gateway_drain_s=settings.http.drain_s,
            worker_drain_s=settings.worker.drain_s,
            apps_environment=environment,
        )

    def write_desired(self, redis_url: str, *ports: int) -> Launch:
        """Writes the desired state of the models to Redis; `ports` are `Ports`."""
        self._ports = Ports(*ports)
        self.settings = self.settings.model_copy(update={"redis": with_url(self.settings.redis, redis_url)})
        run_start(self.settings.redis, self.settings.repository)
        http, passed, limits = self.settings.http, self.settings.pass_env, self.settings.limits
        if self._payloads is not None:
            make_private(self._payloads)
            sync_path(self._payloads.parent)
        self._url = local_url(http.host, self._ports.http, tls=bool(http.tls_certfile))
        self._client = GatewayClient(self._url, verify=False)
        self._no_bulk = why_no_bulk_worker(self.settings, redis_url)
        base = child_environment(os.environ, self._variables(redis_url))
        return Launch(
            url=self._url,
            gateway=program_environment(GATEWAY, base, passed),
            worker=program_environment(WORKER, base, [*passed, *self.settings.worker.model_env]),
            bulk=program_environment(BULK_WORKER, base, passed),
            no_bulk=self._no_bulk,
            payload_url=limits.payload_url if self._payloads is not None else "",
            payload_url_min_bytes=limits.payload_url_min_bytes,
        )

    def read_progress(self, least: int, up_s: float) -> StartProgress:
        """Returns a start's progress after `up_s`; `least` workers always run."""
        # keeps the last overview
        with contextlib.suppress(BrokerUnavailable):
            self._overview = run_overview(self.settings.redis, max_up_s=up_s + 1.0)
        # No worker reports: models that need none are ready.
        pending = sum(m.pending and (bool(least) or m.state is not State.READY) for m in self._overview.models)
        return StartProgress(pending=pending, workers=len(self._overview.workers), is_live=self._client.is_live())

    def summary(self, workers: str) -> list[str]:
        """Returns the lines that say what is running."""
        models, is_dev = self._overview.models, self._options.is_dev
        stop = "stops at once" if is_dev else "answers accepted requests first; twice: ends at once"
        facts = [
            _fact("URL", (self._url, "bold cyan"), ("   /docs and /metrics too", "dim")),
            *self._other_ports(),
            *([_fact("Console", (console, "cyan"))] if (console := self.console_url()) else []),
            *_models(models),
            _fact("Workers", workers),
            _fact("Jobs", jobs_line(self.settings, self._no_bulk)),
            _fact("Data", self._where()),
            _fact("Stop", "Ctrl-C", (f"   {stop}", "dim")),
        ]
        ready = next((m.name for m in models if m.state is State.READY), None)
        # a missing example is no failure
        with contextlib.suppress(QinferError):
            if ready:
                line = example_line(self._url, self._client.metadata(ready), self._client.config(ready))
                facts += [Text(), _fact("Try", (line, "green"))]
        lines = [Text(), _title(models), Text(), *facts, Text()]
        return [(Text("  ") + line).markup if line else "" for line in lines]

    def console_url(self) -> str:
        """Returns the console's address; empty where it is off."""
        settings, url = self.settings, self._url
        if host := own_console_host(settings):
            url = local_url(host, self._ports.console, tls=bool(settings.http.tls_certfile))
        return "" if why_no_console(settings) else f"{url}/console/"

    def _other_ports(self) -> Iterator[Text]:
        settings, ports = self.settings, self._ports
        if ports.grpc:
            address = local_url(settings.grpc.host or settings.http.host, ports.grpc)
            yield _fact("gRPC", (address.partition("//")[2], "cyan"))
        if ports.metrics:
            address = local_url(settings.metrics.host or settings.http.host, ports.metrics)
            yield _fact("Metrics", (f"{address}/metrics", "cyan"))

    def _variables(self, redis_url: str) -> dict[str, str]:
        sections = {name: dict(of) for name, of in self._options.settings.items()}
        sections["redis"]["url"] = redis_url
        for name, port in self._ports._asdict().items():
            if name != "console" or own_console_host(self.settings):
                sections[name]["port"] = port
        values = {f"{section}__{name}": value for section, of in sections.items() for name, value in of.items()}
        values["allow_client_shm"] = self._options.allow_client_shm
        return {
            f"{PREFIX}{name}".upper(): value if isinstance(value, str) else json.dumps(value)
            for name, value in values.items()
        }

    def _where(self) -> str:
        if self._options.redis_url:
            return "the Redis of --redis"
        return f"{self._options.data_dir}/ (kept over restarts, crashes and kill -9)"


PAYLOAD_BYTES = 2**20
"""Larger tensors are files: these take less time than strings in Redis, and other commands do not wait for them."""


EXECUTE_TIMEOUT_S = 300.0
"""The limit unless model or environment sets one."""


def completed(options: UpOptions, settings: Settings) -> Sections:
    """Returns the settings that replace those of the environment."""
    given = settings.repository
    repository = {name: getattr(given, name) for name in ("path", "overlay", "load_models", "min_workers")}
    repository |= {name: value for name, value in options.settings["repository"].items() if value not in ("", ())}
    places = repository_places(repository["path"])
    if options.apps:
        is_asked = options.settings["repository"].get("path") or "path" in given.model_fields_set
        # `models` may be what `qinfer build` made of the app
        places = list(dict.fromkeys([*(places if is_asked else ()), str(options.functions)]))
    repository["path"] = ",".join(places)
    if not repository["overlay"] and not options.redis_url and repository["control_mode"] == "explicit":
        repository["overlay"] = str((options.data_dir / "overlay").resolve())
    if options.autoscale and options.autoscale[0] == 0:
        repository["min_workers"] = 0
    stores = {"allow": allowed_stores(options.settings["stores"]["allow"], settings)}
    limit = options.settings["rate_limit"]
    limit = {**limit, "resources": limit["resources"] or settings.rate_limit.resources}
    execute_s = settings.limits.execute_timeout_s
    if "execute_timeout_s" not in settings.limits.model_fields_set:
        execute_s = EXECUTE_TIMEOUT_S
    payloads = payload_store(options, settings)
    limits = {"execute_timeout_s": execute_s, **payloads, **options.settings.get("limits", {})}
    if payloads:
        stores["deny"] = (*settings.stores.deny, payloads["payload_url"])
    here = "" if options.redis_url else str(options.data_dir.resolve() / "memory")  # there is no data directory
    segments = {"directory": settings.segments.directory or here}
    more = {"repository": repository, "stores": stores, "rate_limit": limit, "limits": limits, "segments": segments}
    return {**options.settings, **more}


def payload_store(options: UpOptions, settings: Settings) -> Mapping[str, Any]:
    """Returns the settings of a payload store in the data directory; none if one is set, or no URL leads there."""
    given = settings.limits.model_fields_set
    if options.redis_url or "payload_url" in given:
        return {}
    try:
        url = normalised(f"file://{options.data_dir.resolve() / 'payloads'}")
    except SettingsError:
        return {}
    least = settings.limits.payload_url_min_bytes if "payload_url_min_bytes" in given else PAYLOAD_BYTES
    return {"payload_url": url, "payload_url_min_bytes": least}


def with_sections(settings: Settings, sections: Sections) -> Settings:
    """Returns changed settings."""
    changed = {name: getattr(settings, name).model_copy(update=dict(of)) for name, of in sections.items()}
    return settings.model_copy(update=changed)


def scaling_settings(options: UpOptions, redis_url: str) -> Settings:
    """Returns the autoscaler's settings."""
    assert options.autoscale is not None
    least, most = options.autoscale
    settings = Preparation(options).settings
    settings = with_sections(settings, {"autoscale": {"min_workers": least, "max_workers": most}})
    return settings.model_copy(update={"redis": with_url(settings.redis, redis_url)})


def allowed_stores(given: Sequence[str], settings: Settings) -> tuple[str, ...]:
    """Returns the locations that jobs may use: those of the command line, and those of the setting."""
    urls = [place if "://" in place else f"file://{Path(place).resolve()}" for place in given]
    try:
        return tuple(dict.fromkeys([*map(normalised, urls), *settings.stores.allow]))
    except SettingsError as error:
        raise SettingsError(f"--allow-store: {error.message}") from None


def why_no_bulk_worker(settings: Settings, redis_url: str) -> str:
    """Returns why no bulk worker can run, or the remedy; "" = one can."""
    if not settings.bulk.enabled:
        return "QINFER_BULK__ENABLED is false"
    if not settings.stores.allow:
        return "allow a location to read and write: --allow-store ./data"
    if missing := [name for name in _FOR_JOBS if importlib.util.find_spec(name) is None]:
        return f"{' and '.join(missing)} is not installed: pip install 'qinfer-ml[bulk]'"
    try:
        broker_of(settings.model_copy(update={"redis": with_url(settings.redis, redis_url)}))
    except SettingsError as error:
        return error.message
    return ""


def jobs_line(settings: Settings, no_worker: str) -> str:
    """Returns the summary of bulk jobs."""
    return f"off; {no_worker}" if no_worker else f"within {', '.join(settings.stores.allow)}"


INLINE_ELEMENTS = 16
"""Larger examples are made by `qinfer infer`."""


def example_line(url: str, model: ModelMetadata, config: Mapping[str, Any]) -> str:
    """Returns a short shell line that sends a model zeros, and texts; a stateful one gets a one-step sequence."""
    is_decoupled = bool(config.get("model_transaction_policy", {}).get("decoupled"))
    batching = config.get("sequence_batching", {})
    is_stateful = bool(batching) and not batching.get("iterative_sequence")
    if any(element_count(concrete(i.shape)) > INLINE_ELEMENTS for i in model.inputs):
        inputs = " ".join(f"--input {shlex.quote(i.name)}=zeros" for i in model.inputs)
        options = " --stream" if is_decoupled else ""
        options += " --sequence-id 1 --sequence-start --sequence-end" if is_stateful else ""
        return f"qinfer infer {shlex.quote(model.name)}{options} --url {url} {inputs}"
    body = {i.name: _value(i, is_batched=config.get("max_batch_size", 0) > 0) for i in model.inputs}
    body |= sequence_parameters(1, start=True, end=True) if is_stateful else {}
    silent = "-sN" if is_decoupled else "-s"
    return f"curl {silent} {url}{model_path(model.name).removeprefix('/v2')} -d {shlex.quote(json.dumps(body))}"


def _title(models: Sequence[ModelRow]) -> Text:
    others = sum(model.state is not State.READY for model in models)
    state = ("is ready", "") if not others else (f"is running; models that are not ready: {others}", "yellow")
    return Text.assemble(("qinfer", "bold"), f" {__version__} ", state)


def _models(models: Sequence[ModelRow]) -> Iterator[Text]:
    ready = sum(model.state is State.READY for model in models)
    none = "none; a model is a directory, such as models/m/1/model.onnx"
    yield _fact("Models", f"{ready} of {len(models)} ready" if models else none)
    for model in models:
        style = {State.READY: "green", State.UNAVAILABLE: "red"}.get(model.state, "yellow")
        name = f"{model.name} {model.version or ''}".rstrip()
        yield _fact("", f"{name:<24} ", (f"{model.state.value:<12}", style), model.reason)


def _fact(label: str, *parts: str | tuple[str, str]) -> Text:
    return Text.assemble((f"{label:<9}", "dim"), *parts)


def _value(tensor: TensorMetadata, *, is_batched: bool) -> Any:
    """Returns a value of plain JSON, in which dimensions [1] are a scalar."""
    shape = concrete(tensor.shape)
    is_scalar = tuple(tensor.shape[is_batched:]) == (1,)
    array = zeros(tensor.datatype, shape[:-1] if is_scalar else shape)
    return np.full(array.shape, "hi").tolist() if tensor.datatype == "BYTES" else array.tolist()
