# SPDX-License-Identifier: Apache-2.0
"""Load gpulock's modules from one file instead of thirty: 3 ms less for every hook.

Hot. `gpulock install` packs the compiled modules into `gpulock.bundle` beside the library. The file
begins with HEAD bytes: the interpreter's magic number, the code of this module, where the code of
each other module is, and which modules each hook imports before it works. The installed hook reads
that head and calls `use_bundle`, which runs the hook's modules at once, in the order in which
imports end, without the import system. Others wait for their import. A bundle of another
interpreter, a missing or a broken one is passed by: the modules are then found as files. Nothing
here is needed by a checkout.

Python's `os` takes 1.2 ms of its own, for names that an ordinary claim never uses. `lend_os` has
`import os` give the functions of its C module, which are the same, until another name is asked for.
"""

import posix
import sys
from marshal import loads
from posix import O_CLOEXEC, O_RDONLY, close, fstat, open, pread

TYPE_CHECKING = False
if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec
    from types import CodeType, ModuleType

    # by name: whether a package, and where its code begins and how long it is
    PackedModules = dict[str, tuple[bool, int, int]]
    PackedIndex = tuple[PackedModules, dict[str, list[str]]]

NAME = "gpulock.bundle"
HEAD = 24576  # bytes, of which 104 modules and 9 hooks take 13,200 (Python 3.11) to 14,300 (3.14)
BROKEN_BUNDLE = (OSError, ValueError, EOFError, TypeError, KeyError)


def lend_os() -> None:
    """Let `import os` give a module that loads Python's at the first name the C module lacks."""
    if "os" in sys.modules:
        return
    lent = type(sys)("os")
    names: dict[str, object] = lent.__dict__
    names.update(posix.__dict__)
    decoded = [
        (name.decode("utf-8", "surrogateescape"), value.decode("utf-8", "surrogateescape"))
        for name, value in posix.environ.items()
    ]
    names.update(__name__="os", environ=dict(decoded))

    def load_path(name: str) -> object:
        import posixpath

        names["path"] = sys.modules["os.path"] = posixpath
        return getattr(posixpath, name)

    def load(name: str) -> object:
        if name == "path":
            load_path("join")
            return names["path"]
        if sys.modules["os"] is lent:
            del sys.modules["os"]
            import os

            names.update(os.__dict__)
            sys.modules["os.path"] = os.path
        return getattr(sys.modules["os"], name)

    names["__getattr__"] = load
    sys.modules["os"] = lent
    lent_path = type(sys)("os.path")  # modules begin with `from os.path import`: sysconfig does
    lent_path.__dict__["__getattr__"] = load_path
    sys.modules["os.path"] = lent_path


class BundleFinder:
    """Find the packed modules that a hook does not always need (the import protocol)."""

    __slots__ = ("_library", "_modules", "_version")

    def __init__(self, library: str, modules: "PackedModules", version: tuple[int, int]) -> None:
        self._library = library
        self._modules = modules
        self._version = version

    def find_spec(
        self, name: str, path: object = None, target: object = None
    ) -> "ModuleSpec | None":
        """Return the spec of a packed module; None leaves it to its file (the import protocol)."""
        if name not in self._modules:
            return None
        try:
            fd = open(f"{self._library}/{NAME}", O_RDONLY | O_CLOEXEC)
            try:
                if bundle_version(fd) != self._version:
                    return None  # it was replaced: the index is another file's
                code = read_packed_code(fd, self._modules[name])
            finally:
                close(fd)
        except BROKEN_BUNDLE:
            return None
        is_package = self._modules[name][0]
        spec = type(sys.__spec__)(name, self, is_package=is_package, loader_state=code)  # type: ignore[arg-type]
        if spec.submodule_search_locations is not None:
            spec.submodule_search_locations.append(f"{self._library}/{name.replace('.', '/')}")
        return spec

    def create_module(self, spec: "ModuleSpec") -> None:
        """Leave the making of the module to the interpreter (the import protocol)."""

    def exec_module(self, module: "ModuleType") -> None:
        """Run the packed code in the module (the import protocol)."""
        assert module.__spec__ is not None
        exec(module.__spec__.loader_state, module.__dict__)


def use_bundle(fd: int, index: "PackedIndex", library: str, hook: str) -> bool:
    """Import from an open bundle in `library` from now on; return whether it is whole.

    What the module `hook` imports is imported when this returns, and `fd` is closed. Raises what
    those modules raise.
    """
    try:
        try:
            modules, hooks = index
            packed = [(name, read_packed_code(fd, modules[name])) for name in hooks[hook]]
            finder = BundleFinder(library, modules, bundle_version(fd))
        finally:
            close(fd)
    except BROKEN_BUNDLE:
        return False
    lend_os()
    for name, code in packed:
        run_packed_module(library, name, code, modules[name][0])
    sys.meta_path.insert(0, finder)
    return True


def run_packed_module(library: str, name: str, code: "CodeType", is_package: bool) -> None:
    """Make one module of those that others import; its package is there."""
    sys.modules[name] = module = type(sys)(name)
    if is_package:
        module.__path__ = [f"{library}/{name.replace('.', '/')}"]
    package, _, own = name.rpartition(".")
    if package:
        setattr(sys.modules[package], own, module)
    exec(code, module.__dict__)


def bundle_version(fd: int) -> tuple[int, int]:
    """Return what tells a bundle from the one that takes its place."""
    info = fstat(fd)
    return info.st_ino, info.st_mtime_ns


def read_packed_code(fd: int, module: tuple[bool, int, int]) -> "CodeType":
    """Return the code of one module; raise OSError, ValueError, EOFError or TypeError."""
    _, offset, size = module
    code: CodeType = loads(pread(fd, size, offset))
    return code
