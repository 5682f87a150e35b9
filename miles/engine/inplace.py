"""Patches that an engine applies to its own memory, in its own process: `/update_weights_from_disk` with `PATCH_FORMAT` and a patch file as the model's path.

    /weights_checker, action REHEARSE + path     while it generates, a thread verifies what the patch makes of each block, in memory aside
    /update_weights_from_disk                    while it stands still: make the verified changes; verify and make them where nothing was rehearsed

Possible where that memory is Hugging Face's tensors byte for byte (miles.engine.digest: a CPU engine of one process). Every block of every tensor that it has is read and
its result compared with the trainer's digest, so all of the engine's weights have been verified when this reports success; otherwise they are what they
were. SGLang's functions (0.5.23) for weights from a folder and for checksums are wrapped; other requests go to them as before.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from miles.core import MilesError, StructureError
from miles.engine.digest import draft_tensors, fusion_plan, layers_of
from miles.engine.handover import PATCH_FORMAT, READY, REHEARSE, WORKING, told
from miles.weights.kernels import Changes, scatter
from miles.weights.patch import Patch

if TYPE_CHECKING:
    import torch

_CHECK = "sglang.srt.utils.weight_checker.WeightChecker.handle"
_UPDATE = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater.update_weights_from_disk"


def install() -> None:
    """Called in the server's main process before it forks its scheduler."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for symbols in (np.zeros(1, np.uint8), np.zeros(1, np.uint16)):  # compiled now, not while an engine stands still
        for width in (2, 4):
            for aside in (True, False):
                scatter(np.zeros(256, f"u{width}"), Changes(symbols, np.zeros(1, np.uint8), None), aside=aside)
    HookRegistry.register(_UPDATE, _update, HookType.AROUND)
    HookRegistry.register(_CHECK, _check, HookType.AROUND)


def _update(original: Callable, updater: Any, model_path: str, load_format: str, *args, **kwargs) -> tuple[bool, str]:
    if load_format != PATCH_FORMAT:
        return original(updater, model_path, load_format, *args, **kwargs)
    try:
        if not Rehearsal.made_true(model_path):
            apply_patch(Path(model_path), dict(updater.get_model().named_parameters()))
    except MilesError as e:
        return False, str(e)
    return True, "Succeeded to apply the patch."


def _check(original: Callable, checker: Any, action: str, *args, role: str, **kwargs) -> dict | None:
    if not action.startswith(REHEARSE):
        return original(checker, action, *args, role=role, **kwargs)
    from sglang.srt.utils.weight_checker import ChecksumInfo

    said = Rehearsal.of(action.removeprefix(REHEARSE), dict(checker._get_model().named_parameters())).said
    return ChecksumInfo(checksums={"rehearsal": said}, per_gpu_checksum=said, parallelism_info=checker._parallelism_info(role=role)).model_dump()


class Rehearsal(threading.Thread):
    """Of the one patch that comes next."""

    _newest: Rehearsal | None = None

    def __init__(self, path: str, parameters: Mapping[str, torch.Tensor]):
        super().__init__(name="rehearsal", daemon=True)
        self.path, self._parameters, self.said = path, parameters, WORKING
        self._commit: Callable[[], None] | None = None

    @classmethod
    def of(cls, path: str, parameters: Mapping[str, torch.Tensor]) -> Rehearsal:
        """That of this path, begun now if it was not."""
        if cls._newest is None or cls._newest.path != path:
            cls._newest = Rehearsal(path, parameters)
            cls._newest.start()
        return cls._newest

    @classmethod
    def made_true(cls, path: str) -> bool:
        """Make the changes that were rehearsed. False when there are none: they could not be rehearsed, or nobody asked."""
        newest, cls._newest = cls._newest, None
        if newest is None or newest.path != path or newest.is_alive() or newest._commit is None:
            return False
        newest._commit()
        return True

    def run(self) -> None:
        said = READY
        with contextlib.suppress(OSError):  # then it is asked
            told(self.path).unlink(missing_ok=True)
        try:
            patch = Patch(Path(self.path))
            shapes, drafts = _served(patch, self._parameters)
            self._commit = patch.rehearse(hugging_face_views(self._parameters, shapes), drafts)
        except Exception as e:  # whoever asks must hear of it, whatever it is
            said = str(e)
        self.said = said
        with contextlib.suppress(OSError):
            told(self.path).touch()


def apply_patch(path: Path, parameters: Mapping[str, torch.Tensor]) -> None:
    """Change an engine's parameters (its own, fused names) in place. Raises StructureError, with all of them as they were, for a patch to other weights or of
    other tensors."""
    patch = Patch(path)
    shapes, drafts = _served(patch, parameters)
    views = hugging_face_views(parameters, shapes)
    state, _ = patch.apply(views, without=drafts)
    for name, tensor in state.items():
        if tensor.data_ptr() != views[name].data_ptr():  # one with dense blocks was made anew, and is verified
            views[name].copy_(tensor)


def _served(patch: Patch, parameters: Mapping[str, torch.Tensor]) -> tuple[dict[str, tuple[int, ...]], set[str]]:
    """Shapes of the patch's tensors that this engine has; and names of those of draft layers, which it leaves out, because it does not speculate (a CPU
    engine never does)."""
    drafts = draft_tensors(patch.shapes, layers_of(parameters))
    return {name: shape for name, shape in patch.shapes.items() if name not in drafts}, drafts


def hugging_face_views(parameters: Mapping[str, torch.Tensor], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    """Hugging Face name -> the engine's memory of that tensor. shapes: of all tensors that the engine has. Raises StructureError when they do not make up the
    parameters."""
    out, found = {}, set()
    for target, names in fusion_plan(shapes, tied="lm_head.weight" not in parameters).items():
        if target not in parameters:
            raise StructureError(f"the engine has no parameter {target}, which would hold {names[:3]}", "the parameters of miles.engine.digest",
                                 "the engine is restarted from a keyframe", cause="weights:name")
        flat, at = parameters[target].detach().view(-1), 0
        for name in names:
            size = int(np.prod(shapes[name]))
            if at + size > len(flat):
                raise StructureError(f"{name} of shape {shapes[name]} does not fit the engine's {target} of {len(flat)} elements", "the model's own tensors",
                                     "the engine is restarted from a keyframe", cause="weights:shape")
            out[name] = flat[at:at + size].view(shapes[name])
            at += size
        found.add(target)
    if missing := parameters.keys() - found:
        raise StructureError(f"the patch says nothing of the engine's {sorted(missing)[:3]}", "every tensor of the model",
                             "the engine is restarted from a keyframe", cause="weights:missing")
    return out
