"""A judge that vLLM serves: real replies are read as scores, and one call in five that fails changes none of them."""

from __future__ import annotations

import itertools
import json
import threading
import time
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import openai
import pytest
import tomli_w
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from bapo.tasks.adapters.judge import make_reward
from bapo.tasks.base import make_prompt
from bapo.tasks.judge_store import JudgeStore
from bapo.tasks.judging import JudgeError, Rubric, question
from tests.support.vllm_server import vllm_server

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
ONE_OF = {"structured_outputs": {"choice": [json.dumps({"score": score}) for score in range(11)]}}
PROMPT = make_prompt("dataset", "2+2", {"answer": "4"})
TEXTS = [f"The answer is {number}." for number in range(20)]


def write_judge(folder: Path) -> None:
    """A random Llama that reads and writes bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["<pad>", "<eos>", *alphabet]
    tokenizer = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(words), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=1024, pad_token_id=0, eos_token_id=1, bos_token_id=None, initializer_range=0.2,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of `vllm serve`, with /v1."""
    folder = tmp_path_factory.mktemp("judge")
    write_judge(folder / "model")
    options = ("--max-num-seqs", "8", "--kv-cache-memory-bytes", str(64 << 20))
    with vllm_server(folder / "model", "judge", folder / "log", *options) as url:
        yield url


@pytest.fixture
def failing(judge: str) -> Iterator[tuple[str, list[object]]]:
    """The same, where one call in five is answered by 429, 500, nothing, or half a reply, in turn."""
    faults = itertools.cycle(fault for kind in (429, 500, "hang", "half") for fault in (None, None, kind, None, None))
    lock, struck = threading.Lock(), list[object]()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            with lock:
                fault = next(faults)
                struck.append(fault)
            if fault == "hang":
                time.sleep(4)
                return
            if isinstance(fault, int):
                self._reply(fault, b"{}")
                return
            sent = urllib.request.Request(
                judge.removesuffix("/v1") + self.path, body, {"Content-Type": "application/json"}
            )
            data = urllib.request.urlopen(sent, timeout=60).read()
            self._reply(200, data[: len(data) // 2] if fault == "half" else data)

        def _reply(self, status: int, data: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Retry-After", "0")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/v1", struck
    server.shutdown()
    thread.join()


def rubric(folder: Path, url: str, **settings: object) -> str:
    path = folder / "rubric.toml"
    fields = {
        "model": "judge", "base_url": url, "rubric": "Is it right?", "scale": [0, 10], "max_tokens": 24,
        "timeout_s": 3.0, "concurrency": 4, "extra_body": ONE_OF, "store": str(folder / "judge.sqlite"),
    }  # fmt: skip
    path.write_text(tomli_w.dumps(fields | settings))
    return str(path)


def asked_directly(url: str, text: str) -> float:
    """The share of the scale that the judge gives a response."""
    client = openai.OpenAI(base_url=url, api_key="-")
    form = Rubric(model="judge", base_url=url, rubric="Is it right?", scale=(0, 10))
    completion = client.chat.completions.create(
        model="judge", temperature=0, max_tokens=24, extra_body=ONE_OF,
        messages=question(form, "2+2", "4", [("response", text)]),  # type: ignore[arg-type]
    )  # fmt: skip
    return float(json.loads(completion.choices[0].message.content or "")["score"]) / 10


def test_scores_are_those_that_the_model_gives_whether_or_not_calls_fail(
    judge: str, failing: tuple[str, list[object]], tmp_path: Path
) -> None:
    expected = [asked_directly(judge, text) for text in TEXTS]
    assert len(set(expected)) > 1, "a judge that says one thing shows nothing"
    assert make_reward(rubric(tmp_path, judge))(PROMPT, TEXTS) == pytest.approx(expected)
    (tmp_path / "failing").mkdir()
    url, struck = failing
    assert make_reward(rubric(tmp_path / "failing", url))(PROMPT, TEXTS) == pytest.approx(expected)
    assert {429, 500, "hang", "half"} <= set(struck)
    spent = {row.outcome: row.calls for row in JudgeStore(tmp_path / "failing" / "judge.sqlite").spent()}
    assert spent["ok"] == len(TEXTS)
    assert {"HTTP 429", "HTTP 500"} <= set(spent)


def test_a_reply_that_is_no_verdict_is_ungraded(judge: str, tmp_path: Path) -> None:
    """Without a grammar a random model writes no JSON."""
    with pytest.raises(JudgeError, match="gave no verdict"):
        make_reward(rubric(tmp_path, judge, extra_body={}))(PROMPT, TEXTS[:2])
