"""LoRA in the learner beside PEFT, and the file that carries an adapter to the engines."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from bapo.config.tree import Config, LoraConfig
from bapo.core.errors import ConfigError, WeightMismatchError
from bapo.core.types import Canary
from bapo.runtime.adapter_file import Adapter, base_digest, merged, metadata_of
from bapo.runtime.lora import adapter_shapes, base_files, is_adapted, num_adapter_parameters
from bapo.runtime.peft_config import check_peft_config
from learner.canary import make_canary
from learner.distributed.sharding import whole
from learner.export import export_adapter, export_model
from learner.model.file_format import file_tensors
from learner.model.lora import adapted_layers, adapter_off, kept_weights
from learner.model.peft_files import write_peft
from learner.model.policy import Policy, sequence_microbatch
from learner.publish_weights import WeightPublisher, write_weights
from learner.startup import newest_checkpoint
from tests.support.learner import (
    ALONE,
    CPU,
    FakeBuffer,
    FakeFleet,
    learner_config,
    make_test_learner,
    make_updater,
    random_batch,
    tiny_policy,
)
from tests.support.lora import EXPERTS, KINDS, SIZES, TOKENS, a_trained_policy, lora_config, write_model
from tests.support.tiny_model import reference_logprobs
from tests.support.tiny_vision import write_tiny_vision


class Stored:
    """A checkpoint's adapter, from memory."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy

    def whole(self) -> Iterator[dict[str, Tensor]]:
        found = kept_weights(self._policy.model)
        yield {name: getattr(tensor, "full_tensor", lambda t=tensor: t)().clone() for name, tensor in found.items()}


def in_peft(policy: Policy, config: Config, folder: Path) -> Any:
    """The same adapter, loaded by PEFT on the base model."""
    folder.mkdir()
    write_peft(Stored(policy), config.model, folder)
    base = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=getattr(torch, config.model.dtype))
    return peft.PeftModel.from_pretrained(base, folder, is_trainable=True)


def logprobs_of(model: Any) -> Tensor:
    """[T - 1], with a gradient."""
    logits = model(torch.tensor([TOKENS])).logits[0, :-1].float()
    return logits.log_softmax(-1).gather(1, torch.tensor(TOKENS)[1:, None]).squeeze(1)


@pytest.mark.parametrize("kind", KINDS)
def test_log_probs_and_gradients_are_those_of_peft(kind: str, tmp_path: Path) -> None:
    settings, targets = KINDS[kind]
    config = lora_config(write_model(tmp_path / "base", settings), targets=targets)
    policy = a_trained_policy(config)
    other = in_peft(policy, config, tmp_path / "adapter")
    ours = policy.logprobs(sequence_microbatch(TOKENS, CPU))
    theirs = logprobs_of(other)
    assert torch.allclose(ours, theirs, atol=1e-5)
    assert not torch.allclose(ours, reference_logprobs(other.unload(), TOKENS), atol=1e-2)
    other = in_peft(policy, config, tmp_path / "again")
    (-ours.mean()).backward()
    theirs = logprobs_of(other)
    (-theirs.mean()).backward()
    gradients = {name: parameter.grad for name, parameter in other.named_parameters() if parameter.requires_grad}
    mine = {name: parameter.grad for name, parameter in policy.model.named_parameters() if parameter.requires_grad}
    assert mine.keys() == {name.removeprefix("base_model.model.").replace(".default.weight", "") for name in gradients}
    for name, gradient in mine.items():
        expected = gradients[f"base_model.model.{name}.default.weight"]
        assert torch.allclose(gradient, expected, atol=1e-5 * float(expected.abs().max())), name
    assert all(parameter.grad is None for name, parameter in policy.model.named_parameters() if name not in mine)


def test_in_bfloat16_log_probs_are_near_those_of_peft(tmp_path: Path) -> None:
    """PEFT multiplies by A and B apart, so it differs from the merged form by roundings."""
    config = lora_config(write_model(tmp_path / "base", KINDS["Qwen2, biases, tied"][0]), "bfloat16")
    policy = a_trained_policy(config)
    assert {parameter.dtype for parameter in policy.parameters() if not parameter.requires_grad} == {torch.bfloat16}
    assert {parameter.dtype for parameter in policy.parameters() if parameter.requires_grad} == {torch.float32}
    ours = policy.logprobs(sequence_microbatch(TOKENS, CPU)).detach()
    other = in_peft(policy, config, tmp_path / "adapter")
    theirs = reference_logprobs(other, TOKENS)
    without = reference_logprobs(other.unload(), TOKENS)
    assert float((ours - theirs).abs().max()) < 0.15 < float((ours - without).abs().max())


