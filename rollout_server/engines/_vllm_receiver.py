"""Runs inside vLLM's worker: replaces the model's weights in place, by those of a safetensors file or of a transfer.

vLLM mixes `WeightReceiver` into its worker class (`worker_extension_cls`), so `self` is the worker that holds the
model. All of an update happens in one call, between two steps of the engine: while layers are being loaded they are on
the meta device, and a step would fail.

CUDA graphs and compiled code keep using the tensors that they were created with: the reload copies the new values into
them, at the same addresses. The copies come after the work of earlier steps in the GPU's stream.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from safetensors import safe_open
from vllm.config import VllmConfig, WeightTransferConfig, set_current_vllm_config
from vllm.distributed.weight_transfer import WeightTransferEngine, WeightTransferEngineFactory
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.platforms import current_platform

from bapo.config.tree import LoraConfig
from bapo.runtime.adapter_file import Adapter
from bapo.transport.ipc_handles import opened_handles
from rollout_server.engines._kernel_probe import KernelProbe, Linear

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner


EXPECTED_EMPTY = ("RotaryEmbedding", "MRotaryEmbedding", "ParallelLMHead")
"""Layers without their own tensors; vLLM warns at each update that they "failed to load weights"."""


class WeightReceiver:
    """Mixin of vLLM's worker; its method names must not clash with vLLM's."""

    vllm_config: VllmConfig
    model_runner: GPUModelRunner
    device: torch.device
    weight_transfer_engine: WeightTransferEngine[Any, Any] | None
    joined_transfer: dict[str, Any] | None = None
    """Communicator of the weight transfer engine."""
    kernel_probe: KernelProbe | None = None
    """Created at the first update."""

    def load_weight_file(self, path: str) -> None:
        """Load every tensor of the file, by Hugging Face names.

        Raises: vLLM's error for an unknown name or shape; the model is then unusable.
        """
        self._load(_tensors(path))

    def load_adapter_file(self, arguments: tuple[str, str, dict[str, Any]]) -> None:
        """Load W' = round(W + scale B A) of the adapted layers, made from the file and the base model's own files.

        Never merged in place: rounding would add up from update to update. Other layers keep their tensors.

        Args:
            arguments: path of the adapter, model.path, model.lora.
        Raises: WeightMismatchError before anything is loaded (`Adapter.open`); else as `load_weight_file`.
        """
        path, base, lora = arguments
        adapter = Adapter.open(path, base, LoraConfig.model_validate(lora))
        fused: dict[str, list[str]] = getattr(self.model_runner.get_model(), "packed_modules_mapping", {})
        with _quiet_about_other_layers():
            self._load(adapter.tensors(_loaded_with(adapter.layers, fused), self.device))

    def _load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        model: Any = self.model_runner.get_model()
        with set_current_vllm_config(self.vllm_config), self._noting_weights(model):
            # Layer by layer: kernels keep packed weights, which `load_weights` alone does not update.
            initialize_layerwise_reload(model)
            model.load_weights(tensors)
            finalize_layerwise_reload(model, self.vllm_config.model_config)  # type: ignore[no-untyped-call]
            if current_platform.is_cpu():
                _repack(model)

    def join_transfer(self, backend: str, init_info: dict[str, Any]) -> None:
        """Create vLLM's weight transfer engine and join the learner's communicator, unless it has joined this one.

        Raises: vLLM's error.
        """
        rank_offset, gpu = init_info.pop("rank_offset"), init_info.pop("gpu", None)
        if gpu is not None and gpu != str(torch.cuda.get_device_properties(self.device).uuid):
            raise ValueError(f"the learner's GPU {gpu} is not this worker's")
        if init_info == self.joined_transfer:
            return
        worker: Any = self
        worker.shutdown_weight_transfer_engine()
        self.joined_transfer = None
        config = WeightTransferConfig(backend=backend)
        model: Any = self.model_runner.get_model()
        engine = WeightTransferEngineFactory.create_engine(config, self.vllm_config, self.device, model)
        self.weight_transfer_engine = engine
        ranks = {"rank_offset": rank_offset} if backend == "nccl" else {}
        worker.init_weight_transfer_engine({**init_info, **ranks})
        self.joined_transfer = init_info

    def receive_weights(self, update_info: dict[str, Any]) -> None:
        """Receive all tensors from the learner, by Hugging Face names.

        Raises: vLLM's error; the model is then unusable.
        """
        if "ipc_handles" in update_info:
            update_info = {**update_info, "ipc_handles": opened_handles(update_info["ipc_handles"], torch)}
        worker: Any = self
        model: Any = self.model_runner.get_model()
        worker.start_weight_update()
        with self._noting_weights(model):
            worker.update_weights(update_info)
        worker.finish_weight_update()
        if current_platform.is_cpu():
            _repack(model)

    def kernel_problem(self) -> tuple[str, bool]:
        """Why the kernels do not multiply with the weights that arrived last; empty if they do, or cannot be asked. And
        whether they could tell these weights from those before."""
        assert self.kernel_probe is not None, "after an update"
        with torch.inference_mode():
            problem = self.kernel_probe.problem(_layers(self.model_runner.get_model(), self.kernel_probe))
        return problem, self.kernel_probe.decides

    @contextmanager
    def _noting_weights(self, model: Any) -> Iterator[None]:
        """Inside, what the model loads is kept for `kernel_problem`."""
        if self.kernel_probe is None:
            self.kernel_probe = KernelProbe(cast("torch.dtype", self.model_runner.dtype), self.device)
        probe, load = self.kernel_probe, model.load_weights
        rename = partial(_renamed, getattr(model, "hf_to_vllm_mapper", None))

        def noted(weights: Iterable[tuple[str, torch.Tensor]], *arguments: Any, **options: Any) -> Any:
            return load(probe.noted(weights, rename), *arguments, **options)

        probe.begin()
        model.load_weights = noted
        try:
            yield
        finally:
            del model.load_weights  # the class's own again

    def exclude_tokens(self, token_ids: Sequence[int]) -> None:
        """Give these tokens no probability wherever the model's logits are used, like the learner."""
        model: Any = self.model_runner.get_model()
        logits_of = model.compute_logits
        index = torch.tensor(token_ids, dtype=torch.long, device=next(model.parameters()).device)

        def compute_logits(*arguments: Any, **options: Any) -> torch.Tensor | None:
            logits: torch.Tensor | None = logits_of(*arguments, **options)
            # None on ranks of tensor parallelism that do not sample.
            return None if logits is None else logits.index_fill_(-1, index, -torch.inf)

        model.compute_logits = compute_logits


