"""`python -m miles.models CONFIG.toml`: make the model folder that a run config asks for."""

import sys

from miles.config import load_config
from miles.core import MilesError
from miles.models.prepare import prepare


def main(argv: list[str]) -> int:
    if len(argv) != 1:
        print("usage: python -m miles.models CONFIG.toml", file=sys.stderr)
        return 2
    try:
        print(prepare(load_config(argv[0])))
    except MilesError as e:
        print(e, file=sys.stderr)
        return e.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
