# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Where the tests find the real llama.cpp and the real model.

A test that needs them is marked ``real``. Without them it fails and says how to get them; it never
skips. To run without, deselect on purpose: ``-m "not real"``.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

BIN_VARIABLE = "LLAMAFLEET_TEST_BIN"
MODEL_VARIABLE = "LLAMAFLEET_TEST_MODEL"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "privileged: needs root, for it makes network namespaces")
    config.addinivalue_line("markers", "real: needs the llama.cpp binaries and the model that `make build` provides")
    config.addinivalue_line("markers", "pinned: compares with another package, in the release that the tests pin")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect what cannot run here: without root, and under ansible-test; the gate ``pytest`` says so or runs it.

    ansible-test passes on neither options nor the environment, and installs for an old Python what still supports it.
    """
    if os.geteuid() != 0:
        privileged = [item for item in items if item.get_closest_marker("privileged")]
        items[:] = [item for item in items if item not in privileged]
        config.hook.pytest_deselected(items=privileged)
    if not config.pluginmanager.has_plugin("ansible_pytest_collections"):
        return
    left_out = [item for item in items if item.get_closest_marker("real") or item.get_closest_marker("pinned")]
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=left_out)


def _path_from(variable: str, what: str) -> Path:
    remedy = "run `make units` (which builds it once), or leave these tests out on purpose with -m 'not real'"
    value = os.environ.get(variable)
    if not value:
        pytest.fail(f"{variable} is not set: it names {what}; {remedy}", pytrace=False)
    path = Path(value)
    if not path.exists():
        pytest.fail(f"{variable}={value} does not exist: it names {what}; {remedy}", pytrace=False)
    return path.resolve()


@pytest.fixture(scope="session")
def llama_bin() -> Path:
    """Directory that holds ``ggml-rpc-server``, ``llama-server`` and their companions."""
    return _path_from(BIN_VARIABLE, "the directory of the llama.cpp binaries")


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The GGUF file of the demo: SmolLM2-135M-Instruct, Q4_1."""
    return _path_from(MODEL_VARIABLE, "the GGUF file of the demo model")
