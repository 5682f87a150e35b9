#!/usr/bin/env -S sh -c 'exec "$(dirname "$0")/../../.venv/bin/python" "$0" "$@"'
"""New weights of a real model in real engines: a disk patch against a full checkpoint: tools/bench/sync.py [--quick] [--json].

A Llama of the size of SmolLM2-135M (random bf16 weights made here, 269 MB), two SGLang servers on this machine that generate all the time, their two ranks and
the trainer's publisher in this process (--quick: one server, 10 of the 30 layers). In one run, in turns, medians:

disk patch      from "the optimizer step is done, the new weights are in the trainer's memory" to "every engine serves the new version and has acknowledged it":
                encode, write, sync, read, verify, pause, apply, verify, resume. 1.5 % of the elements moved by one unit in the last place: what Adam at a
                learning rate of 1e-6 does to bf16 weights in tools/bench/weights.py
full reload     the same span, for a checkpoint that is written whole with safetensors, synced, and loaded by all engines at once; nothing is verified
pause           how long an engine of the disk patch stands still, of that span: from the request to pause until it goes on
keyframe        the same span for the first version, which engines load whole and verify
limits          at the rate of a copy here: each engine's weights, and the trainer's old and new ones, read once; for the pause, the cache lines of one engine's
                weights in which an element moved, read and written once; for a keyframe, the trainer's weights read and written, and each engine's too

Exit status 1 where a target is missed. Most of a --quick run is the start of the engine.
"""

import argparse
import asyncio
import contextlib
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from miles.config import load_config
from miles.engine import EngineClient, EngineProcess, Sampling
from miles.rollout.weights import EngineWeights
from miles.rundir import RunDir
from miles.weights.publish import Publisher
from miles.weights.store import WeightStore
from miles.weights.turns import EngineTurns
from tools.bench.table import figure, tell
from tools.bench.weights import copy_rates, moved

DENSITY = 0.015
CACHE_LINE = 64  # bytes
SHAPE = {"hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64, "intermediate_size": 1536,
         "vocab_size": 49152, "max_position_embeddings": 2048, "tie_word_embeddings": True}


def make_model(folder: Path, layers: int) -> Path:
    import transformers

    from tests.engine.tiny import make_tokenizer

    tokenizer = make_tokenizer(folder)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SHAPE, num_hidden_layers=layers, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, bos_token_id=None)
    transformers.LlamaForCausalLM(config).bfloat16().save_pretrained(folder)
    return folder


class Rows:
    """A log in memory."""

    def __init__(self):
        self.rows: list[dict] = []

    def row(self, table: str, **values) -> None:
        self.rows.append({"table": table, **values})


async def generate_on(client: EngineClient, number: int) -> None:
    """One request after the other, for ever."""
    prompt = np.random.default_rng(number).integers(10, 380, 64).astype(np.int32)
    while True:
        await client.generate("r", prompt, Sampling(32, ignore_eos=True), routing_key=f"k{number}", deadline_s=600)


def trained(state: dict[str, torch.Tensor], seed: int) -> dict[str, torch.Tensor]:
    return {n: moved(t.view(-1), DENSITY, 1000 * seed + i).view(t.shape) for i, (n, t) in enumerate(state.items())}


async def by_patch(publisher: Publisher, ranks: list[EngineWeights], step: int, state: dict[str, torch.Tensor]) -> dict[str, float]:
    for rank in ranks:
        rank._log.rows.clear()
    start = time.perf_counter()
    await asyncio.to_thread(publisher.publish, step, state.items())
    published = time.perf_counter()
    assert all(await asyncio.gather(*(rank.follow() for rank in ranks)))
    total = time.perf_counter() - start
    rows = [rank._log.rows[0] for rank in ranks]
    return {"total": total, "publish": published - start, **{k: max(r[k] for r in rows) for k in ("pull_s", "pause_s", "apply_s", "verify_s")}}


async def by_checkpoint(clients: list[EngineClient], folder: Path, state: dict[str, torch.Tensor]) -> float:
    """The weights that are served, written whole and loaded again."""
    start = time.perf_counter()

    def write() -> None:
        save_file(state, folder / ".writing", {"format": "pt"})
        with open(folder / ".writing", "rb") as f:
            os.fsync(f.fileno())
        os.rename(folder / ".writing", folder / "model.safetensors")

    async def reload(client: EngineClient) -> None:
        await client.pause("in_place")
        await client.update_from_folder(folder, client.version)
        await client.resume()

    await asyncio.to_thread(write)
    await asyncio.gather(*(reload(client) for client in clients))
    return time.perf_counter() - start


