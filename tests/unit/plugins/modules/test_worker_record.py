# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""worker_record and worker_record_info as tasks see them."""

from __future__ import annotations

import json
import os
import stat
from typing import TYPE_CHECKING, Any

import pytest
from ansible.module_utils.basic import AnsibleModule
from ansible_collections.llamafleet.rpc.plugins.modules import worker_record, worker_record_info
from ansible_collections.llamafleet.rpc.tests.unit import servers

if TYPE_CHECKING:
    from pathlib import Path

GIB = 1 << 30


def facts(usable: int = 20 * GIB, boot: str = "boot-1") -> dict[str, Any]:
    device = {"name": "CPU", "backend": "cpu", "description": "x", "kind": "system_ram", "pool": "m/ram"}
    devices = [{**device, "total": usable, "free": usable, "usable": usable}]
    return {"machine_id": "m", "boot_id": boot, "collected_at": "t", "backend": "cpu", "devices": devices, "links": []}


def call(path: Path | None, check_mode: bool = False, **options: Any) -> dict[str, Any]:
    given: dict[str, Any] = {
        "host": "box",
        "facts": facts(),
        "instances": [{"name": "a", "endpoint": "127.0.0.1:18711", "memory_limit": "200MiB"}],
    }
    if path is not None:
        given["path"] = str(path)
    return servers.run_module(worker_record.main, {**given, **options}, check_mode)


def read(path: Path) -> dict[str, Any]:
    return servers.run_module(worker_record_info.main, {"path": str(path)}, check_mode=True)


def test_a_record_is_kept_and_the_second_run_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "default" / "box" / "worker.json"
    first = call(path)
    assert first["changed"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    assert json.loads(path.read_text()) == first["ansible_facts"]["llamafleet_worker"]
    assert first["diff"]["before"] == ""
    before = path.stat()
    second = call(path, facts=facts(19 * GIB))
    assert not second["changed"]
    assert second["ansible_facts"] == first["ansible_facts"]
    assert second["diff"]["before"] == second["diff"]["after"]
    assert (path.stat().st_mtime_ns, path.stat().st_ino) == (before.st_mtime_ns, before.st_ino)
    assert os.listdir(path.parent) == ["worker.json"]


def test_a_decision_is_a_change_with_a_diff(tmp_path: Path) -> None:
    path = tmp_path / "worker.json"
    call(path)
    changed = call(path, build={"build": "b11434"})
    assert changed["changed"]
    assert '"build": null' in changed["diff"]["before"]
    assert '"build": "b11434"' in changed["diff"]["after"]


def test_another_process_is_kept_but_is_no_change(tmp_path: Path) -> None:
    path = tmp_path / "worker.json"
    call(path)
    again = call(path, pids=[os.getpid()])
    assert not again["changed"]
    started = json.loads(path.read_text())["instances"][0]["started_at"]
    assert started.count(":") == 1
    assert again["ansible_facts"]["llamafleet_worker"]["instances"][0]["started_at"] == started
    assert call(path, pids=[None])["ansible_facts"]["llamafleet_worker"]["instances"][0]["started_at"] is None


def test_check_mode_tells_and_writes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "below" / "worker.json"
    told = call(path, check_mode=True)
    assert told["changed"]
    assert told["ansible_facts"]["llamafleet_worker"]["host"] == "box"
    assert not path.parent.exists()
    path.parent.mkdir()
    path.write_text("{}")
    assert call(path, check_mode=True, state="absent")["changed"]
    assert path.exists()


def test_absent_removes_the_record_once(tmp_path: Path) -> None:
    path = tmp_path / "worker.json"
    call(path)
    assert call(path, state="absent")["changed"]
    assert not path.exists()
    assert not call(path, state="absent")["changed"]


def test_a_declared_machine_needs_neither_path_nor_facts() -> None:
    declared = [{"endpoint": "10.0.0.4:50052", "devices": [{"device": "MTL0", "usable": "21GiB"}]}]
    result = servers.run_module(worker_record.main, {"host": "mac", "instances": declared})
    assert not result["changed"]
    devices = result["ansible_facts"]["llamafleet_worker"]["instances"][0]["devices"]
    assert devices[0]["budget"] == 21 * GIB


def test_a_primary_records_itself(tmp_path: Path) -> None:
    result = call(tmp_path / "worker.json", primary=True, instances=[])
    instance = result["ansible_facts"]["llamafleet_worker"]["instances"][0]
    assert instance["endpoint"] is None
    assert [device["device"] for device in instance["devices"]] == ["CPU"]


def test_a_broken_kept_record_is_made_anew(tmp_path: Path) -> None:
    path = tmp_path / "worker.json"
    path.write_text('{"schema": 1, "instances": [')
    assert call(path)["changed"]
    assert not call(path)["changed"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"host": ""}, "host is empty"),
        ({"instances": []}, "box: no instances"),
        ({"pids": ["seven"]}, "must hold process numbers"),
        ({"instances": [{"endpoint": "box:1"}]}, "IPv4:port"),
    ],
)
def test_wrong_options_are_refused(tmp_path: Path, options: dict[str, Any], says: str) -> None:
    result = call(tmp_path / "worker.json", **options)
    assert result["failed"]
    assert says in result["msg"]
    assert os.listdir(tmp_path) == []


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = call(tmp_path / "file" / "worker.json")
    assert result["failed"]
    assert str(tmp_path / "file") in result["msg"]


def test_the_kept_record_is_read_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "worker.json"
    absent = read(path)
    assert (absent["record"], absent["changed"], absent["reason"]) == (None, False, f"{path} does not exist")
    made = call(path)
    assert read(path)["record"] == made["ansible_facts"]["llamafleet_worker"]
    assert read(path)["reason"] is None
    path.write_text('{"schema": 7}')
    assert read(path)["reason"] == f"{path} holds no record of this release"


def test_what_llama_server_lists_bounds_the_record_and_a_gap_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Where a controller's code is loaded as well, Ansible shows warnings instead of returning them.
    warned: list[str] = []
    monkeypatch.setattr(AnsibleModule, "warn", lambda _module, text: warned.append(text))
    card = {"name": "CUDA0", "backend": "cuda", "description": "a card", "kind": "dedicated", "pool": "m/gpu/x"}
    given = {**facts(), "devices": [{**card, "total": 24 * GIB, "free": None, "usable": 23 * GIB}]}
    listed = ["Available devices:", "  CUDA0: a card (12288 MiB, 12000 MiB free)"]
    options: dict[str, Any] = {"facts": given, "instances": [{"port": 1, "address": "10.0.0.2", "devices": ["CUDA0"]}]}
    result = call(tmp_path / "worker.json", listed_devices=listed, **options)
    device = result["ansible_facts"]["llamafleet_worker"]["instances"][0]["devices"][0]
    assert (device["usable"], device["budget"]) == (12 * GIB, 12 * GIB)
    assert "reports 12288 MiB, detected were 24576 MiB" in warned[0]
    again = call(tmp_path / "worker.json", **options)
    assert not again["changed"], "what was reported once holds without asking again"
    failed = call(None, listed_devices="Available devices:\n  (none)\n", **options)
    assert failed["failed"]
    assert "does not list it" in failed["msg"]
