import re
import shutil
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

import pytest
import torch

from miles.config import load_config
from miles.core import EnvironmentFault
from miles.rundir import RunDir
from miles.weights import parallel, publish
from miles.weights.acks import Ack, write_ack
from miles.weights.p2p.filled import Filled
from miles.weights.parallel import thread_count
from miles.weights.publish import NOT_SERVED, Publisher
from miles.weights.store import WeightStore


HOW = {"dtype": "float32", "tied": False}


def state(seed):
    g = torch.Generator().manual_seed(seed)
    return {"a": torch.randn(8, 4, generator=g), "b": torch.randn(3, generator=g).bfloat16()}


def make(tmp_path, transport, **kw):
    run = RunDir.create(load_config("configs/tiny_async.toml", (f"run.root={tmp_path}", f"weights.transport={transport}", "weights.keyframe_every=3",
                                                                *(f"{k}={v}" for k, v in kw.items()))))
    wakes = []
    return run, wakes, Publisher(run, run.new_epoch("trainer"), WeightStore(run), lambda: wakes.append(1), lambda s: "sum", checksum_of=HOW)


def test_disk_writes_a_keyframe_first_then_deltas_then_a_keyframe_again(tmp_path):
    run, wakes, p = make(tmp_path, "disk")
    for step in range(5):
        p.publish(step, state(step).items())
    store = WeightStore(run)
    assert [store.manifest(v).encoding for v in store.versions()] == ["keyframe", "delta", "delta", "keyframe", "delta"]
    assert [store.manifest(v).base for v in store.versions()] == [None, 1, 2, None, 4]
    assert store.manifest(5).extra == {"checksum_of": HOW} and len(wakes) == 5


def test_beside_the_state_that_is_held_there_are_a_few_tensors_at_a_time(tmp_path, monkeypatch):
    """Keyframe, delta, delta: 40 tensors each, of which the publisher holds one set. Here each is a thread's task of its own."""
    monkeypatch.setattr(parallel, "BATCH_BYTES", 2000)
    _, _, p = make(tmp_path, "disk")
    most = []

    def tensors(step):
        living = []
        for i in range(40):
            tensor = torch.full((1000,), float(step), dtype=torch.bfloat16)
            living.append(weakref.ref(tensor.untyped_storage()))
            yield f"t{i}", tensor
            del tensor
            most[-1] = max(most[-1], sum(r() is not None for r in living))

    for step in range(3):
        most.append(0)
        p.publish(step, tensors(step))
    assert most[0] == 40 and max(most[1:]) <= thread_count() + 5
    assert {t[0].item() for t in p._state.values()} == {2.0} and len(p._state) == 40


def test_a_publication_that_fails_is_followed_by_a_keyframe(tmp_path):
    """What is held is neither the old nor the new state then."""
    run, _, p = make(tmp_path, "disk")
    p.publish(0, state(0).items())

    def broken():
        yield "a", state(1)["a"]
        raise OSError("a rank is gone")

    with pytest.raises(OSError):
        p.publish(1, broken())
    assert WeightStore(run).versions() == [1]
    p.publish(1, state(1).items())
    assert WeightStore(run).manifest(2).encoding == "keyframe"


def test_a_restarted_trainer_goes_on_counting_and_starts_with_a_keyframe(tmp_path):
    run, _, p = make(tmp_path, "disk")
    p.publish(0, state(0).items())
    p.publish(1, state(1).items())
    again = Publisher(run, run.new_epoch("trainer"), WeightStore(run), lambda: None, lambda s: "")
    assert again.publish(0, state(0).items()).version == 3
    assert WeightStore(run).manifest(3).encoding == "keyframe"


def test_broadcast_falls_back_to_a_keyframe_while_an_engine_is_missing_and_says_so(tmp_path):
    run, _, p = make(tmp_path, "broadcast")
    run.new_epoch("rollout")
    first = p.publish(0, state(0).items())
    assert (first.transport, first.note) == ("disk", "an engine does not serve the version before")
    write_ack(run, Ack(0, 1, 0, 1, "sum"))
    assert p.publish(1, state(1).items()).transport == "disk"
    assert WeightStore(run).manifest(2).encoding == "keyframe"