async def measure(scratch: Path, engines: int, layers: int, times: int) -> list[dict]:
    model = make_model(scratch / "model", layers)
    run = RunDir.create(load_config(ROOT / "configs/tiny_async.toml", (
        f"run.root={scratch}", f"model.path={model}", "model.recipe=none", "model.trainer_precision=bf16", "model.rollout_precision=bf16",
        "weights.transport=disk", "weights.keyframe_every=1000", "engine.port_base=37600", "engine.start_timeout_s=300",
        f"cluster.site={ROOT / 'configs/sites/dev.toml'}")))
    (scratch / "checkpoint").mkdir()
    state = load_file(model / "model.safetensors")
    processes = [EngineProcess(run.config, rank=r, log_path=scratch / f"engine-{r}.log", token_file=run.token_file, platform="cpu") for r in range(engines)]
    clients, ranks, load, epoch = [], [], [], run.new_epoch("rollout")
    try:
        for r, url in enumerate(await asyncio.gather(*(p.start() for p in processes))):
            clients.append(EngineClient(url, run.token, model, max_context=2048))
            ranks.append(EngineWeights(run, r, epoch, 0, clients[r], Rows(), EngineTurns(run, r, epoch), None))
        publisher = Publisher(run, run.new_epoch("trainer"), WeightStore(run), lambda: None, lambda s: "", checksum_of={"dtype": "bfloat16", "tied": True})
        keyframe = await by_patch(publisher, ranks, 0, {n: t.clone() for n, t in state.items()})
        load = [asyncio.create_task(generate_on(client, i)) for i, client in enumerate(clients)]
        patches, full = [], []
        for step in range(1, times + 2):  # the first of each touches memory and compiles
            state = trained(state, step)
            patches.append(await by_patch(publisher, ranks, step, state))
            full.append(await by_checkpoint(clients, scratch / "checkpoint", state))
    finally:
        for task in load:
            task.cancel()
        await asyncio.gather(*load, return_exceptions=True)
        for rank in ranks:
            rank.close()
        for client in clients:
            await client.close()
        await asyncio.gather(*(p.stop() for p in processes))
    size = sum(t.nbytes for t in state.values())
    return figures(engines, keyframe, patches[1:], statistics.median(full[1:]), size / copy_rates(state["model.embed_tokens.weight"])[0])


def figures(engines: int, keyframe: dict, patches: list[dict], full: float, once: float) -> list[dict]:
    """`once`: seconds of reading the model once."""
    seconds = {k: statistics.median(p[k] for p in patches) for k in patches[0]}
    share = statistics.median(p["pause_s"] / p["total"] for p in patches)
    limit, lines = (engines + 2) * once, 1 - (1 - DENSITY) ** (CACHE_LINE // 2)  # of bf16 elements
    return [
        figure("step done to all engines serving, disk patch", "s", seconds["total"], full, limit, encode_write_sync_s=seconds["publish"],
               **{f"slower_engine_{k}": seconds[k] for k in ("pull_s", "pause_s", "apply_s", "verify_s")}),
        figure("full checkpoint and reload over disk patch", "x", full / seconds["total"], 1.0, full / limit, least=5.0),
        figure("pause of an engine, of that time", "", share, None, 2 * lines * once / seconds["total"], most=0.1),
        figure("step done to all engines serving, keyframe", "s", keyframe["total"], full, 2 * (1 + engines) * once),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one engine instead of two, 10 layers instead of 30, two updates of each kind instead of nine")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    engines, layers, times = (1, 10, 2) if args.quick else (2, 30, 9)
    with tempfile.TemporaryDirectory(prefix="miles-bench-sync-") as scratch, contextlib.redirect_stdout(sys.stderr):
        found = asyncio.run(measure(Path(scratch), engines, layers, times))
    return tell("sync", found, args.json, engines=engines, layers=layers, moved=DENSITY)


if __name__ == "__main__":
    sys.exit(main())
