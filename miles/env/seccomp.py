"""The system calls that commands of the model do not get, as a classic BPF program (seccomp(2), linux/filter.h) for `bwrap --seccomp`.

Namespaces, capabilities and limits confine already; this takes away what they do not count (memory that no limit sees: memfd, System V shared
memory and message queues), what has had most of the kernel's holes (io_uring, bpf, userfaultfd, keyrings, mounts), and typing into a terminal (TIOCSTI).
"""

from __future__ import annotations

import errno
import struct

# name: (x86_64, aarch64); numbers from asm/unistd_64.h and asm-generic/unistd.h
REFUSED = {
    "shmget": (29, 194), "msgget": (68, 186), "semget": (64, 190), "memfd_create": (319, 279), "memfd_secret": (447, 447),
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51), "unshare": (272, 97), "setns": (308, 268),
    "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430), "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433),
    "mount_setattr": (442, 442), "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265), "fanotify_init": (300, 262),
    "keyctl": (250, 219), "add_key": (248, 217), "request_key": (249, 218),
    "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427),
    "kexec_load": (246, 104), "kexec_file_load": (320, 294), "init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106),
    "swapon": (167, 224), "swapoff": (168, 225), "quotactl": (179, 60), "acct": (163, 89),
}
_IOCTL = (16, 29)
_TERMINAL = (0x5412, 0x541C)  # TIOCSTI, TIOCLINUX
_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column above, AUDIT_ARCH
_X32 = 0x40000000  # the other numbering of x86_64
_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050000 | errno.EPERM
_NR, _ARCH, _ARG1 = 0, 4, 24  # offsets in struct seccomp_data; both machines are little-endian


def program(machine: str) -> bytes | None:
    """The filter for `machine` (as platform.machine() names it); None where the numbers are not known."""
    if machine not in _MACHINES:
        return None
    column, arch = _MACHINES[machine]
    calls = sorted(numbers[column] for numbers in REFUSED.values())
    code = [(_LOAD, 0, 0, _ARCH), (_EQUAL, 1, 0, arch), (_RETURN, 0, 0, _REFUSE),  # 32-bit calls have other numbers
            (_LOAD, 0, 0, _NR), (_AT_LEAST, len(calls) + 4, 0, _X32)]
    code += [(_EQUAL, len(calls) - i + 3, 0, number) for i, number in enumerate(calls)]
    code += [(_EQUAL, 0, 4, _IOCTL[column]), (_LOAD, 0, 0, _ARG1), (_EQUAL, 1, 0, _TERMINAL[0]), (_EQUAL, 0, 1, _TERMINAL[1]),
             (_RETURN, 0, 0, _REFUSE), (_RETURN, 0, 0, _ALLOW)]
    return b"".join(struct.pack("<HBBI", *line) for line in code)
