"""What layers are built from on this machine."""

import importlib.util

import pytest
import torch

from miles.core import EnvironmentFault
from miles.platform import Platform, layers


def test_a_gpu_without_the_kernels_of_sparse_attention_is_refused(monkeypatch):
    monkeypatch.setattr(layers, "PLATFORM", Platform("cuda", torch.device("cuda", 0), "nccl"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(EnvironmentFault, match="tilelang is not installed"):
        layers.sparse_kernels()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    assert layers.sparse_kernels() == "tilelang"


def test_a_cpu_needs_no_kernels(monkeypatch):
    monkeypatch.setattr(layers, "PLATFORM", Platform("cpu", torch.device("cpu"), "gloo"))
    assert layers.sparse_kernels() == "none"