@pytest.mark.engine
def test_broadcast_reaches_sglangs_end_of_the_group_and_a_late_engine_gets_a_keyframe(tmp_path):
    run, _, p = make(tmp_path, "broadcast", **{"weights.ack_timeout_s": 150})
    epoch = run.new_epoch("rollout")
    p.publish(0, state(0).items())
    for rank in (0, 1):
        write_ack(run, Ack(rank, epoch, 0, 1, "sum"))
    program = Path(__file__).with_name("engine_end.py")
    ends = [subprocess.Popen([sys.executable, str(program), str(run.path), str(r)], stdout=subprocess.PIPE, text=True) for r in (0, 1)]
    try:
        sent = p.publish(1, state(1).items())
        assert (sent.version, sent.transport, sent.bytes) == (2, "broadcast", 8 * 4 * 4 + 3 * 2)
        assert [e.communicate(timeout=60)[0] for e in ends] == ["received 2\n"] * 2
    finally:
        for e in ends:
            e.kill()
    for rank in (0, 1):
        write_ack(run, Ack(rank, epoch, 0, 2, "sum"))
    assert p.serve_late() is None
    write_ack(run, Ack(1, epoch, 1, -1, ""))  # engine 1 has restarted and has nothing
    late = p.serve_late()
    assert (late.version, late.note, WeightStore(run).manifest(3).encoding, WeightStore(run).manifest(3).step) == (3, "a late engine", "keyframe", 1)


def test_a_broadcast_that_nobody_joins_goes_out_by_disk_under_a_new_number(tmp_path):
    run, _, p = make(tmp_path, "broadcast", **{"weights.ack_timeout_s": 1})
    epoch = run.new_epoch("rollout")
    p.publish(0, state(0).items())
    for rank in (0, 1):
        write_ack(run, Ack(rank, epoch, 0, 1, "sum"))
    sent = p.publish(1, state(1).items())
    assert (sent.version, sent.transport) == (3, "disk") and "not all 2 engines joined" in sent.note


FILLED = Filled("1.1", 1, ("d0", "d1"), {"a": {"shape": [2], "dtype": "float32", "digest": "x"}}, 16)


def served(run, version, rollout=1, error=""):
    for rank in (0, 1):
        write_ack(run, Ack(rank, rollout, 0, version, "sum", error))


def test_ranks_can_be_filled_when_all_of_them_serve_the_version_before(tmp_path):
    run, _, p = make(tmp_path, "p2p")
    epoch = run.new_epoch("rollout")
    assert p.fillable() is None
    first = p.publish(0, state(0).items())
    assert (first.transport, first.note) == ("disk", NOT_SERVED)
    served(run, 1)
    assert p.fillable() == epoch
    write_ack(run, Ack(1, epoch, 1, -1, ""))
    assert p.fillable() is None


def test_what_ranks_were_filled_with_becomes_a_version_and_the_gathered_state_is_let_go(tmp_path):
    run, wakes, p = make(tmp_path, "p2p")
    run.new_epoch("rollout")
    p.publish(0, state(0).items())
    sent = p.publish_filled(1, FILLED, 2.5).result()
    assert (sent.version, sent.transport, sent.bytes, sent.note) == (2, "p2p", 16, "") and sent.seconds >= 2.5 and len(wakes) == 2 and p._state is None
    m = WeightStore(run).manifest(2)
    assert (m.encoding, m.base, m.step, m.extra) == ("p2p", 1, 1, {"p2p": {"link": "1.1", "serial": 1, "receivers": ["d0", "d1"]},
                                                                   "checksum_of": HOW})
    assert WeightStore(run).chain(2, 1) is None


