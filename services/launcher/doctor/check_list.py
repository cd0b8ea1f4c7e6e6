"""The one list of checks: a start runs it and refuses, a dry run and `bapo doctor` run it and show every result.

    list  ->  start: failures end it        dry run: the same results, and what would start
                                            doctor: more rows and time, and checks that load torch and transformers

To add a check, write a function `(Situation) -> results` and one line here; it must take seconds at most.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from bapo.core.errors import ConfigError
from bapo.runtime.model_files import fetch, folder_of, is_hub_id
from services.launcher.doctor import checks
from services.launcher.doctor.agent_checks import agents
from services.launcher.doctor.checks import Check, Download
from services.launcher.doctor.gold_checks import gold_answers
from services.launcher.doctor.judge_checks import judges
from services.launcher.doctor.lora_checks import lora
from services.launcher.doctor.prompt_checks import prompts, tokenizer_files
from services.launcher.doctor.situation import Situation
from services.launcher.doctor.teacher_checks import teacher
from services.launcher.gpus.devices import visible_here
from services.launcher.gpus.plan import share_gpus


class Needs(StrEnum):
    """What a check needs in addition to the config."""

    CONFIG = "nothing else"
    MACHINE = "this machine"
    NETWORK = "ports or a running service"
    FILES = "files of the model"
    DATA = "the data"
    TOKENIZER = "the data and the tokenizer"
    GRADER = "the data and the reward"


@dataclass(frozen=True, slots=True)
class Listed:
    """One check of the list."""

    name: str
    """What a slow one is announced as."""
    needs: Needs
    run: Callable[[Situation], Iterable[Check]]


def gpus(situation: Situation) -> Iterator[Check]:
    """GPUs as the launcher assigns them."""
    is_cluster = "RAY_ADDRESS" in os.environ
    try:
        plan = share_gpus(situation.config, visible_here(), with_learner=situation.has_learner, is_cluster=is_cluster)
    except ConfigError as error:
        yield Check(name="gpus", status="fail", detail=str(error))
    else:
        yield Check(name="gpus", status="ok", detail=plan.sentence())


CHECKS: tuple[Listed, ...] = (
    Listed("the host", Needs.MACHINE, lambda here: checks.host(here.config)),
    Listed("versions", Needs.MACHINE, lambda here: [checks.versions(here.config)]),
    Listed("the engine", Needs.MACHINE, lambda here: [checks.engine(here.config)]),
    Listed("sampling values", Needs.CONFIG, lambda here: [checks.sampling(here.config)]),
    Listed("GPUs", Needs.MACHINE, gpus),
    Listed("cores", Needs.MACHINE, lambda here: checks.cores(here.config, with_learner=here.with_learner)),
    Listed("memory", Needs.MACHINE, lambda here: [checks.memory(here.config), *checks.limits_of(here.config)]),
    Listed("disk", Needs.MACHINE, lambda here: [checks.disk(here.config)]),
    Listed("ports", Needs.NETWORK, lambda here: checks.ports(here.config, with_learner=here.with_learner)),
    Listed("Redis", Needs.NETWORK, lambda here: [checks.redis(here.config)]),
    Listed("trackers", Needs.NETWORK, lambda here: checks.trackers(here.config)),
    Listed("the model", Needs.FILES, lambda here: [checks.model_files(here.config)]),
    Listed("LoRA", Needs.FILES, lambda here: lora(here.config)),
    Listed("agents", Needs.FILES, lambda here: agents(here.config)),
    Listed("judges", Needs.CONFIG, judges),
    Listed("the tokenizer", Needs.FILES, tokenizer_files),
    Listed("the teacher", Needs.FILES, teacher),
    Listed("the data", Needs.DATA, lambda here: [checks.data(here)]),
    Listed("every prompt", Needs.TOKENIZER, prompts),
    Listed("gold answers", Needs.GRADER, gold_answers),
)
NEED_NO_MODEL = (Needs.CONFIG, Needs.MACHINE, Needs.NETWORK)
NEED_DATA = (Needs.TOKENIZER, Needs.GRADER)
"""Not run where the data cannot be read."""
NEED_NO_MACHINE = (Needs.CONFIG, Needs.DATA, *NEED_DATA)
"""Of a run whose processes start elsewhere, as in containers."""


def run_list(situation: Situation, listed: Iterable[Listed] = CHECKS) -> Iterator[Check]:
    """All results in order; slow checks are announced."""
    data_fails = False
    for each in listed:
        if data_fails and each.needs in NEED_DATA:
            continue
        with checks.announced(each.name):
            found = list(each.run(situation))
        data_fails |= each.needs is Needs.DATA and any(check.status == "fail" for check in found)
        yield from found


def preflight(
    situation: Situation, *, download: Download | None = None, say: Callable[[str], None] = lambda _: None
) -> None:
    """Check that the run can start, and download a model from the Hub.

    Args:
        download: as in `bapo.runtime.model_files.fetch`.
        say: prints a message; gets warnings, too.
    Raises: the first failure's error, with one line per failure.
    """
    path = situation.config.model.path
    found = list(run_list(situation, [each for each in CHECKS if each.needs in NEED_NO_MODEL]))
    if is_hub_id(path):
        checks.refuse(found)  # before minutes of download
        if folder_of(path) is None:
            say(f"downloading {path} from the Hugging Face Hub")
        fetch(path, download)
    found += run_list(situation, [each for each in CHECKS if each.needs not in NEED_NO_MODEL])
    _report(found, say)


def check_data(situation: Situation, *, say: Callable[[str], None]) -> None:
    """Check config, data, prompts and gold answers, where neither engine nor learner will run. A judge grades no gold
    answers: the workers have its address and key.

    Raises, say: as `preflight`.
    """
    task = situation.config.task
    has_judge = any(task.rubric_of(function) for function in task.reward_functions)
    listed = [each for each in CHECKS if each.needs in NEED_NO_MACHINE]
    _report(list(run_list(situation, [each for each in listed if not (has_judge and each.needs is Needs.GRADER)])), say)


def _report(found: Iterable[Check], say: Callable[[str], None]) -> None:
    checks.refuse(found)
    for check in found:
        if check.status == "warn":
            say(f"warning: {check.name}: {check.detail}")