def a_peft_adapter(base: Path, folder: Path, **settings: Any) -> Any:
    """Made and saved by PEFT, as users bring it: with B that is not zero."""
    model = AutoModelForCausalLM.from_pretrained(base)
    options = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], **settings}
    found = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **options))
    torch.manual_seed(4)
    for name, parameter in found.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    found.save_pretrained(folder)
    return found.eval()


def test_a_run_starts_from_an_adapter_of_peft(model_path: Path, tmp_path: Path) -> None:
    theirs = a_peft_adapter(model_path, tmp_path / "adapter")
    config = lora_config(model_path, targets=["q_proj", "v_proj"])
    model = config.model.model_copy(update={"adapter": str(tmp_path / "adapter")})
    policy = tiny_policy(config.model_copy(update={"model": model}))
    with torch.no_grad():
        assert torch.allclose(policy.logprobs(sequence_microbatch(TOKENS, CPU)), logprobs_of(theirs), atol=1e-5)


@pytest.mark.parametrize(
    ("theirs", "problem"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"r": 8}, "rank 8"),
        ({"use_rslora": True}, "rslora True"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights = 'pissa', which changes the base model"),
        ({"init_lora_weights": "olora"}, "init_lora_weights = 'olora'"),
        ({"alora_invocation_tokens": [57]}, "alora_invocation_tokens"),
        ({"target_modules": ["q_proj"]}, r"targets means q_proj, v_proj; set model.lora.targets = \[\"q_proj\"\]"),
        ({"target_modules": ["q_proj", "v_proj", "lm_head"]}, "adapts lm_head, which is not supported"),
    ],
)
def test_an_adapter_that_would_be_another_function_here_is_refused_by_name(
    theirs: dict[str, Any], problem: str, model_path: Path, tmp_path: Path
) -> None:
    a_peft_adapter(model_path, tmp_path / "adapter", **theirs)
    config = lora_config(model_path, targets=["q_proj", "v_proj"])
    model = config.model.model_copy(update={"adapter": str(tmp_path / "adapter")})
    with pytest.raises(ConfigError, match=problem):
        tiny_policy(config.model_copy(update={"model": model}))


def test_only_the_adapter_trains_and_the_base_keeps_its_bits(model_path: Path, tmp_path: Path) -> None:
    config = lora_config(model_path)
    policy = tiny_policy(config)
    before = {name: tensor.clone() for name, tensor in policy.model.state_dict().items()}
    make_updater(config, policy, tmp_path).run(random_batch())
    changed = {name for name, tensor in policy.model.state_dict().items() if not torch.equal(tensor, before[name])}
    layers = [f"model.layers.{n}.{place}" for n in range(2) for place in (
        "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
        "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")]  # fmt: skip
    assert changed == {f"{layer}.{part}" for layer in layers for part in ("lora_A", "lora_B")}


def test_the_reference_of_the_kl_term_is_the_base_model(model_path: Path) -> None:
    policy, base = a_trained_policy(lora_config(model_path)), tiny_policy(learner_config(model_path))
    micro = sequence_microbatch(TOKENS, CPU)
    with torch.no_grad(), adapter_off(policy.model):
        assert torch.allclose(policy.logprobs(micro), base.logprobs(micro), atol=1e-6)
    with torch.no_grad():
        assert not torch.allclose(policy.logprobs(micro), base.logprobs(micro), atol=1e-2)


def test_a_setting_of_peft_that_came_after_this_test_is_refused(tmp_path: Path) -> None:
    found = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "use_newlora": True}
    (tmp_path / "adapter_config.json").write_text(json.dumps(found))
    with pytest.raises(ConfigError, match="use_newlora = True, which is not supported"):
        check_peft_config(tmp_path, LoraConfig(rank=4, alpha=8.0))


