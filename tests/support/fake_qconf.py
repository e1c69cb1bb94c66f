#!/usr/bin/python3 -IS
# SPDX-License-Identifier: Apache-2.0
"""Play qconf, qselect and qstat from files that a real Grid Engine printed.

The files lie in the folder `state` beside: `sq`, `sc`, `se`, `sconf` and, where there is one,
`sconf-node1`; `release` is what `-help` prints, a shepherd's as well. One queue, gpu.q, on host
node1; no queue without `sq`. What is set is written back into them. A host group is in
`hgrp-@NAME`; a host that joins or leaves one has the hooks of before until their attribute is
written again. Its execd takes a changed configuration at once. Of one of its own where it had none
it hears when it is restarted (`unknown` stands until then), and it takes none while there is a file
`deaf`. It reports at once what its load sensor would, and a new load at each look. The global
configuration may not be written.
"""

from __future__ import annotations

import os
import re
import sys
import time

HERE = os.path.dirname(os.path.abspath(__file__))
HOST, QUEUE = "node1", "gpu.q"


def path_of(name: str) -> str:
    return f"{HERE}/state/{name}"


def read(name: str) -> str:
    with open(path_of(name), encoding="utf-8") as file:
        return file.read()


def write(name: str, text: str) -> None:
    with open(path_of(name), "w", encoding="utf-8") as file:
        file.write(text)


def get(name: str, key: str) -> str:
    for line in read(name).replace("\\\n", " ").splitlines():
        if line.split(None, 1)[:1] == [key]:
            return " ".join(line.split()[1:])
    raise SystemExit(f"no {key}")


def put(name: str, key: str, value: str) -> None:
    lines = read(name).replace("\\\n", " ").splitlines()
    new = [f"{key:<21} {value}" if line.split(None, 1)[:1] == [key] else line for line in lines]
    write(name, "\n".join(new) + "\n")


def overrides(line: str) -> tuple[str, dict[str, str]]:
    """Split `DEFAULT,[DOMAIN=VALUE],...`."""
    default, _, rest = line.partition(",[")
    parts = [part.partition("=") for part in rest.removesuffix("]").split("],[") if part]
    return default, {domain: value for domain, _, value in parts}


def queue(domain: str, key: str, value: str | None) -> None:
    """Set an attribute as -rattr does, or (None) purge a host's or a group's own."""
    default, found = overrides(get("sq", key))
    _, at, name = domain.partition("@")
    if not at:
        default = value or "NONE"
    elif value is None:
        if found.pop(name, None) is None:
            return  # and no instance is looked at again
    elif name.startswith("@") and not os.path.exists(path_of(f"hgrp-{name}")):
        raise SystemExit(f'Did not modify "{key}" for host group "{name}" which does not exist.')
    else:
        found[name] = value
    forget_values([key])
    put("sq", key, default + "".join(f",[{one}={text}]" for one, text in found.items()))


def group(option: str, name: str, words: list[str]) -> str:
    """Show or change a host group. Of a queue's hosts none has another value by that yet."""
    path = f"hgrp-{name}"
    if option == "-dhgrp":
        if f"[{name}=" in read("sq"):
            raise SystemExit(f'denied: these cluster queues still reference "{name}": {QUEUE}')
        os.unlink(path_of(path))
        return ""
    keep_values()
    hosts = [one for one in group_hosts(name) if one not in words] + (
        words if option == "-aattr" else []
    )
    write(path, f"group_name {name}\nhostlist {' '.join(hosts) or 'NONE'}\n")
    return ""


def group_hosts(name: str) -> list[str]:
    words = read(f"hgrp-{name}").partition("hostlist")[2].split()
    return [word for word in words if word != "NONE"]


def value_here(key: str, line: str) -> str:
    """Return what qmaster worked out for the host when the attribute was last written."""
    kept = path_of(f"kept-{key}")
    if os.path.exists(kept):
        with open(kept, encoding="utf-8") as file:
            before, value = file.read().splitlines()
        if before == line:
            return value
    default, found = overrides(line)
    groups = [name for name in found if name.startswith("@") and HOST in group_hosts(name)]
    if HOST in found:
        return found[HOST]
    return found[groups[0]] if len(groups) == 1 else default  # of several the queue is in state c


def keep_values() -> None:
    """Have the hooks of the host stay what they are until their attribute is written."""
    for key in ("prolog", "epilog"):
        line = get("sq", key)
        write(f"kept-{key}", f"{line}\n{value_here(key, line)}\n")


def forget_values(keys: list[str]) -> None:
    for key in keys:
        if os.path.exists(path_of(f"kept-{key}")):
            os.unlink(path_of(f"kept-{key}"))


def host_value(key: str, element: str) -> None:
    """Set one element of a host's list as -mattr does."""
    values = {one.partition("=")[0]: one for one in get("se", key).split(",")}
    values.pop("NONE", None)
    values[element.partition("=")[0]] = element
    put("se", key, ",".join(values.values()))


