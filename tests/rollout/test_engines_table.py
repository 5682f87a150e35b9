"""Which engines the sessions of a rank may use, as the leader tells it."""

import json

from miles.config import load_config
from miles.log import RunLog
from miles.rollout.worker import Worker
from miles.rundir import RunDir
from tests.engine.tiny import make_tokenizer
from tests.session.conftest import SHAPE_CONFIG


def row(url, version=3, active=0):
    return {"url": url, "version": version, "active": active}


def test_engines_of_other_ranks_come_go_and_come_back(tmp_path):
    make_tokenizer(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": "qwen3_moe", **SHAPE_CONFIG}))
    run = RunDir.create(load_config("configs/tiny_async.toml", (f"run.root={tmp_path}", f"model.path={tmp_path / 'model'}")))
    log = RunLog(tmp_path / "rank.h5")
    worker = Worker(run, 0, run.new_epoch("rollout"), run.new_attempt(), {}, log, lambda _: None)
    worker.engines({0: row("http://own"), 1: row("http://a"), 2: row("http://b", active=4)})
    assert worker._engines.living(0) is None, "its own engine it knows better"
    first = worker._engines.living(1)
    assert (first.client.url, first.client.version) == ("http://a", 3) and worker._engines.place().engine is first
    # a session lost its connection and no answer came in time, but the engine lives: it is offered again
    worker._engines.down(1)
    worker.engines({1: row("http://a", version=4), 2: row("http://b")})
    again = worker._engines.living(1)
    assert again is not first and again.client is first.client and again.client.version == 4 and not first.alive
    # started again at another address, and gone
    worker.engines({1: row("http://c")})
    assert worker._engines.living(1).client.url == "http://c" and worker._engines.living(2) is None
    worker._service.store.close()
    log.close()