def test_a_quantized_base_model_is_refused_by_name(model_path: Path, tmp_path: Path) -> None:
    shutil.copytree(model_path, tmp_path / "base")
    path = tmp_path / "base" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(ConfigError, match="quantized"):
        adapter_shapes(str(tmp_path / "base"), LoraConfig())


def test_weights_in_another_format_next_to_the_model_are_not_of_it(model_path: Path, tmp_path: Path) -> None:
    shutil.copytree(model_path, tmp_path / "base")
    shutil.copy(tmp_path / "base" / "model.safetensors", tmp_path / "base" / "model_ema.safetensors")
    assert [file.name for file in base_files(str(tmp_path / "base"))] == ["model.safetensors"]


def test_targets_that_the_model_does_not_have_are_named(tmp_path: Path) -> None:
    experts = write_model(tmp_path / "experts", KINDS["Qwen3-MoE"][0])
    with pytest.raises(ConfigError, match="gate_proj, up_proj, down_proj"):
        tiny_policy(lora_config(experts))
    with pytest.raises(ConfigError, match="lm_head"):
        tiny_policy(lora_config(experts, targets=["q_proj", "lm_head"]))


def test_layers_of_experts_are_not_left_out_silently(tmp_path: Path) -> None:
    """Layer 0 has an MLP that could be adapted, the others have experts, which cannot."""
    settings = Qwen3MoeConfig(**SIZES, **EXPERTS, mlp_only_layers=[0])
    experts = write_model(tmp_path / "experts", settings)
    with pytest.raises(ConfigError, match=r'experts of .* cannot be adapted; use targets = "attention"'):
        adapter_shapes(str(experts), LoraConfig())
    assert len(adapter_shapes(str(experts), LoraConfig(targets="attention"))) == 2 * 4 * 2


def test_shapes_are_those_of_the_layers_of_the_base_model(model_path: Path) -> None:
    """Hidden 64, two heads of 32, one of them for keys and values, MLP 128, two layers."""
    shapes = adapter_shapes(str(model_path), LoraConfig(rank=4, targets=["k_proj", "down_proj"]))
    assert shapes["model.layers.1.self_attn.k_proj.lora_A"] == (4, 64)
    assert shapes["model.layers.1.self_attn.k_proj.lora_B"] == (32, 4)
    assert shapes["model.layers.0.mlp.down_proj.lora_A"] == (4, 128)
    assert len(shapes) == 8
    assert num_adapter_parameters(str(model_path), LoraConfig(rank=4, targets=["k_proj"])) == 2 * 4 * (64 + 32)


@pytest.mark.parametrize(
    ("hidden", "heads", "keys", "mlp", "layers", "megabytes"),
    [
        # per layer r (I + O): q h + H, k and v h + K, o H + h, gate and up h + m, down m + h
        pytest.param(2048, 2048, 1024, 6144, 28, 69.7, id="Qwen3-1.7B"),
        pytest.param(2560, 4096, 1024, 9728, 36, 132.1, id="4B"),
        pytest.param(4096, 4096, 1024, 12288, 36, 174.6, id="8B"),
        pytest.param(5120, 5120, 1024, 17408, 40, 256.9, id="14B"),
        pytest.param(5120, 8192, 1024, 25600, 64, 536.9, id="32B"),
    ],
)
def test_an_update_of_rank_32_has_two_bytes_per_element_of_the_adapter(
    hidden: int, heads: int, keys: int, mlp: int, layers: int, megabytes: float, tmp_path: Path
) -> None:
    """Without the models: of their files, the headers are enough."""
    shapes = {
        "self_attn.q_proj": (heads, hidden), "self_attn.k_proj": (keys, hidden), "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, heads), "mlp.gate_proj": (mlp, hidden), "mlp.up_proj": (mlp, hidden),
        "mlp.down_proj": (hidden, mlp),
    }  # fmt: skip
    end, header = 0, {}
    for name in [f"model.layers.{layer}.{name}" for layer in range(layers) for name in shapes]:
        shape = shapes[".".join(name.split(".")[3:])]
        begin, end = end, end + 2 * shape[0] * shape[1]
        header[f"{name}.weight"] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    words = json.dumps(header).encode()
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(len(words).to_bytes(8, "little") + words)
        file.truncate(8 + len(words) + end)  # a hole takes no space on the disk
    (tmp_path / "config.json").write_text("{}")
    assert round(2 * num_adapter_parameters(str(tmp_path), LoraConfig(rank=32)) / 1e6, 1) == megabytes


