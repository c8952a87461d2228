#!/usr/bin/python

# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: host_facts
short_description: Detect processor, memory, accelerators and links of a host
version_added: 0.1.0
author: llamafleet contributors (@llamafleet)
description:
  - Finds out what a host can lend to a llama.cpp fleet and what llama.cpp has to be built with on it.
  - Memory is counted in bytes. RV(ansible_facts.llamafleet.devices[].usable) is a capacity, not a reading; it is
    the least of the total and the limits, less a reserve for the system, less what others hold. Page cache is not
    held by anybody.
  - Needs neither root nor any Python library on the host. NVIDIA cards are found through C(nvidia-smi), AMD and Intel
    ones in sysfs, and through the makers' tools where that says nothing; other ones through C(vulkaninfo), and Apple's
    through C(sysctl). A tool that is missing, hangs or fails is a warning, not an error.
  - One physical device is listed once, under the backend to build for or else the first that can use it; the other
    backends are RV(ansible_facts.llamafleet.candidates).
  - Nobody has run this on real AMD, Intel or Apple hardware; there it follows recorded output of the makers' tools.
    Machines that it does not understand can be described by hand in C(llama_worker_devices_declared).
extends_documentation_fragment:
  - llamafleet.rpc.attributes
  - llamafleet.rpc.attributes.facts_module
  - llamafleet.rpc.attributes.posix
  - llamafleet.rpc.attributes.actiongroup_all
options:
  backend:
    description:
      - The llama.cpp backend to build for. V(auto) takes the first that has a device with memory, of CUDA, ROCm, SYCL,
        Metal, Vulkan and the processor; ROCm and SYCL only where their compilers are, or Vulkan sees no card.
      - Naming a backend the host has no device for is an error.
    type: str
    choices: [auto, cpu, cuda, rocm, metal, vulkan, sycl]
    default: auto
  timeout:
    description:
      - Seconds that the makers' tools may take, all together, for they run side by side. A driver without persistence
        mode needs several to wake up.
    type: int
    default: 30
  own_prefixes:
    description:
      - Directories of our own programs. A process whose program lies below one of them is our own service, and the
        memory it holds counts as free. Seen for processes of the same account, or for all when run as root.
    type: list
    elements: path
    default: []
  own_units:
    description: Names of systemd units that are our own services, with or without C(.service). Seen from any account.
    type: list
    elements: str
    default: []
  own_pids:
    description: Process numbers of our own services.
    type: list
    elements: int
    default: []
seealso:
  - module: llamafleet.rpc.worker_record
"""

EXAMPLES = r"""
- name: Detect what the host has
  llamafleet.rpc.host_facts:

- name: Detect it again while a worker runs, with the same capacity as result
  llamafleet.rpc.host_facts:
    own_prefixes:
      - /opt/llamafleet

- name: Build for the processor although there is a card
  llamafleet.rpc.host_facts:
    backend: cpu
