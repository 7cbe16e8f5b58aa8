"""Runs a module of Umbra under any Python from 3.10 on, with Umbra imported from where it lies.

    python .../run_module.py FOLDER_OF_UMBRA FOLDER_OF_MSGPACK MODULE [ARGUMENT ...]

Only these two packages come from Umbra's own Python environment, none of its others. The module is
imported, and its `main` called with the arguments.
"""

import importlib
import importlib.util
import os
import sys


def command_line(python: str, module: str, *arguments: str) -> list[str]:
    """Return the command line above, from any process that has imported Umbra."""
    import msgpack

    packages = sys.modules["umbra"], msgpack
    script, *folders = map(os.path.abspath, (__file__, *(str(p.__file__) for p in packages)))
    return [python, script, *map(os.path.dirname, folders), module, *arguments]


def _load(name: str, folder: str) -> None:
    """Import the package `name` from `folder`, and nothing else beside it."""
    spec = importlib.util.spec_from_file_location(
        name, f"{folder}/__init__.py", submodule_search_locations=[folder]
    )
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


def main() -> None:
    """Run the module that the command line names."""
    if sys.version_info < (3, 10):  # noqa: UP036 - it need not be the Python that Umbra is for
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        sys.exit(f"environment.python must be Python 3.10 or newer, and is {version}")
    _, umbra, msgpack, module, *arguments = sys.argv
    del sys.path[0]  # this folder, whose modules have common names
    _load("umbra", umbra)  # the one that started us, if there are two
    if importlib.util.find_spec("msgpack") is None:
        _load("msgpack", msgpack)
    importlib.import_module(module).main(*arguments)


if __name__ == "__main__":
    main()