def test_a_run_with_lora_publishes_keeps_and_exports_its_adapter(model_path: Path, tmp_path: Path) -> None:
    config = lora_config(model_path)
    fleet = FakeFleet()
    learner = make_test_learner(config, tmp_path, buffer=FakeBuffer(lambda step: random_batch(step=step)), fleet=fleet)
    learner.run(1)
    policy, micro = learner.policy, sequence_microbatch(TOKENS, CPU)
    with torch.no_grad():
        expected = policy.logprobs(micro)
    assert config.model.lora is not None

    arrived = Adapter.open(fleet.updates[-1].path, str(model_path), config.model.lora)
    sent, base = dict(arrived.tensors()), load_file(model_path / "model.safetensors")
    assert sent.keys() == {name for name in base if "_proj" in name}
    layer = adapted_layers(policy.model)["model.layers.1.mlp.up_proj"]
    by_hand = base["model.layers.1.mlp.up_proj.weight"] + 2.0 * layer.lora_B.detach() @ layer.lora_A.detach()
    assert torch.allclose(sent["model.layers.1.mlp.up_proj.weight"], by_hand, atol=1e-6)

    checkpoint = newest_checkpoint(tmp_path / "checkpoints")
    assert checkpoint is not None
    assert {name.rpartition(".")[2] for name in checkpoint.weights.stored} == {"lora_A", "lora_B"}
    export_adapter(checkpoint, config.model)
    other = AutoModelForCausalLM.from_pretrained(model_path)
    adapted = peft.PeftModel.from_pretrained(other, checkpoint.adapter_path)
    assert torch.allclose(reference_logprobs(adapted, TOKENS), expected, atol=1e-5)
    export_model(checkpoint, config.model)
    whole = AutoModelForCausalLM.from_pretrained(checkpoint.model_path)
    assert torch.allclose(reference_logprobs(whole, TOKENS), expected, atol=1e-5)


@pytest.mark.parametrize("lora", [{"alpha": 16.0}, {"rslora": True}, {"rank": 2, "alpha": 4.0}, {"targets": "mlp"}])
def test_a_run_is_not_continued_with_other_settings_of_lora(
    lora: dict[str, Any], model_path: Path, tmp_path: Path
) -> None:
    config = lora_config(model_path)
    buffer = FakeBuffer(lambda step: random_batch(step=step))
    make_test_learner(config, tmp_path, buffer=buffer, fleet=FakeFleet()).run(1)
    checkpoint = newest_checkpoint(tmp_path / "checkpoints")
    assert checkpoint is not None
    checkpoint.require_adapter_of(config.model)
    with pytest.raises(ConfigError, match="stay those of a run"):
        checkpoint.require_adapter_of(lora_config(model_path, **lora).model)


def test_an_adapter_is_not_merged_into_another_base_model(model_path: Path, tmp_path: Path) -> None:
    shutil.copytree(model_path, tmp_path / "base")
    config = lora_config(tmp_path / "base")
    buffer = FakeBuffer(lambda step: random_batch(step=step))
    make_test_learner(config, tmp_path, buffer=buffer, fleet=FakeFleet()).run(1)
    checkpoint = newest_checkpoint(tmp_path / "checkpoints")
    assert checkpoint is not None
    file = tmp_path / "base" / "model.safetensors"
    save_file({name: 1.05 * tensor for name, tensor in load_file(file).items()}, file)
    with pytest.raises(ConfigError, match="belongs to a base model of digest"):
        export_model(checkpoint, config.model)


def test_an_engine_whose_base_model_has_changed_since_the_learner_loaded_it_refuses_the_adapter(
    model_path: Path, tmp_path: Path
) -> None:
    shutil.copytree(model_path, tmp_path / "base")
    config, fleet = lora_config(tmp_path / "base"), FakeFleet()
    policy = a_trained_policy(config)
    publisher = WeightPublisher(config=config, policy=policy, world=ALONE, folder=tmp_path / "weights", fleet=fleet)
    publisher.publish(1)
    publisher.wait()
    assert config.model.lora is not None
    Adapter.open(fleet.updates[-1].path, config.model.path, config.model.lora)
    file = tmp_path / "base" / "model.safetensors"
    save_file({name: 1.05 * tensor for name, tensor in load_file(file).items()}, file)
    publisher.publish(2)
    publisher.wait()
    with pytest.raises(WeightMismatchError, match="belongs to a base model of digest"):
        Adapter.open(fleet.updates[-1].path, config.model.path, config.model.lora)


