"""A trainer's memory given back and taken again, by way of host memory and of a file; on the CPU by the same code, with the host's tensors as the device's."""

import pytest
import torch
import worlds

from miles.core import EnvironmentFault
from miles.trainer.memory import DeviceMemory


@pytest.fixture(params=["host", "disk"])
def waiting(request, tmp_path):
    """Options of a DeviceMemory."""
    return {"file": tmp_path / "paused"} if request.param == "disk" else {}


def test_storages_are_empty_while_released_and_come_back_bit_for_bit(waiting):
    flat = torch.randn(1000)
    views = [flat[:400], flat[400:].view(20, 30)]
    scratch = torch.ones(500)
    odd = torch.tensor([float("nan"), -0.0, float("inf")])
    memory = DeviceMemory([flat, *views, odd], [scratch], device="cpu", **waiting)
    before = flat.clone(), odd.view(torch.int32).clone()
    assert memory.bytes == 4 * (1000 + 500 + 3)  # a storage with many views counts once
    memory.release()
    assert [t.untyped_storage().nbytes() for t in (flat, views[1], scratch, odd)] == [0, 0, 0, 0]
    memory.take()
    assert torch.equal(flat, before[0]) and torch.equal(odd.view(torch.int32), before[1])
    assert views[1].shape == (20, 30) and torch.equal(views[1].flatten(), flat[400:]) and scratch.untyped_storage().nbytes() == 2000
    views[0].fill_(7)
    assert flat[0] == 7  # still views of one storage


def test_what_is_not_on_the_device_stays(waiting):
    here = torch.randn(10)
    memory = DeviceMemory([here], device="cuda", **waiting)
    memory.release()
    assert memory.bytes == 0 and here.untyped_storage().nbytes() == 40
    memory.take()


def test_nothing_is_trained_on_that_the_disk_has_changed(tmp_path):
    flat = torch.randn(1000)
    memory = DeviceMemory([flat], device="cpu", file=tmp_path / "paused")
    memory.release()
    data = bytearray((tmp_path / "paused").read_bytes())
    data[1234] ^= 1
    (tmp_path / "paused").write_bytes(data)
    with pytest.raises(EnvironmentFault, match="bytes 0 to 4096 of .*paused have digest"):
        memory.take()


@pytest.mark.parametrize("family", ["qwen3_moe", "glm_moe_dsa"])
def test_training_goes_on_as_if_nothing_had_been_released(world, models, family, waiting):
    batches = [worlds.sequences(4, seed) for seed in (30, 31, 32)]

    def train(between):
        step = worlds.build(models[family], {})
        memory = DeviceMemory.of((step.model, step.optimizer), device="cpu", **waiting)
        out = []
        for number, batch in enumerate(batches):
            out.append(vars(step.run(batch, number=number)))
            between(step, memory)
        return out, [p.detach().clone() for p in step.model.chunks[0].parameters()]

    def release(step, memory):
        # weights, gradients and two moments, all in fp32; of what is not trained the weights alone
        assert memory.bytes >= sum(p.nbytes * (4 if p.requires_grad else 1) for p in step.model.chunks[0].parameters())
        memory.release()
        assert all(p.untyped_storage().nbytes() == 0 for p in step.model.chunks[0].parameters())
        states = [t for part in step.optimizer.chained_optimizers for s in part.optimizer.state.values() for t in s.values() if isinstance(t, torch.Tensor) and t.dim()]
        assert states and all(t.untyped_storage().nbytes() == 0 for t in states)
        memory.take()

    plain, released = train(lambda *_: None), train(release)
    timing = {k for k in plain[0][0] if k.endswith("_s")}
    assert [{k: v for k, v in m.items() if k not in timing} for m in released[0]] == [{k: v for k, v in m.items() if k not in timing} for m in plain[0]]
    assert all(torch.equal(a, b) for a, b in zip(plain[1], released[1], strict=True))
