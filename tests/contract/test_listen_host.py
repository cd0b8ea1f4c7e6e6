"""Which address a service listens on: its flag goes before BAPO_HOST, and BAPO_HOST before the configuration."""

from __future__ import annotations

import argparse
import urllib.request
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import buffer_service.__main__ as buffer_main
import rollout_server.__main__ as rollout_main
from bapo.config.tree import Config
from bapo.core.errors import ConfigError
from bapo.runtime.metrics.server import Telemetry, serve_health
from bapo.runtime.process import Flags
from bapo.runtime.run_directory.layout import RunDirectory

EXTRA = {"port": 0, "buffer_url": "http://127.0.0.1:9", "one_of_several": False, "redis_url": "redis://127.0.0.1:9/0"}


class ListenedError(Exception):
    """Stands for a service that has come so far."""


@pytest.mark.parametrize("service", [buffer_main, rollout_main], ids=["buffer_service", "rollout_server"])
@pytest.mark.parametrize(
    ("flag", "environment", "want"),
    [
        (None, None, "127.0.0.4"),
        (None, "127.0.0.3", "127.0.0.3"),
        (None, "", "127.0.0.4"),
        ("127.0.0.2", "127.0.0.3", "127.0.0.2"),
    ],
)
def test_a_service_listens_where_the_flag_the_environment_or_the_configuration_says(
    service: ModuleType,
    flag: str | None,
    environment: str | None,
    want: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def listen(host: str, port: int, **_: str) -> Any:
        raise ListenedError(host)

    monkeypatch.setattr(service, "listen", listen)
    if environment is None:
        monkeypatch.delenv("BAPO_HOST", raising=False)
    else:
        monkeypatch.setenv("BAPO_HOST", environment)
    config = Config.model_validate(
        {"rollout": {"engine": "scripted", "host": "127.0.0.4"}, "buffer": {"host": "127.0.0.4"}}
    )
    flags = Flags(config=config, run=RunDirectory(tmp_path), extra=argparse.Namespace(host=flag, **EXTRA))
    with pytest.raises(ListenedError) as listened:
        service.main(flags)
    assert str(listened.value) == want


def test_a_host_of_the_environment_that_others_reach_needs_tokens_as_any_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BAPO_HOST", "0.0.0.0")
    for name in ("BAPO_ACCEPTED_TOKENS", "BAPO_ACCEPTED_TOKENS_FILE"):
        monkeypatch.delenv(name, raising=False)
    config = Config.model_validate({"rollout": {"engine": "scripted"}})
    flags = Flags(config=config, run=RunDirectory(tmp_path), extra=argparse.Namespace(host=None, **EXTRA))
    with pytest.raises(ConfigError, match=r"the rollout server would listen on 0\.0\.0\.0 for everybody"):
        rollout_main.main(flags)


def test_health_of_the_small_services_is_on_the_host_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BAPO_HOST", "127.0.0.3")
    port = serve_health(Telemetry(), 0, lambda: True)
    with urllib.request.urlopen(f"http://127.0.0.3:{port}/readyz", timeout=60) as answer:
        assert answer.read() == b"ready\n"
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=60)