"""

RETURN = r"""
ansible_facts:
  description: The facts, under the name C(llamafleet). Sizes are bytes, unknown is null.
  returned: success
  type: dict
  contains:
    llamafleet:
      description: What the host has.
      type: dict
      returned: success
      contains:
        schema:
          description: Version of this shape.
          type: int
          returned: success
          sample: 1
        machine_id:
          description: Identity of the machine. Several inventory hosts may share it.
          type: str
          returned: success
          sample: 0123456789abcdef0123456789abcdef
        boot_id:
          description: Changes with each boot.
          type: str
          returned: success
        collected_at:
          description: Time of this look, in UTC.
          type: str
          returned: success
          sample: "2026-11-29T19:30:00Z"
        system:
          description: Operating system.
          type: str
          returned: success
          sample: Linux
        arch:
          description: Machine type as C(uname -m) prints it.
          type: str
          returned: success
          sample: x86_64
        init:
          description: The service manager that runs as process 1, one of V(systemd), V(launchd), V(none).
          type: str
          returned: success
        traits:
          description: Peculiarities of the host, any of V(container), V(lxc), V(rosetta), V(tegra), V(vm), V(wsl).
          type: list
          elements: str
          returned: success
        cpu:
          description:
            - The processor, with keys C(model), C(physical_cores), C(logical_cores), C(performance_cores) (null
              when all cores are alike), C(isa), C(features) and C(numa_nodes) (their number).
            - Cores are those that affinity and CPU quota leave.
          type: dict
          returned: success
        memory:
          description: RAM, with keys C(total), C(available), C(limit) (of the control group, or null) and C(usable).
          type: dict
          returned: success
        devices:
          description: What llama.cpp can compute on.
          type: list
          elements: dict
          returned: success
          contains:
            name:
              description: The name llama.cpp gives it, under RV(ansible_facts.llamafleet.devices[].environment).
              type: str
              returned: success
              sample: CUDA0
            backend:
              description: The llama.cpp backend.
              type: str
              returned: success
            description:
              description: Name of the part.
              type: str
              returned: success
            kind:
              description: One of V(dedicated), V(unified), V(carveout), V(shared_system), V(system_ram).
              type: str
              returned: success
            pool:
              description: The physical memory behind it. Devices that share memory share a pool.
              type: str
              returned: success
            total:
              description: Size of the memory, or null.
              type: int
              returned: success
            free:
              description: What nobody holds at this moment, or null.
              type: int
              returned: success
            usable:
              description: What may be lent, or null.
              type: int
              returned: success
            arch:
              description: Architecture to compile for.
              type: str
              returned: success
              sample: sm_89
            pci_bus_id:
              description: PCI address as the kernel writes it, or null.
              type: str
              returned: success
            uuid:
              description: The vendor's identifier of the device, or null.
              type: str
              returned: success
            ceiling:
              description: What may be lent if llama.cpp reports more than an estimated usable memory, or null.
              type: int
              returned: success
            source:
              description: Where the sizes come from.
              type: str
              returned: success
            environment:
              description: Environment that a process needs in order to see the device under its name.
              type: dict
              returned: success
            warnings:
              description: What a person should know of this device.
              type: list
              elements: str
              returned: success
        backend:
          description: The backend to build for.
          type: str
          returned: success
        candidates:
          description:
            - Every backend looked for, with keys C(backend), C(devices) (names), C(chosen), C(note), C(same_as) (its
              names of devices that are listed under another backend), C(class_id), C(cmake_flags), C(toolkit) (release
              of the maker's compiler), C(problems) (why a build would fail, with the cure) and C(packages) (C(build),
              C(run) and C(note), for this distribution).
            - Cards of two makers need an instance and a build for each of their backends. C(note) says so.
          type: list
          elements: dict
          returned: success
        class_id:
          description: Hosts with equal class ids may share binaries.
          type: str
          returned: success
          sample: linux-x86_64-glibc2.36-cpu-x86-64-v3
        cmake_flags:
          description: CMake switches for the backend, beyond those that every build takes.
          type: list
          elements: str
          returned: success
        links:
          description: Network interfaces, with keys C(interface), C(address), C(speed_mbps), C(mtu) and C(medium).
          type: list
          elements: dict
          returned: success
        user:
          description: The account the module ran as, with keys C(name), C(uid) and C(home).
          type: dict
          returned: success
        psutil:
          description: Whether the host's Python has psutil. Nothing here needs it.
          type: bool
          returned: success
        warnings:
          description: What a person should know of this host.
          type: list
          elements: str
          returned: success
"""

import os

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.llamafleet.rpc.plugins.module_utils._errors import FleetError
from ansible_collections.llamafleet.rpc.plugins.module_utils._hosts import Own, collect, identify
from ansible_collections.llamafleet.rpc.plugins.module_utils._runner import SystemRunner


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "backend": {
                "type": "str",
                "choices": ["auto", "cpu", "cuda", "rocm", "metal", "vulkan", "sycl"],
                "default": "auto",
            },
            "timeout": {"type": "int", "default": 30},
            "own_prefixes": {"type": "list", "elements": "path", "default": []},
            "own_units": {"type": "list", "elements": "str", "default": []},
            "own_pids": {"type": "list", "elements": "int", "default": []},
        },
        supports_check_mode=True,
    )
    params = module.params
    if params["timeout"] < 1:
        module.fail_json(msg=f"timeout: {params['timeout']} is no time; give seconds, 30 by default")
    own = Own(
        pids=tuple(params["own_pids"]),
        units=tuple(params["own_units"]),
        # /proc shows the real path of a program, also when the prefix is reached through a link.
        prefixes=tuple(os.path.realpath(prefix) for prefix in params["own_prefixes"]),
    )
    try:
        host = collect(SystemRunner(), identify(), params["backend"], own, float(params["timeout"]))
    except FleetError as error:
        module.fail_json(msg=str(error))
    module.exit_json(changed=False, ansible_facts={"llamafleet": host.to_dict()})


if __name__ == "__main__":
    main()