def test_a_version_that_was_not_filled_goes_by_broadcast_and_when_nobody_joins_by_disk_and_says_all_of_it(tmp_path):
    run, _, p = make(tmp_path, "p2p", **{"weights.ack_timeout_s": 1})
    run.new_epoch("rollout")
    p.publish(0, state(0).items())
    p.publish_filled(1, FILLED, 0.0)
    served(run, 2)
    sent = p.publish(2, state(1).items(), note="receiver 1: no room")
    assert (sent.version, sent.transport) == (4, "disk") and sent.note.startswith("receiver 1: no room; ") and "not all 2 engines joined" in sent.note
    assert WeightStore(run).manifest(4).encoding == "keyframe"


@pytest.mark.parametrize(("rollout", "version", "error", "late"), [
    (1, 2, "", False),
    (1, -1, "", False),  # it loads what its rank was filled with
    (1, -1, "digest", True),  # and that went wrong
    (2, -1, "", True),  # ranks of another epoch were filled with nothing
])
def test_whether_an_engine_waits_for_a_keyframe(tmp_path, rollout, version, error, late):
    run, _, p = make(tmp_path, "p2p")
    run.new_epoch("rollout")
    p.publish(0, state(0).items())
    p.publish_filled(1, FILLED, 0.0)
    for _ in range(rollout - 1):
        run.new_epoch("rollout")
    served(run, version, rollout, error)
    assert p.late() is late and p.serve_late() is None  # nobody holds the weights whole
    if late:
        p.publish(1, state(1).items(), note="a late engine")
        assert not p.late() and WeightStore(run).manifest(3).encoding == "keyframe"


def test_what_is_held_is_published_again_whole(tmp_path):
    run, _, p = make(tmp_path, "disk")
    p.publish(0, state(0).items())
    again = p.again("the batch is not complete")
    m = WeightStore(run).manifest(2)
    assert (again.version, again.note, m.encoding, sorted(m.tensors)) == (2, "the batch is not complete", "keyframe", ["a", "b"])
    p.publish(1, state(1).items())
    assert WeightStore(run).manifest(3).encoding == "delta"


def refuse(run, version, *ranks, serving=1):
    for rank in (0, 1):
        error, refused = ("another digest", version) if rank in ranks else ("", -1)
        write_ack(run, Ack(rank, run.current_epoch("rollout"), 0, serving, "sum", error, refused=refused))


@pytest.mark.parametrize("transport", ["disk", "broadcast", "p2p", "auto"])
def test_what_a_rank_refuses_is_published_again_whole(tmp_path, transport):
    run, _, p = make(tmp_path, transport)
    run.new_epoch("rollout")
    p.publish(0, state(0).items())
    refuse(run, 1, 1, serving=-1)
    assert p.late() and p.serve_late().version == 2 and not p.late()  # until a rank refuses that one
    assert WeightStore(run).manifest(2).encoding == "keyframe"
    refuse(run, 1, 1)
    assert not p.late()


def test_what_a_rank_refuses_is_not_the_base_of_a_delta(tmp_path):
    run, _, p = make(tmp_path, "disk")
    run.new_epoch("rollout")
    p.publish(0, state(0).items())
    p.publish(1, state(1).items())
    refuse(run, 2, 0)
    p.publish(2, state(2).items())
    assert [WeightStore(run).manifest(v).encoding for v in (2, 3)] == ["delta", "keyframe"]


def test_a_rank_that_refuses_everything_gets_no_more_keyframes_of_its_own_until_it_has_served_one_and_that_is_said_once(tmp_path, capsys):
    run, _, p = make(tmp_path, "disk", **{"weights.keyframe_every": 100})
    run.new_epoch("rollout")
    p.publish(0, state(0).items())
    for version in (1, 2, 3, 4):
        refuse(run, version, 1)
        assert (p.serve_late() is not None) == (version < 4)
    p.publish(1, state(1).items())
    p.publish(2, state(2).items())
    refuse(run, 6, 1)
    assert p.version == 6 and WeightStore(run).manifest(6).encoding == "delta" and not p.late()
    said = capsys.readouterr().out
    assert said.count("the run goes on without its engine") == 1 and "rank 1 refuses v4, as it did the 3 keyframes before: another digest" in said
    refuse(run, 6, 0, 1)  # another for the first time
    assert p.serve_late().version == 7
    served(run, 7)
    assert not p.late()
    refuse(run, 7, 1)
    assert p.serve_late().version == 8


