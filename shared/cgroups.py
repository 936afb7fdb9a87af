"""The memory cgroup of this process, v1, v2 or hybrid: where its files are, its limit, what it uses.

Used by shared/kernel.py only. Nothing here raises; what cannot be read is None.
"""

from __future__ import annotations

from pathlib import Path

from shared.kernel_files import field_of, line_of, number_of, text_of

# cgroup v1 says "no limit" as the largest multiple of a page; nobody has an exbibyte.
_UNLIMITED = 1 << 60


def memory_levels(root: Path) -> list[Path]:
    """Our memory cgroup's folder and those above it, as far as this container sees; none when there is none."""
    own = _own_cgroups(text_of(root / "proc/self/cgroup"))
    for kind, at, mounted in _cgroup_mounts(text_of(root / "proc/self/mountinfo")):
        if kind in own:
            top = root / mounted.lstrip("/")
            below = _relative(own[kind], at)
            levels = [top / below, *(top / part for part in Path(below).parents)] if below else [top]
            if found := [level for level in levels if _has_memory(level)]:
                return found
    return []


def _own_cgroups(text: str | None) -> dict[str, str]:
    """{"v1": path, "v2": path} from /proc/self/cgroup; v1 only when it has the memory controller."""
    found = {}
    for line in (text or "").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            found["v2"] = path
        elif "memory" in controllers.split(","):
            found["v1"] = path
    return found


def _cgroup_mounts(text: str | None) -> list[tuple[str, str, str]]:
    """(v1 or v2, path of the hierarchy that is mounted, where), the memory controller of v1 before a hybrid's v2."""
    found = []
    for line in (text or "").splitlines():
        before, _, after = line.partition(" - ")
        fields, kind = before.split(" "), after.split(" ")
        if len(fields) < 5 or len(kind) < 3:
            continue
        if kind[0] == "cgroup" and "memory" in kind[2].split(","):
            found.append(("v1", fields[3], fields[4]))
        elif kind[0] == "cgroup2":
            found.append(("v2", fields[3], fields[4]))
    return sorted(found)


def _relative(path: str, mounted: str) -> str:
    """A cgroup's path below what is mounted; "" for the mounted folder itself.

    In a container without a cgroup namespace both begin with the container's own path; with one the path is "/".
    A path that leads out ("/../x") or elsewhere is not visible from here: the mounted folder is then the nearest.
    """
    if ".." in path.split("/"):
        return ""
    if mounted == "/":
        return path.strip("/")
    inside = path == mounted or path.startswith(mounted + "/")
    return path[len(mounted) :].strip("/") if inside else ""


def _has_memory(folder: Path) -> bool:
    return any((folder / name).exists() for name in ("memory.current", "memory.usage_in_bytes", "memory.events"))


def limit_of(folder: Path) -> int | None:
    """Bytes that one cgroup may use, None for no limit."""
    limit = number_of(line_of(folder / "memory.max") or line_of(folder / "memory.limit_in_bytes"))
    return None if limit is None or limit >= _UNLIMITED else limit


def usage_of(folder: Path) -> int | None:
    """Bytes that one cgroup uses, the file cache left out."""
    new = number_of(line_of(folder / "memory.current"))
    used = number_of(line_of(folder / "memory.usage_in_bytes")) if new is None else new
    if used is None:
        return None
    stat, prefix = text_of(folder / "memory.stat"), "total_" if new is None else ""
    return max(used - sum(field_of(stat, f"{prefix}{name}_file") or 0 for name in ("active", "inactive")), 0)
