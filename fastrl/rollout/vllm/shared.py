"""A vLLM model whose parameters are the trainer's memory: a model loader that registers tensors, not files.

The model is built as usual, so that its buffers (rotary tables) are right; then each parameter is replaced by the
shared tensor of its name. vLLM's post-processing runs in the mode of its own `ipc_cache` loader, which leaves tensors
alone; on a CPU, where it would pack them, its plain products are used. Afterwards every parameter must still be the
shared memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import ModelConfig, VllmConfig
from vllm.config.load import LoadConfig
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from fastrl.errors import EngineError
from fastrl.rollout.backend import SharedTensors, Wanted

LOAD_FORMAT = "fastrl_shared"
Accept = Callable[[Wanted], Mapping[str, Tensor]]


def in_place(options: dict[str, Any], shared: SharedTensors) -> dict[str, Any]:
    """Options with which vLLM computes with somebody else's tensors."""
    problem = sharing_unsupported()
    if problem is not None:
        raise EngineError(f"rollout.zero_copy: {problem}")
    return options | {"load_format": use_shared_weights(shared.fit, shared.num_bytes)}


def sharing_unsupported() -> str | None:
    """Why this vLLM cannot compute with somebody else's tensors; None when it has what that needs."""
    try:
        from vllm.model_executor.model_loader.weight_cache.protocol import check_ipc_quant_support  # noqa: F401
        from vllm.model_executor.utils import weights_already_processed  # noqa: F401
    except ImportError as error:
        return f"this vLLM has no weight cache to borrow from ({error})"
    return None


def use_shared_weights(accept: Accept, num_bytes: int) -> str:
    """Register the loader; returns the `load_format` to start vLLM with.

    Args:
        accept: given (name, shape, dtype) of every parameter the model has, tied names once, returns the shared tensor
            of each, or raises when they do not fit (the caller then delivers by buckets).
        num_bytes: size of the shared memory, which vLLM has to count as used.
    """

    @register_model_loader(LOAD_FORMAT)
    class SharedLoader(BaseModelLoader):
        def __init__(self, load_config: LoadConfig) -> None:
            super().__init__(load_config)
            self.tensors: Mapping[str, Tensor] = {}

        def get_external_weight_memory(self, vllm_config: VllmConfig) -> int:
            return num_bytes

        def download_model(self, model_config: ModelConfig) -> None:
            """Nothing to fetch."""

        def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
            from vllm.model_executor.model_loader.weight_cache.protocol import check_ipc_quant_support

            check_ipc_quant_support(model)
            self.tensors = accept(wanted_of(model))
            put_in(model, self.tensors)
            for module in model.modules():
                module._cpu_skip_gemm_dispatch = True  # type: ignore[assignment]

        def load_model(self, vllm_config: VllmConfig, model_config: ModelConfig, prefix: str = "") -> nn.Module:
            from vllm.model_executor.utils import weights_already_processed

            with weights_already_processed():
                model = super().load_model(vllm_config, model_config, prefix)
            compute_unpacked(model)
            refuse_copies(model, self.tensors)
            return model

    return LOAD_FORMAT


def wanted_of(model: nn.Module) -> list[tuple[str, tuple[int, ...], torch.dtype]]:
    """Name, shape and type of every parameter, tied ones by their first name."""
    return [(name, tuple(p.shape), p.dtype) for name, p in model.named_parameters()]


def put_in(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Replace each parameter by the shared tensor of its name; tied parameters stay one object."""
    replaced: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}  # the old ones stay alive, so that ids are unique
    slots = [
        (module, leaf, f"{prefix}.{leaf}" if prefix else leaf, parameter)
        for prefix, module in model.named_modules()
        for leaf, parameter in module._parameters.items()
        if parameter is not None
    ]
    for module, leaf, name, parameter in slots:
        if id(parameter) not in replaced:
            replaced[id(parameter)] = (parameter, nn.Parameter(tensors[name], requires_grad=False))
        module._parameters[leaf] = replaced[id(parameter)][1]


def compute_unpacked(model: nn.Module) -> None:
    """On a CPU: products read the weights themselves, not a packed copy that would never see an update."""
    for module in model.modules():
        if hasattr(module, "cpu_linear"):
            module.cpu_linear = torch.nn.functional.linear  # type: ignore[assignment]


def refuse_copies(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Raise EngineError when a parameter is no longer the shared memory."""
    own: dict[str, Any] = dict(model.named_parameters())
    for name, tensor in tensors.items():
        parameter = own.get(name)
        if parameter is not None and parameter.data_ptr() != tensor.data_ptr():
            raise EngineError(
                f"rollout.zero_copy: vLLM keeps a copy of {name} in another layout on this device, so its weights "
                "cannot be the trainer's: use rollout.zero_copy = false"
            )
