# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What an operator adds to the arguments of llama-server, and which of it undoes the plan, a law, or a secret.

An option passes if it changes neither memory nor placement (sampling, templates, metrics, threads). One that does has a
variable of the role, which is planned with, or is refused with the reason. Options are compared as llama-server reads
them: ``_`` in a long one is ``-`` (common/arg.cpp, b11434).
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from ansible_collections.llamafleet.rpc.plugins.module_utils._errors import FleetError

_PLANNED = "the plan decides it"
_OVERRIDE = (
    "it moves tensors of remote layers to the primary, which costs a round trip and a new graph for each such layer "
    "and token (10 layers: 23 ms to 483 ms per token at 40 ms round trip, measured on b11434)"
)
_KEY_IN_SIGHT = "a secret in an argument is visible to every account of the host; use llama_primary_api_key_file"
_DOWNLOAD = "units load a local file and never download at start; use the role llama_model"
_ADDRESS = "use llama_primary_host and llama_primary_port"
_DRAFT = (
    "without a device of its own a draft model is spread over the workers; use llama_primary_draft_model, which is "
    "planned with"
)
_PROJECTOR = (
    "without a device of its own a projector goes to the first worker; use llama_primary_mmproj, which is planned with"
)
_ADAPTER = (
    "its memory is not in the plan, and it goes to every worker that holds a layer it changes; merge it into the model "
    "(llama-export-lora) and serve that"
)
_ONE_MODEL = "a primary serves the one model that was planned; give each model a cluster"
_LOG = "the proof reads the log"
_PLAIN = "the proof asks at http://host:port/; put a reverse proxy in front"
_ENDS = "llama-server would print something and end; run it by hand"

#: Options of llama-server b11434 that are refused, and why. A context setting has a variable of the role.
REFUSED = {
    **dict.fromkeys(("--rpc", "-dev", "--device", "-ngl", "--gpu-layers", "--n-gpu-layers"), _PLANNED),
    **dict.fromkeys(("-ts", "--tensor-split", "-fit", "--fit", "-fitt", "--fit-target"), _PLANNED),
    **dict.fromkeys(("-fitc", "--fit-ctx", "-mg", "--main-gpu", "-nkvo", "--no-kv-offload"), _PLANNED),
    **dict.fromkeys(("-m", "--model"), "the role llama_model decides it"),
    **dict.fromkeys(("-c", "--ctx-size"), "use llama_primary_n_ctx, which is planned with"),
    **dict.fromkeys(("-np", "--parallel"), "use llama_primary_n_parallel, which is planned with"),
    **dict.fromkeys(("-b", "--batch-size"), "use llama_primary_n_batch, which is planned with"),
    **dict.fromkeys(("-ub", "--ubatch-size"), "use llama_primary_n_ubatch, which is planned with"),
    **dict.fromkeys(("-ctk", "--cache-type-k"), "use llama_primary_type_k, which is planned with"),
    **dict.fromkeys(("-ctv", "--cache-type-v"), "use llama_primary_type_v, which is planned with"),
    **dict.fromkeys(("-fa", "--flash-attn"), "use llama_primary_flash_attn, which is planned with"),
    **dict.fromkeys(("-kvu", "--kv-unified", "-no-kvu", "--no-kv-unified"), "use llama_primary_kv_unified"),
    "--kv-unified-per-slot": "use llama_primary_n_ctx and llama_primary_n_parallel, which are planned with",
    "--swa-full": "use llama_primary_swa_full, which is planned with",
    **dict.fromkeys(("-cram", "--cache-ram"), _PLANNED),
    **dict.fromkeys(("-ot", "--override-tensor", "-cmoe", "--cpu-moe", "-ncmoe", "--n-cpu-moe"), _OVERRIDE),
    **dict.fromkeys(("-ncffn", "--n-cpu-ffn"), _OVERRIDE),
    **dict.fromkeys(
        ("-sm", "--split-mode"),
        "the plan is one of whole layers; row is refused by RPC devices and tensor is ten times slower over RPC",
    ),
    **dict.fromkeys(("-md", "--model-draft", "--spec-draft-model", "-devd", "--device-draft"), _DRAFT),
    **dict.fromkeys(("--spec-draft-device", "-ngld", "--gpu-layers-draft", "--n-gpu-layers-draft"), _DRAFT),
    **dict.fromkeys(("--spec-draft-ngl", "-ctkd", "--cache-type-k-draft", "--spec-draft-type-k"), _DRAFT),
    **dict.fromkeys(
        ("-ctvd", "--cache-type-v-draft", "--spec-draft-type-v", "-otd", "--override-tensor-draft"), _DRAFT
    ),
    **dict.fromkeys(("--spec-draft-override-tensor", "-cmoed", "--cpu-moe-draft", "--spec-draft-cpu-moe"), _DRAFT),
    **dict.fromkeys(("-ncmoed", "--n-cpu-moe-draft", "--spec-draft-n-cpu-moe", "--spec-draft-ncmoe"), _DRAFT),
    "--spec-draft-n-max": "use llama_primary_draft_n_max, which is planned with",
    **dict.fromkeys(("-mm", "--mmproj", "--mmproj-offload", "--no-mmproj-offload"), _PROJECTOR),
    **dict.fromkeys(("-mmdev", "--mmproj-device", "--mmproj-auto", "--no-mmproj", "--no-mmproj-auto"), _PROJECTOR),
    **dict.fromkeys(("--lora", "--lora-scaled", "--control-vector", "--control-vector-scaled"), _ADAPTER),
    **dict.fromkeys(("--models-dir", "--models-preset", "--models-max", "--models-autoload"), _ONE_MODEL),
    "--sleep-idle-seconds": (
        "a primary that sleeps leaves its workers, which must be restarted before it comes back; stop it with its "
        "service instead"
    ),
    **dict.fromkeys(("--api-key", "-hft", "--hf-token"), _KEY_IN_SIGHT),
    "--api-key-file": "use llama_primary_api_key_file",
    **dict.fromkeys(("-hf", "-hfr", "--hf-repo", "-hff", "--hf-file", "-mu", "--model-url"), _DOWNLOAD),
    **dict.fromkeys(("-dr", "--docker-repo", "-mmu", "--mmproj-url"), _DOWNLOAD),
    **dict.fromkeys(("-hfd", "-hfrd", "--hf-repo-draft", "--spec-draft-hf"), _DOWNLOAD),
    **dict.fromkeys(("--host", "--port"), _ADDRESS),
    **dict.fromkeys(("--api-prefix", "--ssl-key-file", "--ssl-cert-file"), _PLAIN),
    **dict.fromkeys(("--log-disable", "--log-file", "-lv", "--verbosity", "--log-verbosity", "--log-jsonl"), _LOG),
    **dict.fromkeys(("-h", "--help", "--usage", "--version", "-cl", "--cache-list", "--completion-bash"), _ENDS),
    "--list-devices": _ENDS,
}