@dataclass
class FakeSender:
    """What a transfer would send."""

    names: list[str] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)

    def begin(self, version: int, canary: Canary, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> None:
        self.names = list(tensors)

    def add(self, tensor: Tensor) -> None:
        self.tensors.append(tensor.clone())

    def end(self) -> None: ...

    def finish(self) -> bool:
        return True


def test_the_engine_merges_the_bits_that_the_learner_multiplies_by(model_path: Path, tmp_path: Path) -> None:
    """In bfloat16 of a base model in float32: W is rounded before the adapter is added, on both sides."""
    config = lora_config(model_path, "bfloat16")
    policy, fleet = a_trained_policy(config), FakeFleet()
    publisher = WeightPublisher(config=config, policy=policy, world=ALONE, folder=tmp_path / "weights", fleet=fleet)
    publisher.publish(1)
    publisher.wait()
    assert config.model.lora is not None
    layer, name = adapted_layers(policy.model)["model.layers.0.mlp.up_proj"], "model.layers.0.mlp.up_proj.weight"
    a_RI, b_OR = (whole(each).bfloat16().float() for each in (layer.lora_A, layer.lora_B))
    base = load_file(model_path / "model.safetensors")[name]
    expected = (base.bfloat16().float() + 2.0 * (b_OR @ a_RI)).bfloat16()
    assert not torch.equal(expected, (base + 2.0 * (b_OR @ a_RI)).bfloat16()), "the order of rounding matters"
    assert torch.equal(
        dict(Adapter.open(fleet.updates[0].path, str(model_path), config.model.lora).tensors())[name], expected
    )


def test_a_transfer_sends_the_merged_weights_and_its_file_has_the_adapter(model_path: Path, tmp_path: Path) -> None:
    config, fleet = lora_config(model_path), FakeFleet()
    learner = make_test_learner(config, tmp_path, buffer=FakeBuffer(lambda step: random_batch(step=step)), fleet=fleet)
    publisher: Any = learner.publisher
    sender = FakeSender()
    publisher._sender, publisher._transfers, publisher._rollback = sender, True, True
    publisher.publish(1)  # after a resume: by a file
    publisher.wait()
    assert sender.tensors == []
    learner.updater.run(random_batch())
    publisher.publish(2)
    publisher.wait()
    assert config.model.lora is not None
    file = Adapter.open(fleet.updates[-1].path, str(model_path), config.model.lora)
    base = load_file(model_path / "model.safetensors")
    expected = base | dict(file.tensors())
    assert sorted(sender.names) == sorted(expected)
    for name, tensor in zip(sender.names, sender.tensors, strict=True):
        assert torch.equal(tensor, expected[name]), name


@pytest.fixture
def adapter_file(model_path: Path, tmp_path: Path) -> Path:
    """What a learner of `lora_config` would write."""
    config = lora_config(model_path)
    policy = a_trained_policy(config)
    tensors = file_tensors(policy.model, kept_weights(policy.model))
    path = tmp_path / "version-000002.safetensors"
    assert config.model.lora is not None
    save_file(tensors, path, metadata=metadata_of(config.model.lora, base_digest(str(model_path))))
    return path


def rewritten(path: Path, change: Any, **metadata: object) -> Path:
    with safe_open(path, framework="pt") as file:
        found: dict[str, object] = json.loads(file.metadata()["lora"])
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"lora": json.dumps(found | metadata)})
    return path


def nothing(tensors: dict[str, Tensor]) -> None:
    del tensors


def without_a_layer(tensors: dict[str, Tensor]) -> None:
    for part in ("lora_A", "lora_B"):
        del tensors[f"model.layers.0.mlp.up_proj.{part}"]


def with_a_prefix(tensors: dict[str, Tensor]) -> None:
    for name in list(tensors):
        tensors[f"base_model.{name}"] = tensors.pop(name)


