"""`publisher_program.py RUN`: a trainer that publishes what it has and goes on to change it, for ever, until it is killed. Each version begun is a line."""

import sys

import torch

from miles.rundir import RunDir
from miles.weights.digest import bits
from miles.weights.publish import Publisher
from miles.weights.store import WeightStore


def parameters():
    g = torch.Generator().manual_seed(3)
    return {"a": torch.randn(700, 300, generator=g).bfloat16(), "b": torch.randn(3000, generator=g)}


def step_of_training(held):
    """Changes every 50th element, in place, as an optimizer does."""
    for t in held.values():
        bits(t)[::50] += 1


def gathered(held):
    """As export_hf does: copies, one at a time."""
    return ((n, t.clone()) for n, t in held.items())


def main() -> None:
    run = RunDir(sys.argv[1])
    publisher = Publisher(run, run.current_epoch("trainer"), WeightStore(run), lambda: None, lambda state: "")
    held, step = parameters(), 0
    while True:
        publisher.begin(step, gathered(held))
        print(publisher.version, flush=True)
        step_of_training(held)
        step += 1


if __name__ == "__main__":
    main()
