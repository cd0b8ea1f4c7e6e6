"""The base model: what it is taught, how it is measured, and that the shipped folder is what its card says."""

import json
import random
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from bapo.tasks.countdown import BASE_MODEL_BUCKETS, Problem, prompt_of  # noqa: E402  # noqa: E402
from models.sampler import sample_groups  # noqa: E402
from models.sft_data import IGNORE, Curriculum, batches, examples, num_tokens  # noqa: E402
from models.tokenizer import build_tokenizer, check_round_trips  # noqa: E402
from tests.support.tasks import maker  # noqa: E402

make_task = maker("countdown")

SHIPPED = Path(__file__).parents[2] / "models" / "countdown-tiny"
MAX_BYTES = 12_000_000


def _keys(text: str) -> tuple[tuple[int, ...], int]:
    numbers, target = text.removesuffix(":").split("->")
    return tuple(sorted(map(int, numbers.split(",")))), int(target)


@pytest.fixture(scope="module")
def shipped() -> tuple[Any, Any]:
    torch.set_num_threads(1)
    model = transformers.AutoModelForCausalLM.from_pretrained(SHIPPED).eval()
    return model, transformers.AutoTokenizer.from_pretrained(SHIPPED)


def test_what_the_model_is_taught_is_right_short_enough_and_from_its_own_buckets() -> None:
    task = make_task(num_train=1)
    for prompt_text, response in islice(examples(random.Random(3), Curriculum(max_tokens=64)), 500):
        numbers, target = _keys(prompt_text)
        problem = Problem(numbers=numbers, target=target, chain=())
        assert problem.bucket in BASE_MODEL_BUCKETS
        assert task.reward(prompt_of(problem), response) == 1.0
        assert num_tokens(response) + 1 <= 64


def test_batches_keep_to_their_tokens_and_train_only_the_response() -> None:
    tokenizer = build_tokenizer()
    rng = random.Random(0)
    for ids_RT, targets_RT in islice(batches(examples(rng, Curriculum()), rng, tokenizer, 640), 20):
        assert ids_RT.numel() <= 640
        assert ids_RT.shape == targets_RT.shape
        for ids, targets in zip(ids_RT.tolist(), targets_RT.tolist(), strict=True):
            end = ids.index(tokenizer.eos_token_id)
            prompt = ids.index(tokenizer.convert_tokens_to_ids(":")) + 1
            trained = [target for target in targets if target != IGNORE]
            assert trained == ids[prompt : end + 1]
            assert targets[prompt - 1] == ids[prompt]


def test_the_shipped_tokenizer_reads_and_writes_as_it_should() -> None:
    check_round_trips(SHIPPED)


def test_the_shipped_folder_is_small_and_says_how_it_stops() -> None:
    assert sum(path.stat().st_size for path in SHIPPED.iterdir()) <= MAX_BYTES
    config = json.loads((SHIPPED / "config.json").read_text())
    generation = json.loads((SHIPPED / "generation_config.json").read_text())
    assert (config["architectures"], config["model_type"]) == (["LlamaForCausalLM"], "llama")
    assert (config["dtype"], config["tie_word_embeddings"], config["vocab_size"]) == ("float32", False, 218)
    for ids in (config, generation):
        assert (ids["pad_token_id"], ids["eos_token_id"], ids["bos_token_id"]) == (0, 1, 2)


def test_the_sampler_with_its_cache_agrees_with_the_library_and_stops_at_the_end(shipped: tuple[Any, Any]) -> None:
    model, tokenizer = shipped
    task = make_task(num_held_out=12, held_out=["cd34"])
    prompts = task.prompts("cd34")
    generator = torch.Generator().manual_seed(0)
    groups = sample_groups(
        model, tokenizer, task, prompts, group_size=1, max_new_tokens=64, generator=generator, temperature=0.0
    )
    for prompt, (response,) in zip(prompts, groups, strict=True):
        ids = tokenizer(prompt.text, return_tensors="pt")["input_ids"]
        whole = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=64)
        ended = bool(whole[0, -1] == tokenizer.eos_token_id)
        assert response.text == tokenizer.decode(whole[0, ids.shape[1] :], skip_special_tokens=True)
        assert response.num_tokens == whole.shape[1] - ids.shape[1]
        assert response.truncated is not ended
    assert not all(response.truncated for (response,) in groups)
