"""Weights laid out for the matrix products of decoding on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn


@contextmanager
def packed_linears(model: nn.Module, rows: int) -> Iterator[None]:
    """Inside, the linear layers of a float32 CPU model compute from copies of their weights in the layout of oneDNN.

    That layout depends on the number of rows, and for the few rows of decoding it is about 1.4 times as fast as the
    plain one. It costs the memory of the weights once more, and the layers must not learn inside. Models on other
    devices, in other types, or with a torch without oneDNN stay as they are, and so does every model when `rows` is 0.
    """
    packed: list[nn.Linear] = []
    try:
        for module in model.modules():
            if rows and type(module) is nn.Linear and _can_pack(module.weight):
                weight = torch.ops.mkldnn._reorder_linear_weight(module.weight.detach(), rows)
                module.forward = partial(_forward, weight, module.bias)  # type: ignore[method-assign]
                packed.append(module)
        yield
    finally:
        for module in packed:
            del module.forward  # the class's own again


def _can_pack(weight: Tensor) -> bool:
    usable: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return usable and weight.device.type == "cpu" and weight.dtype == torch.float32


def _forward(weight: Tensor, bias: Tensor | None, inputs: Tensor) -> Tensor:
    outputs: Tensor = torch.ops.mkldnn._linear_pointwise(inputs, weight, bias, "none", [], "")
    return outputs
