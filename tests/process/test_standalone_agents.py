"""A process of `services.agents` that becomes the program of a foreign environment, and how that one ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from bapo.config.load import dump_toml
from bapo.config.tree import Config
from bapo.runtime.run_directory.layout import RunDirectory
from tests.support.wait import wait_until

GYM = """
class Env:
    def init(self, prompt): return prompt, {}
    def step(self, text): return {"observations": [], "reward": float(text == "42"), "done": True}
    def close(self): pass
def make(name, env_config, extras):
    assert (name, env_config, extras) == ("my_env", {"level": 2}, {"x": 1})
    return Env()
"""


class Address:
    """Gives one episode, away at first; a model that says 42."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str, Any]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                outer.seen.append((self.path, self.headers["authorization"] or "", body))
                status, answer = outer.answer(self.path)
                data = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: object) -> None:
                """Silent."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    def answer(self, path: str) -> tuple[int, Any]:
        """The first call of each kind meets a server that restarts."""
        num = sum(seen == path for seen, *_ in self.seen)
        if num == 1:
            return 503, {}
        if path == "/v1/episodes":
            prompt = {"text": "6*7", "messages": [{"role": "user", "content": "6*7"}], "answer": {"x": 1}}
            episode = {
                "episode_id": "g/0", "key": "sk-1", "base_url": f"{self.url}/v1", "lease_s": 60, "prompt": prompt,
            }  # fmt: skip
            return 200, [episode] if num == 2 else []
        return 200, {"choices": [{"message": {"content": "42"}}]}


@pytest.fixture
def address() -> Iterator[Address]:
    found = Address()
    threading.Thread(target=found.server.serve_forever, daemon=True).start()
    yield found
    found.server.shutdown()
    found.server.server_close()


def test_the_process_runs_the_environment_with_its_python_and_ends_on_sigterm(address: Address, tmp_path: Path) -> None:
    (tmp_path / "skyrl_gym.py").write_text(GYM)
    agents = {"rollout": "skyrl_gym:my_env", "python": sys.executable, "options": {"env_config": {"level": 2}}}
    config = Config.model_validate({"agents": agents, "task": {"name": "lookup"}, "rollout": {"engine": "vllm"}})
    run = RunDirectory.create(tmp_path / "run", dump_toml(config))
    command = [sys.executable, "-m", "services.agents", "--config", str(run.path / "config.toml")]
    command += ["--run-dir", str(run.path), "--url", address.url]
    path = os.pathsep.join([str(tmp_path), os.getcwd()])
    env = {**os.environ, "PYTHONPATH": path, "BAPO_TOKEN": "a-token-of-agents"}
    with subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True) as process:
        try:
            wait_until(lambda: any(path.endswith("/reward") for path, *_ in address.seen) or process.poll() is not None)
        finally:
            process.send_signal(signal.SIGTERM)
            said = process.communicate(timeout=20)[1]
    assert process.returncode == 0, said
    assert address.seen[0][1] == "Bearer a-token-of-agents"
    calls = [found for found in address.seen if found[0] == "/v1/chat/completions"]
    question = {"model": "policy", "messages": [{"role": "user", "content": "6*7"}]}
    assert calls == [("/v1/chat/completions", "Bearer sk-1", question)] * 2, "repeated after 503"
    assert address.seen[-1][0].endswith("/v1/episodes/sk-1/reward") or address.seen[-1][0] == "/v1/episodes"
    assert ("/v1/episodes/sk-1/reward", "", {"reward": 1.0}) in address.seen


def test_a_missing_python_ends_the_process_with_advice_before_it_waits_for_the_address(tmp_path: Path) -> None:
    agents = {"rollout": "verifiers:mine", "python": str(tmp_path / "none")}
    config = Config.model_validate({"agents": agents, "task": {"name": "lookup"}})
    run = RunDirectory.create(tmp_path / "run", dump_toml(config))
    command = [sys.executable, "-m", "services.agents", "--config", str(run.path / "config.toml")]
    done = subprocess.run(
        [*command, "--run-dir", str(run.path)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    assert "bapo env install verifiers" in done.stderr