_PRESET = re.compile(r"--[a-z0-9.-]+-default")  # --fim-qwen-3b-default and the like fetch a model
# Kinds of speculative decoding that look up the text itself: no model, no memory worth a plan.
_NGRAM = re.compile(r"none|ngram-[a-z0-9-]+")
_HARMLESS_KEY = re.compile(r"(tokenizer|general)\.[^=:]+=[^,]*")


class ExtraArgsError(FleetError):
    """An additional argument that must not be there."""


def checked_extra_args(arguments: Sequence[object]) -> list[str]:
    """``arguments`` as text, or an error that names the one that must not be there, why, and what to do instead."""
    checked = [str(argument) for argument in arguments]
    for argument, value in zip(checked, [*checked[1:], ""]):
        option = re.split(r"[\s=]", argument, maxsplit=1)[0]  # "-ts 1,1" in one element is no way round
        if option.startswith("--"):
            option = option.replace("_", "-")
        reason = REFUSED.get(option) or _by_value(option, value)
        if reason:
            raise ExtraArgsError(f"llama_primary_extra_args: {option} is refused: {reason}")
    return checked


def _by_value(option: str, value: str) -> str | None:
    """Why an option that is not refused as such is refused here."""
    if option.startswith("LLAMA_"):
        return "it is a variable of the environment and no argument, and llama-server gets none of these (launch.py)"
    if _PRESET.fullmatch(option):
        return _DOWNLOAD
    if option == "--spec-type" and not all(_NGRAM.fullmatch(kind) for kind in value.split(",")):
        return f"{_DRAFT}; for the layers of the model itself (MTP) use llama_primary_draft_mtp"
    if option == "--override-kv" and not all(_HARMLESS_KEY.fullmatch(item) for item in value.split(",")):
        return "the plan was made of the header as it is in the file; only tokenizer.* and general.* may be overridden"
    return None
