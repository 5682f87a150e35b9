"""The trainer program on two real MPI ranks, fed by groups made here: steps, restart after kill -9, stop on a signal."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import h5py
import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from safetensors.torch import load_file
from tiny_models import SHARED_HEAD, make, with_draft

from miles.buffer import BufferState, BufferView, BufferWriter, Status, write_part
from miles.config import load_config, load_site
from miles.core import NO_VERSION, EnvironmentFault, StaleEpochError, Trajectory
from miles.optim import claim, folder_of
from miles.rundir import RunDir
from miles.trainer.checkpoint import describe_file
from miles.trainer.loop import Trainer
from miles.weights.acks import Ack, write_ack
from miles.weights.digest import digest
from miles.weights.follow import Follower
from miles.weights.merged import MergedModel
from miles.weights.publish import Published
from miles.weights.store import WeightStore, combined_digest

MPIEXEC = str(Path(sys.executable).with_name("mpiexec"))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make("qwen3_moe", tmp_path_factory.mktemp("model"))


def config(root, model, *more):
    return load_config("configs/tiny_async.toml", (
        f"run.root={root}", f"model.path={model}", "run.steps=4", "trainer.groups_per_step=2", "checkpoint.every_steps=2", "buffer.max_staleness=8",
        "rollout.group_size=2", "model.max_context=512", "rollout.max_session_tokens=64", *more))


@pytest.fixture
def run(tmp_path, model, request):
    """Parametrized with further settings of the run, where a test is."""
    r = RunDir.create(config(tmp_path, model, *getattr(request, "param", ())))
    r.new_attempt()
    return r


def trajectory(group, sample, version, layers=2):
    rng = np.random.default_rng(100 * group + sample)
    n = int(rng.integers(8, 40))
    mask = np.r_[np.zeros(4), np.ones(n - 4)].astype(np.uint8)
    routes = np.stack([[rng.choice(8, 2, replace=False) for _ in range(layers)] for _ in range(n - 1)]).astype(np.uint8)
    return Trajectory(
        group_id=group, sample=sample, task_id="t", tokens=rng.integers(0, 131, n).astype(np.int32), loss_mask=mask,
        logprobs=np.where(mask, -4.0, 0).astype(np.float32), versions=np.where(mask, version, NO_VERSION).astype(np.int32), routes=routes,
        reward=float(sample), finish_reason="done", turns=1, exact=True)


def leaves(group, sample, version, layers):
    """Sample 1 has a second leaf, as long as the first, that trains the last two tokens alone. `layers`: with experts, of the model."""
    first = trajectory(group, sample, version, layers)
    if sample == 0:
        return [first]
    given = np.arange(len(first.tokens)) < len(first.tokens) - 2
    return [first, replace(first, leaf=1, loss_mask=np.where(given, 0, 1).astype(np.uint8), logprobs=np.where(given, 0, first.logprobs).astype(np.float32),
                           versions=np.where(given, NO_VERSION, version).astype(np.int32))]


class Producer:
    def __init__(self, run, layers=2):
        self.run, self.epoch, self.next, self.layers = run, run.new_epoch("rollout"), 0, layers
        self.writer = BufferWriter(run, self.epoch)

    def put(self, version, count=1):
        for _ in range(count):
            self.writer.start(self.next, "t")
            for s in range(2):
                write_part(self.run, self.epoch, leaves(self.next, s, version, self.layers))
            self.writer.seal(self.next, [0, 1])
            self.next += 1


def start(run):
    env = {**os.environ, "MILES_EPOCH": str(run.new_epoch("trainer")), "MILES_ATTEMPT": "1", "MILES_ROLE": "trainer"}
    return subprocess.Popen([MPIEXEC, "-n", "2", sys.executable, "-m", "miles.trainer", str(run.path)], env=env,
                            stdout=open(run.path / "trainer.log", "ab"), stderr=subprocess.STDOUT)


def wait(condition, process, run, seconds=90):
    deadline = time.time() + seconds
    while not condition():
        assert process.poll() is None and time.time() < deadline, (run.path / "trainer.log").read_text()[-3000:]
        time.sleep(0.05)


def trained(run):
    view = BufferView(run)
    view.poll()
    return {g.group_id: g.step for g in view.state.with_status(Status.TRAINED)}


def committed(run):
    return sorted(int(p.parent.name[5:]) for p in run.checkpoints_dir.glob("step_*/COMMIT"))


def ranks_of(process):
    """Trainer ranks below an mpiexec."""
    out = subprocess.run(["ps", "-ww", "-eo", "pid,args"], capture_output=True, text=True).stdout
    return [int(line.split()[0]) for line in out.splitlines() if line.endswith(f"-m miles.trainer {process.args[-1]}") and "mpiexec" not in line and "hydra" not in line]


JUDGED = ("algorithm.advantage=gae", "algorithm.critic.lr=1e-3", "algorithm.critic.alone_steps=1", "algorithm.kl_coefficient=0.1")
STREAMED = ("trainer.optimizer.state=stream", "trainer.optimizer.moments=bf16")
ADAPTERS = ("trainer.lora.rank=4", "trainer.lora.alpha=8")


@pytest.mark.parametrize("run", [(), (*JUDGED, *STREAMED), (*ADAPTERS, "trainer.layout.ep=2")], indirect=True, ids=["policy", "policy, critic and reference, streamed", "adapters"])
def test_four_steps_with_a_killed_rank_train_every_group_once(run):
    producer, store = Producer(run), WeightStore(run)
    first = start(run)
    try:
        wait(lambda: store.newest() == 1, first, run)
        producer.put(1, 6)
        # steps 1, 2, 3: the checkpoint of step 2 was written beside step 3, and the version of step 3 is written beside nothing
        wait(lambda: len(trained(run)) == 6 and committed(run) == [2] and store.newest() == 4, first, run)
        assert first.poll() is None
        os.kill(ranks_of(first)[-1], signal.SIGKILL)
        first.wait(30)
        second = start(run)
        producer.put(4, 2)
        second.wait(90)
    finally:
        for p in (first, *([second] if "second" in locals() else [])):
            p.kill()
    assert second.returncode == 0, (run.path / "trainer.log").read_text()[-3000:]
    assert run.finished and trained(run) == {0: 1, 1: 1, 2: 2, 3: 2, 4: 3, 5: 3, 6: 4, 7: 4}
    steps = [store.manifest(v).step for v in store.versions()]
    assert steps[-3:] == [2, 3, 4] and store.manifest(5).encoding == "keyframe" and store.versions()[-1] == 7  # numbers never go back
    with h5py.File(run.log_path(1, "trainer", 0, 2), "r", locking=False) as f:
        t = f["tables/steps"]
        assert t["step"].tolist() == [3, 4] and t["unaccounted_tokens"].tolist() == [0, 0]
        assert (t["trajectories"].tolist(), t["leaves"].tolist(), t["reward_mean"].tolist()) == ([4, 4], [6, 6], [0.5, 0.5])  # each sample once
        assert np.isfinite(t["critic_loss"]).all() == np.isfinite(t["reference_kl_mean"]).all() == (run.config.algorithm.critic is not None)
        assert t["version"].tolist() == [5, 6] and t["staleness_max"].tolist() == [3 - 1, (6 - 5) + (4 - 3)]  # 5 has the weights of 3; 4 is undone
        assert t["published_version"].tolist() == [6, 7] and (t["published_s"] > 0).all()  # the last step too
        apart = f["tables/truth"]
        assert [apart[name].tolist() for name in ("step", "staleness", "tokens")] == [[3, 4], [2, 2], t["sampled_tokens"].tolist()]
    scratch = Path(load_site(run.config.cluster.site).scratch)
    assert not list(scratch.glob(f"miles-optimizer-{run.path.name}*"))


def test_files_of_state_that_waits_are_there_from_the_start_and_go_at_the_end_and_after_a_kill(tmp_path, model):
    """On a CPU nothing waits: the files are empty (test_device_memory.py has full ones)."""
    run = RunDir.create(config(tmp_path, model, "run.mode=sync", "run.steps=1", "cluster.placement=shared", "cluster.rollout.nodes=1", "cluster.rollout.gpus_per_node=2",
                               "trainer.paused_state=disk", f"trainer.optimizer.state_dir={tmp_path / 'state'}"))
    run.new_attempt()
    (tmp_path / "state").mkdir()
    producer, store = Producer(run), WeightStore(run)

    def there():
        return sorted(str(p.relative_to(folder_of(tmp_path / "state", run.path.name))) for p in (tmp_path / "state").rglob("*") if p.is_file())

    first = start(run)
    try:
        wait(lambda: store.newest() == 1, first, run)
        assert there() == ["e000001/rank_00000/paused", "e000001/rank_00001/paused"]
        os.kill(ranks_of(first)[-1], signal.SIGKILL)
        first.wait(30)
        assert len(there()) == 2
        write_ack(run, Ack(0, 1, 0, 1, "", released=1))  # the engine's turn is over: a trainer that starts may have its memory
        second = start(run)
        wait(lambda: store.newest() == 2, second, run)
        assert there() == ["e000002/rank_00000/paused", "e000002/rank_00001/paused"]
        producer.put(2, 2)
        write_ack(run, Ack(0, 1, 0, 2, "", released=2))
        second.wait(90)
    finally:
        for p in (first, *([second] if "second" in locals() else [])):
            p.kill()
    assert second.returncode == 0 and trained(run) == {0: 1, 1: 1}, (run.path / "trainer.log").read_text()[-3000:]
    assert list((tmp_path / "state").iterdir()) == []


def two_steps(run, producer) -> WeightStore:
    """Play a run of two steps through."""
    run.new_attempt()
    store, p = WeightStore(run), start(run)
    try:
        wait(lambda: store.newest() == 1, p, run)
        producer.put(1, 4)
        p.wait(90)
    finally:
        p.kill()
    assert p.returncode == 0, (run.path / "trainer.log").read_text()[-3000:]
    return store


def test_a_draft_layer_is_in_every_version_and_its_figures_in_the_log(tmp_path):
    folder = with_draft(make("glm4_moe", tmp_path / "plain"), tmp_path / "drafting")
    run = RunDir.create(config(tmp_path, folder, "run.steps=2", "trainer.mtp.lr=1e-2", "trainer.layout.ep=2"))
    store = two_steps(run, Producer(run, layers=1))
    own = {n for n in load_file(folder / "model.safetensors") if n.startswith("model.layers.2.")} - {f"model.layers.2.{n}" for n in SHARED_HEAD}
    before, after = store.manifest(1).tensors, store.manifest(3).tensors
    assert {n for n in before if n.startswith("model.layers.2.")} == own and before.keys() == after.keys()
    assert {n for n in own if before[n]["digest"] == after[n]["digest"]} == {"model.layers.2.mlp.gate.e_score_correction_bias"}
    with h5py.File(run.log_path(1, "trainer", 0, 1), "r", locking=False) as f:
        t = f["tables/steps"]
        assert (t["mtp_loss"] > 1).all() and (t["mtp_grad_norm"] > 0).all() and np.isfinite(t["mtp_agreement"]).all() and not t["skipped"].any()


def test_adapters_alone_are_published_and_a_checkpoint_has_them_in_the_format_of_peft(tmp_path, model):
    run = RunDir.create(config(tmp_path, model, "run.steps=2", "trainer.optimizer.lr=1e-2", *ADAPTERS))
    store = two_steps(run, Producer(run))
    follower, source = Follower(store), load_file(model / "model.safetensors")
    bases = {follower.advance(version).extra["adapters"]["base"] for version in (1, 2, 3)}
    assert bases == {combined_digest({n: digest(t) for n, t in source.items()})}
    factors = follower.state
    assert factors and all(n.endswith((".lora_A.weight", ".lora_B.weight")) for n in factors)
    merged = MergedModel(model).make(store.manifest(3).extra["adapters"], factors)
    assert {n for n, t in merged.items() if torch.equal(t, source[n])} == {n for n in source if "norm" in n or n.endswith(("embed_tokens.weight", "lm_head.weight", "mlp.gate.weight"))}

    folder = run.checkpoints_dir / "step_000002"
    assert json.loads((folder / "frontier.json").read_text())["adapters"] == store.manifest(3).extra["adapters"]
    described, tensors = json.loads((folder / "adapter_config.json").read_text()), load_file(folder / "adapter_model.safetensors")
    assert {"adapter_config.json", "adapter_model.safetensors"} <= json.loads((folder / "COMMIT").read_text())["files"].keys()
    assert (described["r"], described["lora_alpha"], described["base_model_name_or_path"]) == (4, 8.0, str(model))
    adapted = [n for n, t in merged.items() if not torch.equal(t, source[n])]
    assert sorted(described["target_modules"]) == sorted(n.removesuffix(".weight") for n in adapted) and len(tensors) == 2 * len(adapted)
    for name in adapted:  # as PEFT computes it
        a, b = (tensors[f"base_model.model.{name.removesuffix('weight')}lora_{x}.weight"] for x in "AB")
        torch.testing.assert_close(source[name] + 2 * b @ a, merged[name])
    with h5py.File(run.log_path(1, "trainer", 0, 1), "r", locking=False) as f:
        assert (f["tables/steps"]["published_bytes"] < 1.1 * sum(t.nbytes for t in factors.values()) + 20_000).all()


def test_a_trainer_of_an_older_epoch_ends_before_it_touches_anything(tmp_path, model):
    state = tmp_path / "state"
    run = RunDir.create(config(tmp_path, model, "trainer.optimizer.state='stream'", f"trainer.optimizer.state_dir={state}"))
    old, new = run.new_epoch("trainer"), run.new_epoch("trainer")
    living = claim(folder_of(state, run.path.name), new, 0)
    living.mkdir(parents=True)
    before = sorted(run.path.rglob("*"))
    with pytest.raises(StaleEpochError, match="trainer of epoch 1 tried to publish, the run is at epoch 2"):
        Trainer(run, SimpleNamespace(rank=0, size=2, leader=True), old, 1)
    assert living.exists() and sorted(run.path.rglob("*")) == before


def test_usr2_ends_in_a_checkpoint_and_exit_75(run):
    producer, store = Producer(run), WeightStore(run)
    p = start(run)
    try:
        wait(lambda: store.newest() == 1, p, run)
        producer.put(1, 2)
        wait(lambda: len(trained(run)) == 2, p, run)
        for pid in ranks_of(p):
            os.kill(pid, signal.SIGUSR2)
        assert p.wait(30) == 75, (run.path / "trainer.log").read_text()[-3000:]
    finally:
        p.kill()
    assert json.loads((run.checkpoints_dir / "step_000001" / "COMMIT").read_text())["step"] == 1
    with h5py.File(run.log_path(1, "trainer", 0, 1), "r", locking=False) as f:
        assert f["tables/steps"]["step"].tolist() == [1] and f["tables/steps"]["published_version"].tolist() == [store.newest()] == [2]


def test_a_damaged_checkpoint_is_passed_over_and_the_one_before_it_taken(tmp_path, model):
    run = RunDir.create(config(tmp_path, model, "run.steps=3", "checkpoint.every_steps=1"))
    run.new_attempt()
    producer, store = Producer(run), WeightStore(run)
    p = start(run)
    try:
        wait(lambda: store.newest() == 1, p, run)
        producer.put(1, 4)
        wait(lambda: committed(run) == [1, 2], p, run)  # of the second while it waits for groups
        frontier = json.loads((run.checkpoints_dir / "step_000002" / "frontier.json").read_text())
        os.kill(ranks_of(p)[0], signal.SIGKILL)
        p.wait(30)
        victim = next((run.checkpoints_dir / "step_000002").glob("__1_*.distcp"))
        data = bytearray(victim.read_bytes())
        data[len(data) // 2] ^= 1
        victim.write_bytes(data)
        (run.checkpoints_dir / ".step_000003.e000001.tmp").mkdir()  # half of one
        p = start(run)
        producer.put(3, 2)
        p.wait(90)
    finally:
        p.kill()
    log = (run.path / "trainer.log").read_text()
    assert p.returncode == 0 and f"step_000002 is passed over: {victim.name} differ from its COMMIT" in log, log[-3000:]
    assert trained(run) == {0: 1, 1: 1, 2: 2, 3: 2, 4: 3, 5: 3}
    steps = [store.manifest(v).step for v in store.versions()]
    assert steps[-3:] == [1, 2, 3] and store.versions()[-1] == 6  # versions 1, 2, 3 of the first life, then 4 on
    view = BufferView(run)
    view.poll()
    lineage = view.state.lineage
    assert lineage.branches == [(3, 2)] and (lineage.distance(4, 2), lineage.distance(4, 3), lineage.distance(6, 3)) == (0, 1, 3)
    assert (frontier["trained"], frontier["cursor"], frontier["version"], frontier["taken"], frontier["ready"]) == (4, 4, 3, [], [])
    assert committed(run) == [2, 3] and not list(run.checkpoints_dir.glob(".*"))
    assert [describe_file(run.checkpoints_dir / folder / victim.name)[1] == json.loads((run.checkpoints_dir / folder / "COMMIT").read_text())["files"][victim.name][1]
            for folder in ("step_000002", "damaged_step_000002")] == [True, False]  # written again when its step was trained again


@pytest.fixture
def leader():
    """A trainer whose step 7 has made a version that is on its way."""
    rows, publication = [], Future()
    log = SimpleNamespace(row=lambda table, **row: rows.append((table, row)))
    return SimpleNamespace(publication=publication, unlogged={"step": 7, "publish_s": 0.5}, log=log), rows


def test_a_step_is_logged_once_when_its_version_is_there(leader):
    trainer, rows = leader
    Trainer.settle(trainer, wait=False)
    assert rows == []
    threading.Timer(0.05, trainer.publication.set_result, (Published(8, "disk", 1000, 1.5, ""),)).start()
    Trainer.settle(trainer)
    Trainer.settle(trainer)
    published = {"published_version": 8, "transport": "disk", "published_bytes": 1000, "published_s": 1.5, "note": ""}
    assert rows == [("steps", {"step": 7, "publish_s": 0.5, **published})]


def test_the_other_ranks_wait_for_the_leaders_version_over_mpi_not_in_a_collective_with_a_time_limit(leader):
    trainer, rows = leader
    trainer.settle = lambda: Trainer.settle(trainer)
    trainer.publication.set_result(Published(8, "disk", 1000, 1.5, ""))
    for leads, said in ((True, b""), (False, None)):
        trainer.world = SimpleNamespace(leader=leads, broadcast_bytes=lambda data, said=said: rows.append(("told", data)))
        Trainer.settle_together(trainer)
    assert [row[0] for row in rows] == ["steps", "told", "told"] and [row[1] for row in rows[1:]] == [b"", None]


@pytest.mark.parametrize("published, version", [(True, 8), (False, 9)])
def test_a_checkpoint_names_the_version_of_its_weights_also_where_they_get_it_later(published, version):
    """On shared GPUs the checkpoint is begun before the weights are published, and what was published last are those before the step."""
    begun = []
    trainer = SimpleNamespace(
        queue=SimpleNamespace(state=BufferState()), publisher=SimpleNamespace(version=8), step=7, epoch=1, frozen=None, model=None, optimizer=None, critic=None,
        dir=SimpleNamespace(current_epoch=lambda role: 2), commit_checkpoint=lambda wait: None, checkpoints=SimpleNamespace(begin=lambda *a: begun.append(a)))
    Trainer.checkpoint(trainer, due=True, wait=False, published=published)
    assert [(step, frontier.step, frontier.version) for step, *_, frontier in begun] == [(7, 7, version)]


@pytest.mark.parametrize("wait", [True, False])
def test_a_step_whose_version_failed_is_not_logged_and_ends_the_trainer(leader, wait):
    trainer, rows = leader
    trainer.publication.set_exception(EnvironmentFault("full"))
    with pytest.raises(EnvironmentFault, match="full"):
        Trainer.settle(trainer, wait=wait)
    assert rows == []


def test_a_trainer_does_not_end_in_the_middle_of_removing_old_versions(leader, monkeypatch):
    """Its process leaves without waiting for threads."""
    trainer, rows = leader
    trainer.publisher, trainer.state_dir, trainer.feed = SimpleNamespace(settle=lambda: rows.append("removed")), None, SimpleNamespace(close=lambda: None)
    trainer.log.close = lambda: rows.append("log closed")
    monkeypatch.setattr("miles.trainer.loop.dist.barrier", lambda: None)
    monkeypatch.setattr("miles.trainer.loop.close_distributed", lambda: rows.append("left"))
    assert Trainer.close(trainer, 75) == 75 and rows == ["removed", "log closed", "left"]
