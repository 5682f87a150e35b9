"""The adaptation of megatron-core to CPU: refuses what it was not written for, and leaves everything outside megatron alone."""

import importlib.metadata
import subprocess
import sys
import types

import pytest
import torch

import miles.platform
from miles.core import EnvironmentFault
from miles.platform import cpu
from miles.platform.context_parallel import zigzag_positions
from miles.platform.cpu_adam import CpuFusedAdam

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="does nothing where CUDA is")


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_another_megatron_version_is_refused_by_number(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.20.0")
    with pytest.raises(EnvironmentFault, match=r"megatron-core 0\.20\.0 without CUDA[\s\S]*expected: megatron-core 0\.19\.2"):
        cpu.adapt_megatron.__wrapped__()


def test_megatron_imported_too_early_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "megatron.core", types.ModuleType("megatron.core"))
    with pytest.raises(EnvironmentFault, match="imported before it was adapted"):
        cpu.adapt_megatron.__wrapped__()


def test_megatron_sees_the_cpu_and_torch_itself_is_not_changed():
    seen, changed, meta = run("""
import torch, torch._dynamo  # dynamo replaces torch.manual_seed on import, whoever imports it
before = {n: getattr(torch, n) for n in dir(torch)}
cuda = {n: getattr(torch.cuda, n) for n in dir(torch.cuda)}
import miles.platform; miles.platform.activate()
import megatron.core.optimizer.distrib_optimizer as module
print(module.torch.zeros(1, device="cuda").device, module.torch.cuda.current_device(), module.Adam.__name__, module.torch.float32)
print([n for n, v in before.items() if getattr(torch, n) is not v] + [n for n, v in cuda.items() if getattr(torch.cuda, n) is not v])
with torch.device("meta"): kind = torch.zeros(2).device.type
print(kind, torch.zeros(1).type())
""").splitlines()
    assert seen == "cpu cpu CpuFusedAdam torch.float32"
    assert changed == "[]"
    assert meta == "meta torch.FloatTensor"


def test_platform_is_gloo_on_cpu():
    assert (miles.platform.current().name, miles.platform.current().backend) == ("cpu", "gloo")


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_adam_equals_torch_adamw(decay):
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(7, generator=generator)
    ours, theirs = (torch.nn.Parameter(a.clone()) for _ in range(2))
    options = {"lr": 0.1, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": decay}
    optimizers = CpuFusedAdam([ours], **options), torch.optim.AdamW([theirs], **options)
    for _ in range(5):
        gradient = torch.randn(7, generator=generator)
        for p, optimizer in zip((ours, theirs), optimizers, strict=True):
            p.grad = gradient.clone()
            optimizer.step()
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-6)
    assert optimizers[0].param_groups[0]["step"] == 5
    assert set(optimizers[0].state[ours]) == {"exp_avg", "exp_avg_sq"}


def test_adam_leaves_storages_that_can_be_given_back_and_takes_parameters_of_no_elements():
    p, none = torch.nn.Parameter(torch.ones(5)), torch.nn.Parameter(torch.ones(0))
    optimizer = CpuFusedAdam([p, none])
    p.grad, none.grad = torch.ones(5), torch.ones(0)
    optimizer.step()
    held = (p.detach(), p.grad, *optimizer.state[p].values())
    for t in held:
        t.untyped_storage().resize_(0)
    assert [t.untyped_storage().nbytes() for t in held] == [0, 0, 0, 0]


def test_zigzag_split_covers_a_sequence_once():
    assert [zigzag_positions(8, 2, r).tolist() for r in range(2)] == [[0, 1, 6, 7], [2, 3, 4, 5]]
