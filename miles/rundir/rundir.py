"""`RunDir`: every path of a run, its frozen config, attempts and fenced epochs.

    RUN/run.toml                      resolved config, frozen
    RUN/token                         the run's bearer token, mode 0600
    RUN/epochs/<role>                 current epoch of a role; older writers are fenced
    RUN/attempts/0001/                one per start of the job: attempt.json, exit.json, rank logs, logs/*.h5
    RUN/buffer/                       see miles.buffer
    RUN/weights/v000012/              see miles.weights
    RUN/checkpoints/step_000040/      COMMIT last
    RUN/sessions/                     see miles.session.store
    RUN/pools/0001/                   see miles.rundir.pooldir
    RUN/FINISHED                      written by the trainer leader after the last step
"""

from __future__ import annotations

import os
import secrets
import time
import tomllib
from pathlib import Path

from miles.config import MilesConfig, dump_config
from miles.core import ConfigError, EnvironmentFault, Role, StaleEpochError
from miles.rundir.publish import explain_os_errors, publish_bytes


class RunDir:
    """Handle of one run directory. Cheap to create; holds no open file."""

    pool = 0  # of the rollout ranks that work through this handle: 0 = the run's own job
    first_rank = 0  # number of the first of them

    def __init__(self, path: str | Path):
        self.path = Path(path).absolute()
        toml = self.path / "run.toml"
        if not toml.is_file():
            raise ConfigError(f"{self.path} is not a run directory (no run.toml)", "a folder made by `miles-submit submit` or `local`", "check the path")
        try:
            self.config = MilesConfig.model_validate(tomllib.loads(toml.read_text()))
        except ValueError as e:  # of TOML, of UTF-8 or of the schema
            raise ConfigError(f"{toml} is damaged, or of another version of Miles: {e}", "the file as it was written when the run was made",
                              "restore it: all that the run has done depends on it") from e

    @classmethod
    def create(cls, config: MilesConfig, *, now: float | None = None) -> RunDir:
        """Make ROOT/NAME-UTCTIME with run.toml and token, and point ROOT/latest at it."""
        root = Path(config.run.root).absolute()
        with explain_os_errors(root):
            root.mkdir(parents=True, exist_ok=True)
        stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(now))
        for suffix in ("", *(f"-{i}" for i in range(2, 100))):  # two runs may start within one second
            path = root / f"{config.run.name}-{stamp}{suffix}"
            try:
                path.mkdir()
                break
            except FileExistsError:
                continue
        else:
            raise EnvironmentFault(f"a hundred runs named {config.run.name}-{stamp} exist", "a new run directory", "choose another run.name")
        for sub in ("epochs", "attempts", "buffer/groups", "buffer/parts", "buffer/journal", "weights", "checkpoints", "acks", "sessions", "pools"):
            (path / sub).mkdir(parents=True)
        publish_bytes(path / "token", secrets.token_hex(32).encode(), mode=0o600)
        publish_bytes(path / "run.toml", dump_config(config).encode())
        link = root / f".latest.{os.getpid()}"
        link.unlink(missing_ok=True)
        link.symlink_to(path.name)
        os.replace(link, root / "latest")
        return cls(path)

    # -- paths ---------------------------------------------------------------------------------------------------------------
    @property
    def buffer_dir(self) -> Path:
        return self.path / "buffer"

    @property
    def weights_dir(self) -> Path:
        return self.path / "weights"

    @property
    def checkpoints_dir(self) -> Path:
        return self.path / "checkpoints"

    @property
    def acks_dir(self) -> Path:
        return self.path / "acks"

    @property
    def sessions_dir(self) -> Path:
        return self.path / "sessions"

    @property
    def pools_dir(self) -> Path:
        return self.path / "pools"

    def pool_dir(self, pool: int) -> Path:
        return self.pools_dir / f"{pool:04d}"

    def pool_epoch_dir(self, pool: int, epoch: int) -> Path:
        return self.pool_dir(pool) / f"e{epoch:04d}"

    @property
    def token_file(self) -> Path:
        return self.path / "token"

    @property
    def token(self) -> str:
        try:
            return self.token_file.read_text().strip()
        except FileNotFoundError:
            raise EnvironmentFault(f"no {self.token_file}", "the bearer token of this run",
                                   "make another: any secret word in a file of mode 0600; clients outside need the new one") from None

    def attempt_dir(self, attempt: int) -> Path:
        return self.path / "attempts" / f"{attempt:04d}"

    def log_path(self, attempt: int, role: Role | str, rank: int, epoch: int) -> Path:
        return self.attempt_dir(attempt) / "logs" / f"{Role(role).value}-{rank}.e{epoch:04d}.h5"

    # -- attempts and epochs -------------------------------------------------------------------------------------------------
    def attempts(self) -> list[int]:
        return sorted(int(p.name) for p in (self.path / "attempts").iterdir() if p.name.isdigit())

    def new_attempt(self) -> int:
        """Allocate the next attempt folder. Exclusive: two starts never get the same number."""
        n = max(self.attempts(), default=0) + 1
        with explain_os_errors(self.attempt_dir(n)):
            while True:
                try:
                    self.attempt_dir(n).mkdir()
                except FileExistsError:
                    n += 1
                    continue
                (self.attempt_dir(n) / "logs").mkdir()
                return n

    def current_epoch(self, role: Role | str) -> int:
        """Newest epoch of a role, 0 before its first start."""
        path = self.path / "epochs" / Role(role).value
        try:
            return int(path.read_text())
        except FileNotFoundError:
            return 0
        except ValueError:
            raise EnvironmentFault(f"{path} is damaged", "one number", "remove it and resume the run: the next epoch is then counted from the journals") from None

    def new_epoch(self, role: Role | str) -> int:
        """Raise the role's epoch, which fences every older process of that role. Called by the supervisor alone.

        No number comes twice, also when the file was lost: the journals' names have those that were used.
        """
        used = [int(p.name.split(".")[1][1:]) for p in (self.buffer_dir / "journal").glob(f"{Role(role).value}.e*.log")]
        epoch = max(self.current_epoch(role), *used, 0) + 1
        publish_bytes(self.path / "epochs" / Role(role).value, f"{epoch}\n".encode())
        return epoch

    def check_epoch(self, role: Role | str, epoch: int) -> None:
        """Raise StaleEpochError when `epoch` is not the role's current one. Called before every publish."""
        current = self.current_epoch(role)
        if current != epoch:
            raise StaleEpochError(f"{Role(role).value} of epoch {epoch} tried to publish, the run is at epoch {current}",
                                  "one living epoch per role", "nothing: a newer process has taken over, this one ends")

    def pools(self) -> list[int]:
        """Numbers of the pools that were ever attached."""
        return sorted(int(p.parent.name) for p in self.pools_dir.glob("[0-9]*/pool.json"))

    def next_pool(self) -> int:
        return max(self.pools(), default=0) + 1

    def pool_epoch(self, pool: int) -> int:
        """Newest epoch of a pool (0: the rollout role itself), 0 before its first start."""
        if pool == 0:
            return self.current_epoch(Role.ROLLOUT)
        return max((int(p.name[1:]) for p in self.pool_dir(pool).glob("e[0-9]*")), default=0)

    # -- the end -------------------------------------------------------------------------------------------------------------
    @property
    def finished(self) -> bool:
        return (self.path / "FINISHED").exists()

    def finish(self, note: str) -> None:
        publish_bytes(self.path / "FINISHED", note.encode())

    def differences(self, other: MilesConfig) -> list[str]:
        """Fields in which `other` differs from the frozen config, as `section.key: frozen -> other`."""
        return _diff(self.config.model_dump(mode="json"), other.model_dump(mode="json"), "")


def _diff(a: dict, b: dict, prefix: str) -> list[str]:
    out = []
    for key in sorted(a.keys() | b.keys()):
        x, y = a.get(key), b.get(key)
        if isinstance(x, dict) and isinstance(y, dict):
            out += _diff(x, y, f"{prefix}{key}.")
        elif x != y:
            out.append(f"{prefix}{key}: {x!r} -> {y!r}")
    return out
