"""`bapo agent`: a program of the user's for each episode, and what its end means."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from bapo.cli.running.agent import ProgramRunner, input_of
from bapo.core.errors import ConfigError, ContractError, UnavailableError
from bapo.core.types import MESSAGES, Prompt
from bapo.transport.episode_client import OpenedEpisode
from tests.support.factories import make_prompt


class Service:
    """Episodes without end, and how each ended."""

    def __init__(self, lease_s: float = 60.0, text: str = "a+b") -> None:
        self._text = text
        self.ends: list[tuple[str, object]] = []
        self.num_opened = 0
        self.beats = 0
        self._lease_s = lease_s

    def open(self, count: int, *, wait_s: float = 0.0) -> list[OpenedEpisode]:
        self.num_opened += 1
        return [
            OpenedEpisode(
                episode_id=f"g/{self.num_opened}", key=f"key-{self.num_opened}", base_url="http://here/v1",
                lease_s=self._lease_s, purpose="fresh", prompt=make_prompt(text=self._text),
            )
        ]  # fmt: skip

    def heartbeat(self, key: str) -> None:
        self.beats += 1

    def reward(self, key: str, reward: float) -> str:
        self.ends.append(("reward", reward))
        return "ok"

    def grade(self, key: str) -> str:
        self.ends.append(("graded", key))
        return "ok"

    def ungraded(self, key: str, error: str) -> str:
        self.ends.append(("ungraded", error))
        return "ungraded"

    def give_back(self, key: str, reason: str = "") -> None:
        self.ends.append(("given back", reason))


def end_of(program: str, service: Service | None = None) -> tuple[str, object]:
    """How one episode ends that this Python program runs."""
    service = service or Service()
    runner: Any = ProgramRunner(service, [sys.executable, "-c", program])  # type: ignore[arg-type]
    runner.run(1, 1)
    (end,) = service.ends
    return end


def test_the_last_line_is_the_reward() -> None:
    assert end_of("print('thinking'); print(0.25)") == ("reward", 0.25)


def test_true_and_false_are_rewards_of_1_and_0() -> None:
    assert end_of("print(2 > 1)") == ("reward", 1.0)
    assert end_of("print(2 < 1)") == ("reward", 0.0)


def test_a_program_that_prints_nothing_is_graded_by_the_task() -> None:
    assert end_of("") == ("graded", "key-1")


@pytest.mark.parametrize("line", ["done", "1.5", "nan", "-1"])
def test_another_last_line_is_ungraded(line: str) -> None:
    word, error = end_of(f"print({line!r})")
    assert word == "ungraded"
    assert line in str(error)


def test_a_program_that_fails_is_ungraded_whatever_it_prints() -> None:
    word, error = end_of("import sys; print(1.0); sys.exit('no browser')")
    assert word == "ungraded"
    assert error == "exit code 1: no browser"


def test_a_program_knows_the_address_its_key_and_the_prompt(tmp_path: Path) -> None:
    file = tmp_path / "seen.json"
    names = ["OPENAI_BASE_URL", "OPENAI_API_KEY", "ANTHROPIC_BASE_URL", "ANTHROPIC_API_KEY", "BAPO_PROMPT"]
    program = (
        f"import json, os, sys; seen = [os.environ[name] for name in {names}] + [json.load(sys.stdin)['text']]; "
        f"open({str(file)!r}, 'w').write(json.dumps(seen)); print(1)"
    )
    assert end_of(program) == ("reward", 1.0)
    assert json.loads(file.read_text()) == ["http://here/v1", "key-1", "http://here", "key-1", "a+b", "a+b"]


def test_a_program_that_takes_long_shows_signs_of_life() -> None:
    service = Service(lease_s=1.0)
    assert end_of("import time; time.sleep(1.3); print(0)", service) == ("reward", 0.0)
    assert service.beats >= 1


def test_output_that_is_no_utf_8_is_read_and_a_prompt_that_no_variable_holds_is_on_standard_input() -> None:
    program = (
        "import json, sys; sys.stderr.buffer.write(b'caf\\xe9'); print(float(len(json.load(sys.stdin)['text'])==N))"
    )
    for text in ("a" * 200_000, "a\0b"):
        service: Any = Service(text=text)
        runner = ProgramRunner(service, [sys.executable, "-c", program.replace("N", str(len(text)))])
        assert dict(runner.run(1, 1)) == {"reward 1": 1}


def test_a_program_that_takes_too_long_is_stopped_and_ungraded() -> None:
    service: Any = Service()
    program = [sys.executable, "-c", "import time; time.sleep(60)"]
    ends = ProgramRunner(service, program, timeout_s=0.2).run(1, 1)
    assert dict(ends) == {"ungraded": 1}
    assert service.ends == [("ungraded", "it took longer than agents.timeout_s = 0.2")]


def test_an_episode_whose_end_is_refused_is_ungraded_and_the_next_one_runs() -> None:
    service: Any = Service()
    given = iter([ContractError("an episode without a call of the model cannot have a reward"), None])

    def reward(key: str, reward: float) -> str:
        if (error := next(given)) is not None:
            raise error
        return "ok"

    service.reward = reward
    assert dict(ProgramRunner(service, [sys.executable, "-c", "print(1)"]).run(2, 1)) == {"ungraded": 1, "reward 1": 1}


def test_the_end_of_the_run_ends_the_episodes_and_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    service: Any = Service()
    service.open = lambda count, wait_s: []
    assert not ProgramRunner(service, ["never-started"], is_over=lambda: "finished").run(None, 2)
    assert capsys.readouterr().out.count("the run is finished: it has no more episodes") == 1


def test_an_address_that_is_away_is_waited_for(capsys: pytest.CaptureFixture[str]) -> None:
    service: Any = Service()
    opened, calls = service.open, iter([True, True, False, False])

    def open_later(count: int, wait_s: float) -> list[OpenedEpisode]:
        if next(calls):
            raise UnavailableError("connection refused")
        return list(opened(count, wait_s=wait_s))

    service.open = open_later
    assert dict(ProgramRunner(service, [sys.executable, "-c", "print(1)"]).run(2, 1)) == {"reward 1": 2}
    assert capsys.readouterr().out.count("waiting for the address of the agents: connection refused") == 1


def test_a_program_is_given_the_conversation_and_not_only_its_rendered_text() -> None:
    answer = {MESSAGES: [{"role": "user", "content": "a+b"}], "value": 42}
    prompt = Prompt(prompt_id="p", text="<user>a+b</user>", task="lookup", answer=answer)
    episode = OpenedEpisode(
        episode_id="g/0", key="k", base_url="http://here/v1", lease_s=60, purpose="fresh", prompt=prompt
    )
    assert input_of(episode) == {
        "text": "<user>a+b</user>",
        "messages": [{"role": "user", "content": "a+b"}],
        "answer": {"value": 42},
        "purpose": "fresh",
    }


def test_a_program_that_is_not_there_is_a_clear_error_and_its_episode_is_given_back() -> None:
    service: Any = Service()
    with pytest.raises(ConfigError, match="no-such-program cannot be started"):
        ProgramRunner(service, ["no-such-program"]).run(1, 1)
    assert service.ends == [("given back", "the program did not start")]


def test_as_many_episodes_run_as_were_asked_for() -> None:
    service: Any = Service()
    ends = ProgramRunner(service, [sys.executable, "-c", "print(1)"]).run(3, 2)
    assert dict(ends) == {"reward 1": 3}
    assert service.num_opened == 3
