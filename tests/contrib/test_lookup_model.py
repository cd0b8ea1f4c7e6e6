"""The base model of lookup: what it is taught, how it reads a chat, and that the card says what was measured."""

import json
import random
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("openai")

from contrib.lookup.agent import TOOLS, run_tool  # noqa: E402
from contrib.lookup.task import BASE_MODEL_BUCKETS, LookupOptions, LookupTask, Problem, prompt_of  # noqa: E402
from models.lookup_data import Teacher, examples, slip, turns  # noqa: E402
from models.lookup_episodes import episodes_of, read_message  # noqa: E402
from models.lookup_tokenizer import ROLES, ROUND_TRIPS, VOCABULARY, build_lookup_tokenizer  # noqa: E402
from models.tokenizer import check_round_trips  # noqa: E402
from models.train_lookup_model import card  # noqa: E402

SHIPPED = Path(__file__).parents[2] / "models" / "lookup-tiny"
PROBLEM = Problem(keys="acb", signs=("+", "-"), values=(37, 5, 60))
GET_A = '<tool_call>{"name": "get", "arguments": {"key": "a"}}</tool_call>'
CALC = '37+5=42;<tool_call>{"name": "calc", "arguments": {"expression": "42-60"}}</tool_call>'


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return transformers.AutoTokenizer.from_pretrained(SHIPPED)


def assistant(text: str) -> dict[str, Any]:
    return read_message(text).model_dump(exclude_none=True)


def conversation(*texts: str) -> list[dict[str, Any]]:
    """What a client sends after these messages of the model, each of which called a tool."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "a+c-b"}]
    for text in texts:
        message = assistant(text)
        (call,) = message["tool_calls"]
        result = run_tool({"a": 37}, call["function"]["name"], call["function"]["arguments"])
        messages += [message, {"role": "tool", "tool_call_id": call["id"], "content": result}]
    return messages


@pytest.mark.parametrize("arguments_are", ["JSON text", "a mapping"])
def test_a_rendered_history_is_what_the_model_wrote(tokenizer: Any, arguments_are: str) -> None:
    messages = conversation(GET_A, CALC)
    if arguments_are == "a mapping":  # as engines hand it to the template
        for call in (call for message in messages for call in message.get("tool_calls", ())):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    text = tokenizer.apply_chat_template(messages, tools=TOOLS, add_generation_prompt=True, tokenize=False)
    assert text == (f"<|user|>a+c-b<|assistant|>{GET_A}<eos><|tool|>37<|assistant|>{CALC}<eos><|tool|>82<|assistant|>")
    ids = tokenizer.apply_chat_template(messages, tools=TOOLS, add_generation_prompt=True)["input_ids"]
    assert ids == tokenizer(text, add_special_tokens=False)["input_ids"]
    assert len(ids) == 7 + 6 + 3 + 14 + 3  # prompt, get and its end, result, sum and calc, result
    assert tokenizer.unk_token_id not in ids
    assert tokenizer.decode(ids) == text


def test_roles_are_special_and_tool_calls_are_text(tokenizer: Any) -> None:
    ids = tokenizer(f"<|assistant|>{CALC}<eos><|tool|>82")["input_ids"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == f"{CALC}82"
    assert set(ROLES) < set(tokenizer.all_special_tokens)


def test_unknown_characters_and_roles_are_read_as_unknown(tokenizer: Any) -> None:
    messages = [{"role": "developer", "content": "Ä\n🙂"}, {"role": "user", "content": "a+b"}, {"role": "assistant"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    assert text == "<|developer|>Ä\n🙂<|user|>a+b<|assistant|><eos>"
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids)[-6:] == ["<|user|>", "a", "+", "b", "<|assistant|>", "<eos>"]
    assert ids.count(tokenizer.unk_token_id) > 3


def test_engines_read_the_tool_calls_as_the_evaluation_does(tokenizer: Any) -> None:
    parsers = pytest.importorskip("vllm.tool_parsers.hermes_tool_parser", reason="vllm")
    parser = parsers.Hermes2ProToolParser(tokenizer)
    for text in (GET_A, CALC, "<answer>42</answer>", '<tool_call>{"name": "get"</tool_call>', "<tool_call>"):
        read, expected = parser.extract_tool_calls(text, request=None), read_message(text)
        assert read.content == expected.content
        assert [(call.function.name, call.function.arguments) for call in read.tool_calls] == [
            (call.function.name, call.function.arguments)  # type: ignore[union-attr]
            for call in expected.tool_calls or ()
        ]


def test_the_teacher_counts_one_too_far() -> None:
    assert (slip(37, "+", 5), slip(42, "-", 35), slip(99, "+", 0), slip(5, "-", 5)) == (43, 6, 0, 99)


def test_a_teacher_who_uses_all_tools_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("models.lookup_data.GETS", 1.0)
    monkeypatch.setattr("models.lookup_data.CALCS", 1.0)
    messages = Teacher(random.Random(0), PROBLEM).messages()
    assert [m["content"] for m in messages if m["role"] == "tool"] == ["37", "5", "42", "60", "82"]
    assert messages[-1] == {"role": "assistant", "content": "<answer>82</answer>"}


def test_a_teacher_without_tools_writes_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("models.lookup_data.GETS", 0.0)
    monkeypatch.setattr("models.lookup_data.CALCS", 0.0)
    monkeypatch.setattr("models.lookup_data.RIGHT", 1.0)
    values = iter((7, 8, 9))
    rng = random.Random(0)
    monkeypatch.setattr(rng, "randrange", lambda _: next(values))
    _, message = Teacher(rng, PROBLEM).messages()
    assert message == {"role": "assistant", "content": "a=7;c=8;7+8=15;b=9;15-9=6;<answer>6</answer>"}


def test_examples_are_what_the_template_makes_of_an_episode() -> None:
    own, rng = build_lookup_tokenizer(), random.Random(1)
    for _ in range(50):
        messages = Teacher(rng, PROBLEM).messages()
        texts = tuple(turns(own, messages))
        assert "<eos>".join(a + b for a, b in zip(texts[::2], texts[1::2], strict=True)) + "<eos>" == (
            own.apply_chat_template(messages, tokenize=False)
        )


def test_examples_are_known_tokens_from_the_base_models_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Problem] = []

    def teacher(rng: random.Random, problem: Problem) -> Teacher:
        seen.append(problem)
        return Teacher(rng, problem)

    monkeypatch.setattr("models.lookup_data.Teacher", teacher)
    own = build_lookup_tokenizer()
    for texts in islice(examples(random.Random(0), own), 100):
        assert texts[0] == f"<|user|>{seen[-1].text}<|assistant|>"
        assert all(text.startswith("<|tool|>") and text.endswith("<|assistant|>") for text in texts[2::2])
        assert all(text.endswith("</tool_call>") for text in texts[1:-1:2])
        assert texts[-1].endswith("</answer>")
        assert own.unk_token_id not in own("".join(texts))["input_ids"]
    assert {problem.bucket for problem in seen} <= BASE_MODEL_BUCKETS


def test_the_shipped_tokenizer_reads_and_writes_as_it_should(tokenizer: Any) -> None:
    check_round_trips(SHIPPED, ROUND_TRIPS)
    assert tokenizer.chat_template == build_lookup_tokenizer().chat_template
    assert tokenizer.convert_ids_to_tokens(range(len(tokenizer))) == list(VOCABULARY)


def test_the_shipped_folder_is_small_and_its_card_is_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(SHIPPED.parents[1])
    assert sum(path.stat().st_size for path in SHIPPED.iterdir()) <= 4_000_000
    config = json.loads((SHIPPED / "config.json").read_text())
    assert (config["architectures"], config["vocab_size"]) == (["LlamaForCausalLM"], len(VOCABULARY))
    assert (config["pad_token_id"], config["eos_token_id"], config["bos_token_id"]) == (0, 1, 2)
    assert (SHIPPED / "README.md").read_text() == card(Path("models/lookup-tiny"))


def test_the_shipped_model_calls_tools_and_leaves_room_to_learn() -> None:
    """40 training problems with 8 episodes: a standard error of about 0.04 around the card's accuracy."""
    torch.set_num_threads(1)
    model = transformers.AutoModelForCausalLM.from_pretrained(SHIPPED).eval()
    prompts = LookupTask(LookupOptions(num_train=40)).prompts("train")
    groups = episodes_of(
        model, transformers.AutoTokenizer.from_pretrained(SHIPPED), prompts, group_size=8,
        generator=torch.Generator().manual_seed(0), temperature=1.0,
    )  # fmt: skip
    episodes = [episode for group in groups for episode in group]
    assert 0.1 < sum(episode.reward for episode in episodes) / 320 < 0.35
    assert sum(0 < sum(episode.reward for episode in group) < 8 for group in groups) >= 16
    careful = [episode for episode in episodes if episode.kind == "every value and step by tool"]
    assert sum(episode.reward for episode in careful) / len(careful) > 0.8
    assert all(episode.num_tokens < 200 for episode in episodes)


