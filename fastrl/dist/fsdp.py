"""Sharding of a model over ranks: one group per decoder layer, gradients summed and never averaged.

The embedding, the last norm and a tied head stay in one group (sharding them apart would silently untie them); a head of
its own is its own group. World size 1 and `shard = 1` keep whole models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import MethodType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)

from fastrl.errors import ModelError
from fastrl.models.head import trunk
from fastrl.models.layers import decoder_layers
from fastrl.models.load import ValueModel, resolve_path, set_value_head
from fastrl.models.stream import give_memory, local_folder, missing_weights, read_weights, weight_files

Model = TypeVar("Model", bound=nn.Module)


def shard_model(
    model: Model, mesh: DeviceMesh | None, *, dtype: torch.dtype, offload_parameters: bool = False
) -> Model:
    """Shard a loaded model over the `shard` dimension of `mesh`, replicate it over the other one; returns the model.

    Args:
        model: a causal LM or a value model of `fastrl.models.load`, the same weights on every rank.
        mesh: (replicate, shard) of `fastrl.dist.mesh.make_mesh`; None, or a shard dimension of 1, leaves it whole.
        dtype: compute type; under bfloat16 layers are gathered in it, masters and the sum of gradients stay float32.
        offload_parameters: keep masters, gradients and moments in CPU memory (the optimizer's step runs there).

    Raises:
        ModelError: the decoder layers cannot be found.
    """
    if mesh is None or not splits(mesh):
        return model
    offload = CPUOffloadPolicy(pin_memory=torch.cuda.is_available()) if offload_parameters else OffloadPolicy()
    low = torch.bfloat16 if dtype == torch.bfloat16 else None
    options: dict[str, Any] = {
        "mesh": mesh["shard"] if mesh.size(0) == 1 else mesh,
        "mp_policy": MixedPrecisionPolicy(param_dtype=low, reduce_dtype=None if low is None else torch.float32),
        "offload_policy": offload,
    }
    for layer in decoder_layers(model):
        fully_shard(layer, reshard_after_forward=True, **options)
    value_head, head = getattr(model, "value_head", None), own_head(model)
    if value_head is not None:  # values keep the masters' type
        fully_shard(value_head, **options | {"mp_policy": MixedPrecisionPolicy()})
    if head is not None:
        fully_shard(head, reshard_after_forward=True, **options)
        register(head)
    fully_shard(model, reshard_after_forward=False, **options)
    setattr(model, "fastrl_on_host", offload_parameters)  # noqa: B010
    register(model)
    sum_in_backward(model)
    return model


def splits(mesh: DeviceMesh | None) -> bool:
    """Whether models are sharded on this mesh, or kept whole."""
    return mesh is not None and mesh.size(1) > 1


def load_sharded(
    load: Callable[..., Model],
    path: str,
    mesh: DeviceMesh,
    device: torch.device,
    *,
    dtype: torch.dtype,
    offload_parameters: bool = False,
    **options: Any,
) -> Model:
    """A model read from safetensors straight into its shards; one that cannot be is loaded whole first, on the CPU.

    Args:
        load: `fastrl.models.load.load_model` or `load_critic`.
        path, options: what it takes.
        mesh, dtype, offload_parameters: as for `shard_model`; the mesh splits models.
        device: of this rank.
    """
    shard = partial(shard_model, mesh=mesh, dtype=dtype, offload_parameters=offload_parameters)
    stored = weight_files(local_folder(resolve_path(path), options.get("revision")))
    if stored is not None:
        model = load(path, dtype=dtype, device=device, skeleton=True, **options)
        if not missing_weights(trunk(model), partial(stored_name, model), stored) and head_is_stored(model, stored):
            shard(model)
            give_memory(model, torch.device("cpu") if offload_parameters else device)
            if isinstance(model, ValueModel):
                read_weights(model.trunk, partial(stored_name, model), stored)
                set_value_head(model, path, options.get("revision"))
            else:
                read_weights(model, str, stored)
            return model
    return shard(load(path, dtype=dtype, device="cpu", **options))


def stored_name(model: nn.Module, name: str) -> str:
    """What a parameter of the trunk is called in the files of the causal LM."""
    prefix = model.causal_prefix if isinstance(model, ValueModel) else model.base_model_prefix
    return f"{prefix}.{name}"


def head_is_stored(model: nn.Module, stored: dict[str, Any]) -> bool:
    """Whether what lies outside the trunk is in the files too."""
    return isinstance(model, ValueModel) or not missing_weights(model, str, stored)


def register(module: nn.Module) -> None:
    """Give `module` a method that calls a function while its weights are whole (`fastrl.models.forward.inside`)."""
    setattr(module, "sharded_call", MethodType(_call, module))  # noqa: B010
    register_fsdp_forward_method(module, "sharded_call")


def _call(module: nn.Module, function: Callable[..., Any], *tensors: Tensor) -> Any:
    return function(*tensors)


def sum_in_backward(model: nn.Module) -> None:
    """The one place where averaging is switched off: losses are divided by global counts already.

    The divisor alone makes gloo refuse the reduction it stands for; a forced plain sum works everywhere.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def own_head(model: nn.Module) -> nn.Module | None:
    """The head when it has a weight of its own; None for a tied head and for a value model."""
    get_head = getattr(model, "get_output_embeddings", None)
    if get_head is None:
        return None
    embedding = trunk(model).get_input_embeddings()  # type: ignore[operator]
    return None if get_head().weight is embedding.weight else get_head()


def is_sharded(model: nn.Module) -> bool:
    """Whether `shard_model` split this model over ranks."""
    return isinstance(model, FSDPModule)


def reshard(model: nn.Module) -> None:
    """Free the weights that a pass without backward left gathered."""
    for module in (model, own_head(model)):
        if isinstance(module, FSDPModule):
            module.reshard()


@contextmanager
def resident(module: nn.Module, device: torch.device, *, offload: bool) -> Iterator[None]:
    """`module` on `device` inside, its memory there given back afterwards where `offload` is set.

    A model sharded with `offload_parameters` stays where it is: each layer is copied when it is gathered.
    """
    if not offload or device.type == "cpu" or getattr(module, "fastrl_on_host", False):
        yield
        return
    module.to(device)
    try:
        yield
    finally:
        reshard(module)
        module.to("cpu")