def of_another_rank(tensors: dict[str, Tensor]) -> None:
    name = "model.layers.0.mlp.up_proj.lora_A"
    tensors[name] = tensors[name][:2].contiguous()


@pytest.mark.parametrize(
    ("change", "metadata", "problem"),
    [
        (nothing, {"scale": 4.0}, "scale 4.0"),
        (nothing, {"base": "f" * 64}, "digest ffff"),
        (without_a_layer, {}, "up_proj.lora_A is missing"),
        (with_a_prefix, {}, "base_model.model.layers.0"),
        (of_another_rank, {}, r"\[2, 64\]"),
    ],
)
def test_an_adapter_that_is_not_of_this_run_is_refused_before_the_engine_loads_it(
    change: Any, metadata: dict[str, object], problem: str, adapter_file: Path, model_path: Path
) -> None:
    settings = LoraConfig(rank=4, alpha=8.0)
    assert len(Adapter.open(str(adapter_file), str(model_path), settings).layers) == 14
    with pytest.raises(WeightMismatchError, match=problem):
        Adapter.open(str(rewritten(adapter_file, change, **metadata)), str(model_path), settings)


def test_an_update_that_is_made_again_has_the_same_bytes(tmp_path: Path) -> None:
    """What safetensors writes in any order, it would write in another one of eight times."""
    tensors = {"layer.lora_A": torch.ones(1, 2), "layer.lora_B": torch.ones(2, 1)}
    found = set()
    for _ in range(8):
        write_weights(tensors, tmp_path / "file", metadata_of(LoraConfig(), "digest"))
        found.add((tmp_path / "file").read_bytes())
    assert len(found) == 1


def test_frozen_weights_in_place_of_an_adapter_are_refused(model_path: Path) -> None:
    with pytest.raises(WeightMismatchError, match="not an adapter"):
        Adapter.open(str(model_path / "model.safetensors"), str(model_path), LoraConfig())


def test_the_scale_is_alpha_over_r_or_over_its_root() -> None:
    assert LoraConfig(rank=16, alpha=32.0).scale == 2.0
    assert LoraConfig(rank=16, alpha=32.0, rslora=True).scale == 8.0
    weight, a, b = torch.zeros(2, 3), torch.ones(1, 3), torch.tensor([[1.0], [2.0]])
    assert merged(weight, a, b, 0.5).tolist() == [[0.5] * 3, [1.0] * 3]


def test_the_canary_of_an_update_is_of_the_adapted_model(model_path: Path) -> None:
    config = lora_config(model_path)
    adapted = make_canary(a_trained_policy(config), tuple(TOKENS), "float32")
    base = make_canary(tiny_policy(config), tuple(TOKENS), "float32")
    assert max(abs(x - y) for x, y in zip(adapted.logprobs, base.logprobs, strict=True)) > 0.05


@pytest.mark.parametrize("kind", ["Qwen3-MoE", "Qwen2.5-VL"])
def test_names_in_the_file_are_those_of_the_base_models_files(kind: str, tmp_path: Path) -> None:
    """Also where a parameter of the learner is called otherwise, as below a vision-language model."""
    base = tmp_path / "base"
    if kind == "Qwen2.5-VL":
        write_tiny_vision(base)
    else:
        write_model(base, KINDS[kind][0])
    config = lora_config(base, targets="attention")
    policy = a_trained_policy(config)
    assert all("visual" not in name for name in adapted_layers(policy.model))
    fleet = FakeFleet()
    publisher = WeightPublisher(config=config, policy=policy, world=ALONE, folder=tmp_path / "weights", fleet=fleet)
    publisher.publish(1)
    publisher.wait()
    assert config.model.lora is not None
    found = Adapter.open(fleet.updates[0].path, str(base), config.model.lora)
    layers = {name.removesuffix(".weight") for name in tensors_of(base)}
    assert found.layers == {layer for layer in layers if is_adapted(layer, config.model.lora)}
    assert len(found.layers) == 4 * policy.model.config.get_text_config().num_hidden_layers


def tensors_of(base: Path) -> set[str]:
    with safe_open(base / "model.safetensors", framework="pt") as file:
        return set(file.keys())