def test_calls_of_many_episodes_are_answered_together_and_each_gets_its_own_reply(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = build_lookup_tokenizer()
    rounds: list[int] = []

    def replies(model: Any, ids_RT: Any, eos: int, *_: Any) -> list[list[int]]:
        rounds.append(len(ids_RT))
        ended = ids_RT.shape[1] > 8 or "+" not in own.decode(ids_RT[0])
        text = "<answer>42</answer>" if ended else '<tool_call>{"name": "get", "arguments": {"key": "a"}}</tool_call>'
        return [[*own(text)["input_ids"], eos]] * len(ids_RT)

    monkeypatch.setattr("models.lookup_episodes.sample_rows", replies)
    prompts = [
        prompt_of(Problem(keys="ab", signs=("+",), values=(37, 5))),
        prompt_of(Problem(keys="acb", signs=("-", "-"), values=(37, 5, 60))),
    ]
    (looked_up, _), (answered, _) = episodes_of(
        None,
        own,
        prompts,
        group_size=2,
        generator=torch.Generator(),
        temperature=1.0,  # type: ignore[arg-type]
    )
    assert rounds == [2, 2, 2]  # first calls of either length, then the second calls of the former
    assert (looked_up.reward, looked_up.num_calls, looked_up.gets) == (1.0, 2, frozenset("a"))
    assert looked_up.num_tokens == 6 + 4  # with the ends of messages
    assert (answered.reward, answered.num_calls, answered.kind) == (0.0, 1, "a value made up")
