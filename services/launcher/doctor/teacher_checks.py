"""The teacher of a distillation, before anything starts: it answers, scores, and has the tokenizer of the model.

The model's vocabulary is written as one text, a line for each token, which both tokenizers encode: ids that mean
something else there would train the model towards noise, without an error. Of more than `MAX_IDS` ids every n-th, and
all of the last ones, where members of a family differ in their special tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from bapo.core.errors import BapoError, ConfigError, UnavailableError
from bapo.runtime.vision import vision_model
from bapo.transport.teacher_client import TeacherClient
from services.launcher.doctor.checks import Check
from services.launcher.doctor.file_tokenizer import TOKENIZER, FileTokenizer
from services.launcher.doctor.situation import Situation

NAME = "teacher"
MAX_IDS = 20_000
NUM_LAST = 1_000


def teacher(situation: Situation) -> Iterator[Check]:
    """Nothing for a run without one. While it is away a run that resumes starts nevertheless: its groups wait."""
    config, settings = situation.config, situation.config.distillation
    if settings is None or not situation.has_learner or situation.model_folder is None:
        return
    try:
        client = TeacherClient(settings)
        detail, longest = _compared(client, situation.model_folder), config.rollout.longest_sequence + 1
        name, limit = client.model()
        if limit is not None and limit < longest:
            raise ConfigError(
                f"distillation.teacher: {name} at {client.url} takes sequences of {limit} tokens, and this run "
                f"sends up to {longest} (max_prompt_tokens + max_response_tokens + 1): serve it with --max-model-len "
                f"{longest}"
            )
    except UnavailableError as error:
        status: Literal["warn", "fail"] = "warn" if situation.is_resumed else "fail"
        what = f"distillation.teacher: {error}; start it with `vllm serve MODEL`, or correct the address"
        yield Check(name=NAME, status=status, detail=what, error=UnavailableError)
    except BapoError as error:
        yield Check(name=NAME, status="fail", detail=str(error))
    else:
        yield Check(name=NAME, status="ok", detail=f"{name} at {client.url} scores; {detail}")


def _compared(client: TeacherClient, folder: Path) -> str:
    """What was compared, after one call of each kind. Raises: ConfigError for another tokenizer; as the client."""
    client.model()
    if vision_model(str(folder)) is not None:
        raise ConfigError("[distillation] with a model that reads images, which are not sent to a teacher: remove it")
    if not (folder / TOKENIZER).is_file():
        client.logprobs([0], [[0]])
        return f"its tokenizer was not compared, because {folder} has no {TOKENIZER}"
    tokenizer = FileTokenizer(folder)
    ids = _ids(tokenizer.size)
    text = "\n".join(tokenizer.decode([token_id], skip_special_tokens=False) for token_id in ids)
    ours, theirs = tokenizer.encode(text, add_special_tokens=False), client.tokenize(text)
    if ours != theirs:
        raise ConfigError(
            f"distillation.teacher: the model at {client.url} has another tokenizer than {folder}: "
            f"{_where(ours, theirs, tokenizer)}; use a teacher of the same family"
        )
    client.logprobs(ours[:1], [ours[1:2]])
    return f"its tokenizer encodes {len(ids):,} of the {tokenizer.size:,} tokens as the model's does"


def _ids(size: int) -> list[int]:
    return sorted({*range(0, size, max(1, size // MAX_IDS)), *range(max(0, size - NUM_LAST), size)})


def _where(ours: Sequence[int], theirs: Sequence[int], tokenizer: FileTokenizer) -> str:
    place = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))
    mine, its = (ids[place] if place < len(ids) else "nothing" for ids in (ours, theirs))
    after = tokenizer.decode(list(ours[max(0, place - 3) : place + 1]), skip_special_tokens=False)
    return f"at the end of {after!r} the model has {mine}, the teacher {its}"
