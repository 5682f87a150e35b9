"""Quantized weights on their way: export, patches, folders."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from miles.config import load_config
from miles.core import ConfigError, StructureError
from miles.engine.params import read_parameters
from miles.rundir import RunDir
from miles.weights.acks import Ack, read_acks, write_ack
from miles.weights.follow import Follower
from miles.weights.precision import fp8_block, mxfp8
from miles.weights.precision.export import Export
from miles.weights.precision.folder import quantize_folder
from miles.weights.publish import Publisher
from miles.weights.store import WeightStore

Q, EMBED, NORM = "model.layers.0.self_attn.q_proj.weight", "model.embed_tokens.weight", "model.norm.weight"


def model(seed):
    g = torch.Generator().manual_seed(seed)
    out = {EMBED: torch.randn(16, 32, generator=g), Q: torch.randn(200, 160, generator=g), NORM: torch.ones(32)}
    out[Q][0, 0] = 5.0
    return {n: t.bfloat16() for n, t in out.items()}


@pytest.fixture
def run(tmp_path):
    return RunDir.create(load_config("configs/tiny_async.toml", (
        f"run.root={tmp_path}", "weights.keyframe_every=10", "model.trainer_precision=bf16", "model.rollout_precision=fp8", "model.rollout_path=/models/fp8")))


def test_a_matrix_becomes_its_parts_one_after_the_other_and_the_rest_stays(run):
    out = list(Export.of(run.config, "llama")(model(1).items()))
    assert [n for n, _ in out] == [EMBED, Q, Q + "_scale_inv", NORM]
    assert [t.dtype for _, t in out] == [torch.bfloat16, torch.float8_e4m3fn, torch.float32, torch.bfloat16]
    assert out[2][1].shape == (2, 2)


def test_a_run_that_is_not_quantized_exports_its_tensors_themselves():
    tensors = model(1)
    assert all(t is tensors[n] for n, t in Export.of(load_config("configs/tiny_async.toml"), "llama")(tensors.items()))


def test_a_weight_that_the_format_cannot_hold_is_named(run):
    bad = model(1)
    bad[Q][3, 3] = torch.inf
    with pytest.raises(StructureError, match=f"^{Q}: quantizer: 1 elements are infinite"):
        list(Export.of(run.config, "llama")(bad.items()))


def test_a_chain_of_patches_gives_weight_and_scale_of_each_version_bit_for_bit(run):
    publisher = Publisher(run, run.new_epoch("trainer"), WeightStore(run), lambda: None, lambda s: "")
    export, follower = Export.of(run.config, "llama"), Follower(WeightStore(run))
    for step in range(5):
        weights = model(step)
        publisher.publish(step, export(weights.items()))
        follower.advance(step + 1)
        expected = fp8_block.quantize(weights[Q])
        assert WeightStore(run).manifest(step + 1).encoding == ("keyframe" if step == 0 else "delta")
        assert torch.equal(follower.state[Q].view(torch.uint8), expected["weight"].view(torch.uint8))
        assert torch.equal(follower.state[Q + "_scale_inv"], expected["weight_scale_inv"])


def test_a_broadcast_gives_weight_and_scale_of_each_version_bit_for_bit(tmp_path):
    run = RunDir.create(load_config("configs/tiny_async.toml", (
        f"run.root={tmp_path}", "weights.transport=broadcast", "cluster.rollout.nodes=1", "model.trainer_precision=bf16", "model.rollout_precision=fp8",
        "model.rollout_path=/models/fp8", "weights.ack_timeout_s=60")))
    epoch = run.new_epoch("rollout")
    publisher, export = Publisher(run, run.new_epoch("trainer"), WeightStore(run), lambda: None, lambda s: ""), Export.of(run.config, "llama")
    publisher.publish(0, export(model(0).items()))
    write_ack(run, Ack(0, epoch, 0, 1, ""))
    end = subprocess.Popen([sys.executable, str(Path(__file__).with_name("quantized_end.py")), str(run.path), "3"],
                           env={**os.environ, "PYTHONPATH": str(Path.cwd())})
    try:
        for version in (2, 3):
            weights = model(version)
            while read_acks(run)[0].version < version - 1:
                assert end.poll() is None
                time.sleep(0.01)
            sent = publisher.publish(version - 1, export(weights.items()))
            assert (sent.version, sent.transport, sent.note) == (version, "broadcast", "")
        assert end.wait(timeout=60) == 0
    finally:
        end.kill()
    for version in (2, 3):
        weights, got = model(version), load_file(run.path / f"got{version}.safetensors")
        parts = fp8_block.quantize(weights[Q])
        assert sorted(got) == sorted([EMBED, Q, Q + "_scale_inv", NORM]) and torch.equal(got[EMBED], weights[EMBED]) and torch.equal(got[NORM], weights[NORM])
        assert torch.equal(got[Q].view(torch.uint8), parts["weight"].view(torch.uint8)) and torch.equal(got[Q + "_scale_inv"], parts["weight_scale_inv"])
        scale = got[Q + "_scale_inv"].repeat_interleave(128, 0).repeat_interleave(128, 1)[:200, :160]
        worth = got[Q].float() * scale
        assert (worth - weights[Q].float()).abs().max() <= 2**-4 * weights[Q].float().abs().max()  # e4m3 has 3 bits of mantissa: half a step is a sixteenth


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    save_file(model(3), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": 32}))
    (folder / "tokenizer.json").write_text("{}")
    return folder


@pytest.mark.parametrize(("format", "quantizer", "block"), [("fp8", fp8_block, [128, 128]), ("mxfp8", mxfp8, [1, 32])])
def test_a_folder_for_engines_has_the_tensors_the_trainer_sends_and_says_so_in_its_config(source, tmp_path, format, quantizer, block):
    assert quantize_folder(source, tmp_path / "out", format) == (1, 2)
    tensors, expected = load_file(tmp_path / "out" / "model.safetensors"), quantizer.quantize(model(3)[Q])
    assert set(tensors) == {EMBED, Q, Q + "_scale_inv", NORM} == set(read_parameters(tmp_path / "out"))
    assert torch.equal(tensors[Q].view(torch.uint8), expected["weight"].view(torch.uint8)) and torch.equal(tensors[Q + "_scale_inv"], expected["weight_scale_inv"])
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {"model_type": "llama", "hidden_size": 32, "quantization_config": {
        "quant_method": format, "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": block, "modules_to_not_convert": ["model.embed_tokens"]}}
    assert (tmp_path / "out" / "tokenizer.json").is_file()


def test_sglang_reads_the_description_of_a_folder_as_block_fp8(source, tmp_path):
    from sglang.srt.layers.quantization.fp8 import Fp8Config

    quantize_folder(source, tmp_path / "out", "fp8")
    read = Fp8Config.from_config(json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"])
    assert read.is_checkpoint_fp8_serialized and read.weight_block_size == [128, 128] and "model.embed_tokens" in read.ignored_layers


def test_a_folder_is_refused_over_another_one_with_a_slip_in_a_pattern_or_twice(source, tmp_path):
    with pytest.raises(ConfigError, match="match no tensor"):
        quantize_folder(source, tmp_path / "out", "fp8", ["q_prj"])
    with pytest.raises(ConfigError, match="no folder in int4"):
        quantize_folder(source, tmp_path / "out", "int4")
    assert list(tmp_path.iterdir()) == [source]
    quantize_folder(source, tmp_path / "out", "fp8")
    with pytest.raises(ConfigError, match="exists"):
        quantize_folder(source, tmp_path / "out", "fp8")
    with pytest.raises(ConfigError, match="quantized already"):
        quantize_folder(tmp_path / "out", tmp_path / "again", "fp8")
