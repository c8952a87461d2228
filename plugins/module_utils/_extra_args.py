# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What an operator adds to the arguments of llama-server, and which of it undoes the plan, a law, or a secret."""

from __future__ import annotations

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

#: Options of llama-server b11434 that are refused, and why. A context setting has a variable of the role.
REFUSED = {
    **dict.fromkeys(("--rpc", "-dev", "--device", "-ngl", "--gpu-layers", "--n-gpu-layers"), _PLANNED),
    **dict.fromkeys(("-ts", "--tensor-split", "-fit", "--fit", "-fitt", "--fit-target"), _PLANNED),
    **dict.fromkeys(("-mg", "--main-gpu", "-nkvo", "--no-kv-offload"), _PLANNED),
    **dict.fromkeys(("-m", "--model"), "the role llama_model decides it"),
    **dict.fromkeys(("-c", "--ctx-size"), "use llama_primary_n_ctx, which is planned with"),
    **dict.fromkeys(("-np", "--parallel"), "use llama_primary_n_parallel, which is planned with"),
    **dict.fromkeys(("-b", "--batch-size"), "use llama_primary_n_batch, which is planned with"),
    **dict.fromkeys(("-ub", "--ubatch-size"), "use llama_primary_n_ubatch, which is planned with"),
    **dict.fromkeys(("-ctk", "--cache-type-k"), "use llama_primary_type_k, which is planned with"),
    **dict.fromkeys(("-ctv", "--cache-type-v"), "use llama_primary_type_v, which is planned with"),
    **dict.fromkeys(("-fa", "--flash-attn"), "use llama_primary_flash_attn, which is planned with"),
    **dict.fromkeys(("-kvu", "--kv-unified", "-no-kvu", "--no-kv-unified"), "use llama_primary_kv_unified"),
    "--swa-full": "use llama_primary_swa_full, which is planned with",
    **dict.fromkeys(("-cram", "--cache-ram"), _PLANNED),
    **dict.fromkeys(("-ot", "--override-tensor", "-cmoe", "--cpu-moe", "-ncmoe", "--n-cpu-moe"), _OVERRIDE),
    **dict.fromkeys(
        ("-sm", "--split-mode"),
        "the plan is one of whole layers; row is refused by RPC devices and tensor is ten times slower over RPC",
    ),
    **dict.fromkeys(("--api-key", "-hft", "--hf-token"), _KEY_IN_SIGHT),
    "--api-key-file": "use llama_primary_api_key_file",
    **dict.fromkeys(("-hf", "-hfr", "--hf-repo", "-hff", "--hf-file", "-mu", "--model-url"), _DOWNLOAD),
    **dict.fromkeys(("--host", "--port"), _ADDRESS),
    **dict.fromkeys(
        ("--log-disable", "--log-file", "-lv", "--verbosity", "--log-verbosity"), "the proof reads the log"
    ),
}


class ExtraArgsError(FleetError):
    """An additional argument that must not be there."""


def checked_extra_args(arguments: Sequence[object]) -> list[str]:
    """``arguments`` as text, or an error that names the one that must not be there, why, and what to do instead."""
    checked = [str(argument) for argument in arguments]
    for argument in checked:
        option = argument.split("=", 1)[0]
        if option in REFUSED:
            raise ExtraArgsError(f"llama_primary_extra_args: {option} is refused: {REFUSED[option]}")
    return checked