def of_instance() -> str:
    """Return -sq of the queue on the host: its own values in place of the queue's."""
    lines: list[str] = []
    for line in read("sq").replace("\\\n", " ").splitlines():
        key, _, rest = line.partition(" ")
        value = " ".join(rest.split())
        own = value_here(key, value) if key in ("prolog", "epilog") else value
        lines.append(f"{key} {own}")
    return "\n".join(lines)


def load(option: str, path: str) -> None:
    with open(path, encoding="utf-8") as file:
        text = file.read()
    name = os.path.basename(path)
    if option == "-Aconf":
        write("unknown", "")
    elif name == "global":
        raise SystemExit("somebody else's edits of the global configuration are lost by that")
    write("sc" if option == "-Mc" else f"sconf-{name}", text)
    if option != "-Mc":
        take_configuration()


def take_configuration() -> None:
    """Have execd start or stop the load sensor, and report."""
    if os.path.exists(path_of("unknown")) or os.path.exists(path_of("deaf")):
        return
    own = path_of(f"sconf-{HOST}")
    runs = os.path.exists(own) and "/prolog/sge-sensor" in read(f"sconf-{HOST}")
    values = get("se", "load_values").split(",")
    others = [one for one in values if "gpu.free=" not in one]
    if runs is (len(others) == len(values)):
        put("se", "load_values", ",".join([*others, *(["gpu.free=8"] if runs else [])]))


def qconf(option: str, words: list[str]) -> str:
    if option in SHOWN:
        shown = SHOWN[option](words[0] if words else "")
        whole = os.environ.get("SGE_SINGLE_LINE") == "1"
        return re.sub(r"[ \t]*\\\n[ \t]*", " ", shown) if whole else shown
    if words[0] == "hostgroup":
        return group(option, words[3], [words[2]])
    change(option, words)
    return ""


def show_queue(name: str) -> str:
    return of_instance() if "@" in name else read("sq")


def show_host(_: str) -> str:
    take_configuration()
    deaf = os.path.exists(path_of("deaf"))
    return read("se") if deaf else read("se").replace("4.750488", f"{time.monotonic():.6f}")


def list_named(prefix: str, none: str) -> str:
    """Return the names of the files that begin so; qconf fails where there is none."""
    length = len(prefix)
    named = [name[length:] for name in os.listdir(path_of("")) if name.startswith(prefix)]
    if not named:
        raise SystemExit(f"no {none} defined")
    return "\n".join(named)


def list_group(name: str) -> str:
    return " ".join(group_hosts(name))


SHOWN = {
    "-sq": show_queue,
    "-sconf": lambda name: read("sconf" if name == "global" else f"sconf-{name}"),
    "-se": show_host,
    "-sc": lambda _: read("sc"),
    "-sel": lambda _: HOST,
    "-sql": lambda _: name_queue(),
    "-sconfl": lambda _: list_named("sconf-", "config"),
    "-shgrpl": lambda _: list_named("hgrp-", "host group list"),
    "-shgrp_resolved": list_group,
}


def change(option: str, words: list[str]) -> None:
    if option in ("-rattr", "-purge") and words[0] == "queue":
        queue(words[-1], words[1], words[2] if option == "-rattr" else None)
    elif option == "-mattr":
        host_value(words[1], words[2])
    elif option == "-Ahgrp":
        with open(words[0], encoding="utf-8") as file:
            text = file.read()
        write(f"hgrp-{text.split()[1]}", text)
    elif option == "-dhgrp":
        group(option, words[0], [])
    elif option in ("-Mc", "-Mconf", "-Aconf"):
        load(option, words[0])
    else:
        raise SystemExit(f"what is {option}?")


def name_queue() -> str:
    if not os.path.exists(path_of("sq")):
        raise SystemExit("no cqueue list defined")
    return QUEUE


def name_instance() -> str:
    """Return what qselect prints; without a queue it fails and says nothing, as qstat does."""
    if not os.path.exists(path_of("sq")):
        raise SystemExit(1)
    return f"{QUEUE}@{HOST}"


def main(argv: list[str]) -> str:
    program = os.path.basename(argv[0])
    if argv[1:] == ["-help"]:
        ports = {"SGE_QMASTER_PORT", "SGE_EXECD_PORT"} <= {*os.environ}
        if read("release").startswith("OCS") and not ports:
            raise SystemExit("error: could not get environment variable SGE_QMASTER_PORT")
        return read("release")
    if os.path.exists(path_of("down")):
        raise SystemExit("error: commlib error: got select error (Connection refused)")
    if program == "qconf":
        return qconf(argv[1], argv[2:])
    if program == "qstat":
        shown = f"{name_instance()} BIP 0/0/8 0.62 lx-amd64 {read('states')}"
        why = f"\tqueue {QUEUE} marked QERROR as result of job 4711's failure at host {HOST}"
        return f"{shown}{why}" if "-explain" in argv and "E" in read("states") else shown
    return name_instance()


if __name__ == "__main__":
    print(main(sys.argv))