def test_when_every_rank_refuses_everything_the_run_ends_with_what_they_say(tmp_path):
    run, _, p = make(tmp_path, "disk")
    run.new_epoch("rollout")
    p.publish(0, state(0).items())
    for version in (1, 2, 3):
        refuse(run, version, 0, 1)
        p.serve_late()
    refuse(run, 4, 0, 1)
    with pytest.raises(EnvironmentFault, match="every rank refuses v4, as it did the 3 keyframes before; rank 0: another digest"):
        p.serve_late()


def test_a_version_whose_folder_is_gone_is_published_again(tmp_path):
    run, _, p = make(tmp_path, "disk")
    run.new_epoch("rollout")
    p.publish(0, state(0).items())
    shutil.rmtree(run.weights_dir / "v000001")
    assert p.serve_late().version == 2 and not p.late()


@pytest.mark.parametrize("harm", [lambda path: path.write_bytes(b"{}"), lambda path: path.unlink()])
def test_a_damaged_or_lost_manifest_of_the_newest_version_is_nothing_to_the_trainer_that_published_it(tmp_path, harm):
    run, _, p = make(tmp_path, "p2p")
    run.new_epoch("rollout")
    p.publish(0, state(0).items())
    p.publish_filled(1, FILLED, 0.0)
    served(run, 2)
    harm(run.weights_dir / "v000002" / "MANIFEST.json")
    assert not p.late()
    served(run, -1, error="digest")
    assert p.late()


class Serving(threading.Thread):
    """Engines that serve a version so many seconds after it was published, by its encoding; others never."""

    def __init__(self, run, seconds):
        super().__init__(daemon=True)
        self.run_dir, self.seconds, self.store = run, seconds, WeightStore(run)
        self.ended = threading.Event()

    def run(self):
        have = 0
        while not self.ended.wait(0.01):
            newest = self.store.newest() or 0
            if newest > have and (seconds := self.seconds.get(self.store.manifest(newest).encoding)):
                time.sleep(seconds)
                served(self.run_dir, newest)
                have = newest


def test_auto_measures_until_every_engine_serves_keeps_the_fastest_and_says_so(tmp_path, monkeypatch):
    def nobody(*_):
        raise EnvironmentFault("no engine joined")  # at once; how long that takes is another test's

    monkeypatch.setattr(publish, "BroadcastGroup", nobody)
    run, _, p = make(tmp_path, "auto")
    run.new_epoch("rollout")
    engines = Serving(run, {"keyframe": 1.0, "delta": 1.0, "p2p": 0.01})
    engines.start()
    try:
        sent = [p.publish(0, state(0).items())]  # nobody serves anything yet: no trial
        for step in range(1, 7):
            while not p._all_serve(p._acks()):
                time.sleep(0.01)
            sent.append(p.publish_filled(step, FILLED, 0.0).result() if p.fillable() else p.publish(step, state(step).items()))
    finally:
        engines.ended.set()
        engines.join()
    notes = [re.sub(r"[0-9.]+ s", "T s", s.note) for s in sent]
    assert notes[:3] == ["", "auto: disk T s", "auto: disk T s"] and notes[3] == "no engine joined; auto: broadcast failed"
    assert notes[4:] == ["auto: p2p T s", "auto: p2p T s; from now on p2p", ""]
    assert [s.transport for s in sent] == ["disk", "disk", "disk", "disk", "p2p", "p2p", "p2p"]
    assert [WeightStore(run).manifest(s.version).encoding for s in sent] == ["keyframe", "delta", "delta", "keyframe", "p2p", "p2p", "p2p"]
