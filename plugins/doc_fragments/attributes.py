# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What every module says about check mode, diff mode, platform and second runs, in one wording."""

from __future__ import annotations


class ModuleDocFragment:
    # The base: a module that uses it fills in ``support`` (and ``details``) of the first three under its own
    # ``attributes:``, or uses one of the fragments below, which do so.
    DOCUMENTATION = r"""
options: {}
attributes:
  check_mode:
    description: Can run in C(check_mode) and tell what it would change, without changing anything.
  diff_mode:
    description: Returns what it changed, or would change in check mode, when in diff mode.
  idempotent:
    description:
      - When run twice in a row outside check mode, with the same arguments, the second run reports no change.
      - This assumes that the host was not changed in between by anything else.
  platform:
    description: Systems on which the module can run.
    support: full
    platforms: posix
"""

    # A module that only looks: nothing can change, so nothing can differ.
    INFO_MODULE = r"""
options: {}
attributes:
  check_mode:
    support: full
    details:
      - This module only reads, so it does the same in and outside of check mode.
  diff_mode:
    support: N/A
    details:
      - This module does not modify state.
  idempotent:
    support: full
    details:
      - This module does not modify state.
"""

    # Like INFO_MODULE, for a module whose whole result is C(ansible_facts).
    FACTS_MODULE = r"""
options: {}
attributes:
  check_mode:
    support: full
    details:
      - This module only reads, so it does the same in and outside of check mode.
  diff_mode:
    support: N/A
    details:
      - This module does not modify state.
  facts:
    description: The module returns its findings as C(ansible_facts).
    support: full
  idempotent:
    support: full
    details:
      - This module does not modify state.
"""

    # A module that writes files or ends processes, and does so only where something differs.
    STATE_MODULE = r"""
options: {}
attributes:
  check_mode:
    support: full
  diff_mode:
    support: full
  idempotent:
    support: full
"""

    # The platform of the base, said on purpose.
    POSIX = r"""
options: {}
attributes:
  platform:
    support: full
    platforms: posix
"""

    # For readers of /proc and /sys.
    LINUX = r"""
options: {}
attributes:
  platform:
    platforms: linux
"""

    # A module that belongs to the action group, so that C(module_defaults) reach it.
    ACTIONGROUP_ALL = r"""
options: {}
attributes:
  action_group:
    description: Use C(group/llamafleet.rpc.all) in C(module_defaults) to set defaults for this module.
    support: full
    membership:
      - llamafleet.rpc.all
"""
