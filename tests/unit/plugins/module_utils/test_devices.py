# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""How much of a memory may be lent, and the sizes that people and llama.cpp write."""

from __future__ import annotations

from pathlib import Path

import pytest
from ansible_collections.llamafleet.rpc.plugins.module_utils._devices import (
    GIB,
    KINDS,
    MIB,
    DeviceError,
    backend_of,
    card_size,
    clamp_free,
    metal_usable,
    parse_list_devices,
    parse_size,
    reserve_bytes,
    reserve_table,
    usable_bytes,
)
from hypothesis import given
from hypothesis import strategies as st

RECORDINGS = Path(__file__).parents[2] / "recordings" / "llama_server"
SIZES = st.integers(0, 1 << 50)


@pytest.mark.parametrize(
    ("kind", "system", "total", "reserve"),
    [
        ("system_ram", "Linux", 1 * GIB, 256 * MIB),
        ("system_ram", "Linux", 4 * GIB, 512 * MIB),
        ("system_ram", "Linux", 32 * GIB, 32 * GIB // 20),
        ("unified", "Linux", 128 * GIB, 4 * GIB),
        ("unified", "Darwin", 8 * GIB, 2 * GIB),
        ("unified", "Darwin", 64 * GIB, 64 * GIB // 10),
        ("unified", "Darwin", 192 * GIB, 8 * GIB),
        ("dedicated", "Linux", 24 * GIB, 512 * MIB),
        ("dedicated", "Linux", 80 * GIB, 1 * GIB),
        ("carveout", "Linux", 512 * MIB, 128 * MIB),
        ("shared_system", "Linux", 32 * GIB, 32 * GIB // 10),
        ("shared_system", "Linux", 2 * GIB, 512 * MIB),
    ],
)
def test_the_reserve_of_small_and_big_memories(kind: str, system: str, total: int, reserve: int) -> None:
    assert reserve_bytes(kind, total, system) == reserve


def test_the_docs_can_print_the_reserve() -> None:
    lines = reserve_table().splitlines()
    assert lines[0].startswith("| memory | 1 GiB | 2 GiB |")
    assert "| 256 MiB | 512 MiB | 512 MiB | 512 MiB | 819 MiB |" in lines[2]
    assert len({line.count("|") for line in lines}) == 1


def test_an_unknown_kind_is_named() -> None:
    with pytest.raises(DeviceError, match="'floppy' is unknown; one of dedicated"):
        reserve_bytes("floppy", GIB)


@given(total=SIZES, free=st.one_of(st.none(), SIZES), own=SIZES, kind=st.sampled_from(KINDS), mac=st.booleans())
def test_never_more_is_lent_than_there_is(total: int, free: int | None, own: int, kind: str, mac: bool) -> None:
    reserve = reserve_bytes(kind, total, "Darwin" if mac else "Linux")
    assert 0 <= reserve <= total // 4
    usable = usable_bytes(total, reserve, free, own)
    assert 0 <= usable <= total - reserve
    if free is not None:
        assert usable <= free + own


@given(total=st.integers(GIB, 1 << 45), others=st.integers(0, 1 << 30), own=st.integers(0, 1 << 45))
def test_what_we_hold_ourselves_does_not_change_the_capacity(total: int, others: int, own: int) -> None:
    """Law 18: a second run, with our own service holding most of the memory, finds the same capacity."""
    own = min(own, total - others)
    idle = usable_bytes(total, reserve_bytes("system_ram", total), total - others)
    busy = usable_bytes(total, reserve_bytes("system_ram", total), total - others - own, own)
    assert busy == idle


def test_a_mac_whose_memory_is_wired_by_others_lends_little_and_says_so() -> None:
    """B1-14: 16 GiB Mac, working set 10.67 GiB, 11 GiB wired: filling the working set freezes it."""
    usable, warnings = metal_usable(16 * GIB, int(10.67 * GIB), 11 * GIB)
    assert 0 < usable < 5 * GIB
    assert warnings == ("wired memory: others hold 11264 MiB of 16384 MiB; close them, or expect little to be lent",)
    usable, warnings = metal_usable(16 * GIB, int(10.67 * GIB), 2 * GIB)
    assert usable == int(10.67 * GIB)
    assert warnings == ()


def test_a_size_that_no_card_has_is_no_size() -> None:
    assert (card_size(288 * 10**9), card_size(0), card_size(None), card_size(2 << 40)) == (
        288 * 10**9,
        None,
        None,
        None,
    )


def test_free_above_total_is_clamped() -> None:
    """B1-09: the two come from different sources and are both legal."""
    found = parse_list_devices("RPC0: 10.9.0.2:50052 (122880 MiB, 124831 MiB free)")
    assert found == [("RPC0", "10.9.0.2:50052", 122880 * MIB, 122880 * MIB)]
    assert clamp_free(None, 5) == 5
    assert clamp_free(5, None) is None


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("cuda", [("CUDA0", "NVIDIA GeForce RTX 4090", 24105 * MIB, 23600 * MIB)]),
        ("metal", [("MTL0", "Apple M4 Pro", 38338 * MIB, 38338 * MIB), ("BLAS", "Accelerate", None, None)]),
        ("none", []),
        (
            "rpc",
            [
                ("RPC0", "10.9.0.2:50052", 122880 * MIB, 122880 * MIB),
                ("ROCm0", "AMD Radeon Graphics (RADV GFX1151)", 122880 * MIB, 122880 * MIB),
            ],
        ),
    ],
)
def test_device_lists_of_llama_server(name: str, expected: list[object]) -> None:
    assert parse_list_devices((RECORDINGS / f"list_devices_{name}.txt").read_text()) == expected


@given(st.text())
def test_any_text_is_a_device_list(text: str) -> None:
    for device in parse_list_devices(text + f"\n  CUDA0: {text} (7 MiB, 9 MiB free)\n"):
        assert device.total is None or device.free is None or 0 <= device.free <= device.total


@pytest.mark.parametrize(
    ("value", "size"),
    [
        (214748364, 214748364),
        ("214748364", 214748364),
        ("200MiB", 200 * MIB),
        ("200 mib", 200 * MIB),
        ("4G", 4 * GIB),
        ("4Gi", 4 * GIB),
        ("1.5GiB", GIB + GIB // 2),
        ("24GB", 24 * 10**9),
        ("80%", 51 * GIB + 214748364),
        ("100%", 64 * GIB),
        ("1T", 64 * GIB),
    ],
)
def test_sizes_that_people_write(value: object, size: int) -> None:
    """The last one: never more than there is."""
    assert parse_size(value, 64 * GIB) == size


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (200, "200 is 200 bytes; a unit is missing"),
        ("0", "a unit is missing"),
        (-5, "is no size"),
        ("-4G", "is no size"),
        (True, "is no size"),
        (None, "is no size"),
        (4.5, "is no size"),
        ("", "is no size"),
        ("4 potatoes", "has no known unit"),
        ("101%", "more than there is"),
        ("0%", "lends nothing"),
        ("1e9", "is no size"),
        ("٤G", "is no size"),
        ("9" * 40, "is no size"),
    ],
)
def test_sizes_that_cannot_be(value: object, says: str) -> None:
    with pytest.raises(DeviceError, match=says) as caught:
        parse_size(value, 64 * GIB, "box: memory_limit")
    assert str(caught.value).startswith("box: memory_limit: ")


def test_a_share_of_the_unknown_is_an_error() -> None:
    with pytest.raises(DeviceError, match="unknown; give a size instead"):
        parse_size("80%")


@given(st.one_of(st.text(), st.integers(), st.floats(), st.binary(), st.booleans(), st.lists(st.integers())), SIZES)
def test_any_limit_is_a_size_or_a_named_error(value: object, whole: int) -> None:
    try:
        size = parse_size(value, whole)
    except DeviceError:
        return
    assert 0 <= size <= whole


def test_backends_follow_from_names() -> None:
    names = ["CUDA11", "ROCm0", "MTL0", "Vulkan1", "SYCL0", "CPU", "BLAS"]
    assert [backend_of(name) for name in names] == ["cuda", "rocm", "metal", "vulkan", "sycl", "cpu", None]