def _layers(model: torch.nn.Module, probe: KernelProbe) -> Iterator[Linear]:
    """The layers whose weights have arrived whole: neither sharded over ranks nor quantized, nor experts."""
    fused: dict[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    for path, layer in model.named_modules():
        parent, _, leaf = path.rpartition(".")
        method: Any = getattr(layer, "quant_method", None)
        if isinstance(layer, LinearBase) and isinstance(method, UnquantizedLinearMethod):
            sizes = tuple(getattr(layer, "output_sizes", (layer.output_size,)))
            names = [f"{parent}.{part}.weight" for part in fused.get(leaf, [leaf])]
            num_inputs = layer.input_size
        elif isinstance(layer, ParallelLMHead) and isinstance(method, UnquantizedEmbeddingMethod):
            sizes, num_inputs, names = (layer.org_vocab_size,), layer.embedding_dim, [f"{path}.weight"]
            if not probe.knows(names, sizes):  # tied
                names = [name for name in probe.names if name.endswith("embed_tokens.weight")]
        else:
            continue
        if getattr(layer, "tp_size", 1) == 1 and probe.knows(names, sizes):
            yield Linear(tuple(names), sizes, num_inputs, partial(method.apply, layer))


def _renamed(mapper: Any, name: str) -> str:
    """The name of a tensor in vLLM's model: its prefix may differ in the file."""
    for prefix, new in (getattr(mapper, "orig_to_new_prefix", None) or {}).items():
        if new is not None and name.startswith(prefix):
            return f"{new}{name.removeprefix(prefix)}"
    return name


def _is_news(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(EXPECTED_EMPTY)


RELOAD_LOG = logging.getLogger("vllm.model_executor.model_loader.reload.layerwise")
RELOAD_LOG.addFilter(_is_news)


@contextmanager
def _quiet_about_other_layers() -> Iterator[None]:
    """vLLM warns of every layer that gets nothing; whether the others have it is what the kernel probe says."""
    level = RELOAD_LOG.level
    RELOAD_LOG.setLevel(logging.ERROR)
    try:
        yield
    finally:
        RELOAD_LOG.setLevel(level)


def _tensors(path: str) -> Iterator[tuple[str, torch.Tensor]]:
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 - not a dict
            yield name, file.get_tensor(name)


def _loaded_with(layers: Iterable[str], fused: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """Those that vLLM holds in one layer with one of these, such as k_proj with q_proj."""
    for layer in layers:
        parent, _, leaf = layer.rpartition(".")
        for parts in fused.values():
            if leaf in parts:
                yield from (f"{parent}.{part}" for part in parts)


def _repack(model: torch.nn.Module) -> None:
    """Repack what a reload on a CPU leaves as it was or unpacked; else logits are wrong by more than one nat.

    Heads tied to the embedding have no tensor of their own, so the reload skips their packed copy. On a GPU the head
    is the embedding's tensor, and a second pass over a quantized head would corrupt it.

    Experts get plain weights: vLLM packs them only when it creates their kernel. On a GPU it converts them each time.
    """
    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)
        elif isinstance(module, RoutedExperts) and isinstance(module.quant_method, UnquantizedFusedMoEMethod):
            kernel: Any = module.quant_method.moe_kernel
            kernel.fused_experts.process_weights_after_loading(module)
