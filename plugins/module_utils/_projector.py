# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a multimodal projector (``--mmproj``) costs, from its header.

Weights are those of its tensors, measured equal on b11434. The compute buffer was measured with made-up SigLIP
projectors (idefics3): with flash attention exactly patches x (n_ff + 3 x width) x 4 bytes, and the picture itself,
12 bytes for each pixel, on the primary. Not measured, so counted on top: the scores of one layer (heads x patches^2 x 4
bytes), which a device without flash attention for this head size writes out. Other kinds of projector have other
graphs; the numbers are then of the right order and no promise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ansible_collections.llamafleet.rpc.plugins.module_utils._errors import FleetError
from ansible_collections.llamafleet.rpc.plugins.module_utils._gguf import Header

_F32 = 4
_MEASURED = ("idefics3",)
_MOST_TOKENS = (
    4096  # of a picture of any size, unless llama-server is told otherwise (clip.cpp, set_limit_image_tokens)
)
_AUDIO_FRAMES = 3000  # 30 s of sound, the input of a whisper encoder
_MARGIN = 64 << 20  # for graphs that were not measured


class ProjectorError(FleetError):
    """The file is no projector that can be accounted for."""


@dataclass(frozen=True)
class Projector:
    """A projector; sizes in bytes. ``picture`` is taken of the primary's memory, ``measured`` whether its kind was."""

    path: str
    kind: str
    weights: int
    compute: int
    picture: int
    width: int | None
    measured: bool

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return dict(self.__dict__)

    @staticmethod
    def from_dict(data: object) -> Projector:
        """The projector that ``data`` (as of ``to_dict``) describes."""
        if not isinstance(data, Mapping) or not isinstance(data.get("weights"), int):
            raise ProjectorError("the projector is not what gguf_info returned as projector; read its file with it")
        values: dict[str, Any] = {name: data.get(name) for name in Projector.__dataclass_fields__}
        return Projector(**values)


def projector_from_header(header: Header) -> Projector:
    """Account for a projector. Raises ProjectorError for a file of another kind."""
    values = header.metadata
    if values.get("general.architecture") != "clip":
        raise ProjectorError(
            f"{header.path}: is a model of architecture {values.get('general.architecture')!r} and no projector; "
            "a projector's file is usually called mmproj-*.gguf"
        )
    names = [str(values[key]) for key in sorted(values) if key.endswith("projector_type")]
    kind = names[0] if names else "unknown"
    compute = picture = 0
    if values.get("clip.has_vision_encoder"):
        patches, pixels = _patches(header)
        compute, picture = _encoder(header, "clip.vision", patches), pixels * 3 * _F32
    if values.get("clip.has_audio_encoder"):
        compute = max(compute, _encoder(header, "clip.audio", _AUDIO_FRAMES))
    measured = kind in _MEASURED
    return Projector(
        path=header.path,
        kind=kind,
        weights=sum(tensor.nbytes for tensor in header.tensors),
        compute=compute + (0 if measured else _MARGIN),
        picture=picture,
        width=next((t.dims[-1] for t in header.tensors if t.name == "mm.model.fc.weight"), None),
        measured=measured,
    )


def _number(header: Header, key: str) -> int:
    value = header.metadata.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 1 << 20:
        raise ProjectorError(f"{header.path}: {key} is {value!r}, so its memory cannot be told; take another file")
    return value


def _patches(header: Header) -> tuple[int, int]:
    """(patches of the largest picture, its pixels): of the size it was made for, or of any size where it takes that."""
    size, patch = _number(header, "clip.vision.image_size"), _number(header, "clip.vision.patch_size")
    patches = (size // patch) ** 2
    merge = header.metadata.get("clip.vision.spatial_merge_size")
    if isinstance(merge, int) and not isinstance(merge, bool) and 0 < merge < 64:
        patches = max(patches, _MOST_TOKENS * merge * merge)
    return patches, patches * patch * patch


def _encoder(header: Header, prefix: str, patches: int) -> int:
    """Compute buffer of one encoder in bytes (see above)."""
    width, hidden = (_number(header, f"{prefix}.{key}") for key in ("embedding_length", "feed_forward_length"))
    heads = _number(header, f"{prefix}.attention.head_count")
    scores = heads * patches if "clip.vision.spatial_merge_size" not in header.metadata else 0
    return patches * (hidden + 3 * width + scores) * _F32
