#!/usr/bin/python3 -IS
# SPDX-License-Identifier: Apache-2.0
"""Play qconf, qselect, qstat and gethostname from files that a real Grid Engine printed.

The files lie in the folder `state` beside: `sq`, `sc`, `se`, `sconf` and, where there is one,
`sconf-node1`; `release` is what `-help` prints, a shepherd's as well. One queue, gpu.q, on host
node1, and on each other of its hostlist that has a `sconf-HOST`; no queue without `sq`. What is set
is written back into them, of node1 alone. Its execd takes a changed configuration at once. Of one
of its own where it had none it hears when it is restarted (`unknown` stands until then), and it
takes none while there is a file `deaf`. It reports at once what its load sensor would, and a new
load at each look. The global configuration may not be written.
"""

from __future__ import annotations

import os
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


def queue(domain: str, key: str, value: str | None) -> None:
    """Set an attribute as -rattr does, or (None) purge a host's own."""
    default, _, override = get("sq", key).partition(f",[{HOST}=")
    override = override.removesuffix("]")
    if domain == QUEUE:
        default = value or "NONE"
    else:
        override = value or ""
    put("sq", key, f"{default},[{HOST}={override}]" if override else default)


def host_value(option: str, key: str, element: str) -> None:
    """Set one element of a host's list as -mattr does, or take it away as -dattr does."""
    values = {one.partition("=")[0]: one for one in get("se", key).split(",")}
    values.pop("NONE", None)
    name = element.partition("=")[0]
    if option == "-dattr":
        del values[name]
    else:
        values[name] = element
    put("se", key, ",".join(values.values()) or "NONE")


def of_instance(host: str) -> str:
    """Return -sq of the queue on a host: its own values in place of the queue's."""
    lines: list[str] = []
    for line in read("sq").replace("\\\n", " ").splitlines():
        default, _, others = line.partition(",[")
        mine = others.startswith(f"{host}=")
        own = others.removeprefix(f"{host}=").removesuffix("]")
        lines.append(f"{line.split()[0]} {own}" if mine else default)
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
    own = f"sconf-{HOST}"
    if option == "-sq":
        return of_instance(words[0].partition("@")[2]) if "@" in words[0] else read("sq")
    if option == "-sconf":
        return read("sconf" if words[0] == "global" else f"sconf-{words[0]}")
    if option == "-se":
        take_configuration()
        deaf = os.path.exists(path_of("deaf"))
        return read("se") if deaf else read("se").replace("4.750488", f"{time.monotonic():.6f}")
    if option == "-sc":
        return read("sc")
    if option == "-sel":
        return HOST
    if option == "-sconfl":
        named = [name[6:] for name in os.listdir(path_of("")) if name.startswith("sconf-")]
        if not named:
            raise SystemExit("no config defined")
        return "\n".join(named)
    if option in ("-rattr", "-purge") and words[0] == "queue":
        queue(words[-1], words[1], words[2] if option == "-rattr" else None)
    elif option in ("-mattr", "-dattr"):
        host_value(option, words[1], words[2])
    elif option in ("-Mc", "-Mconf", "-Aconf"):
        load(option, words[0])
    elif option == "-dconf":
        os.unlink(path_of(own))
    else:
        raise SystemExit(f"what is {option}?")
    return ""


def name_queue() -> str:
    if not os.path.exists(path_of("sq")):
        raise SystemExit("no cqueue list defined")
    return QUEUE


def name_instances() -> list[str]:
    """Return what qselect prints; without a queue it fails and says nothing, as qstat does."""
    if not os.path.exists(path_of("sq")):
        raise SystemExit(1)
    hosts = get("sq", "hostlist").split()
    there = [host for host in hosts if host == HOST or os.path.exists(path_of(f"sconf-{host}"))]
    return [f"{QUEUE}@{host}" for host in there]


def main(argv: list[str]) -> str:
    program = os.path.basename(argv[0])
    if argv[1:] == ["-help"]:
        ports = {"SGE_QMASTER_PORT", "SGE_EXECD_PORT"} <= {*os.environ}
        if read("release").startswith("OCS") and not ports:
            raise SystemExit("error: could not get environment variable SGE_QMASTER_PORT")
        return read("release")
    if os.path.exists(path_of("down")):
        raise SystemExit("error: commlib error: got select error (Connection refused)")
    if argv[1:] == ["-sql"]:
        return name_queue()
    if program == "qconf":
        return qconf(argv[1], argv[2:])
    if program == "qstat":
        mine = next(iter(name_instances()), "")
        return f"{mine} BIP 0/0/8 0.62 lx-amd64 {read('states')}"
    return "\n".join(name_instances()) if program == "qselect" else HOST


if __name__ == "__main__":
    print(main(sys.argv))
