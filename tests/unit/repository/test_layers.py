# SPDX-License-Identifier: Apache-2.0
"""No module imports what its layer must not, at its top or inside a function."""

from __future__ import annotations

import sys
from pathlib import Path

import grimp
import pytest

from tests.layers import exporter_violation, violation


def broken_rules(package: str = "gpulock") -> list[str]:
    graph = grimp.build_graph(
        package,
        include_external_packages=True,
        exclude_type_checking_imports=True,
        cache_dir=None,
    )
    rule_of = violation if package == "gpulock" else exporter_violation
    return [
        f"{importer} imports {imported}: {rule}"
        for importer in sorted(graph.modules)
        if importer.partition(".")[0] == package
        for imported in sorted(graph.find_modules_directly_imported_by(importer))
        if (rule := rule_of(importer, imported))
    ]


def test_every_import_of_gpulock_keeps_to_its_layer() -> None:
    assert broken_rules() == []


def test_every_import_of_the_exporter_keeps_to_its_order() -> None:
    assert broken_rules("gpulock_exporter") == []


def test_a_forbidden_import_is_found_wherever_it_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted = tmp_path / "gpulock"
    for folder in (planted, planted / "cli", planted / "sge", planted / "alloc"):
        folder.mkdir()
        (folder / "__init__.py").touch()
    (planted / "alloc" / "claim.py").write_text(
        "from __future__ import annotations\n"
        "import os, filelock\n"
        "TYPE_CHECKING = False\n"
        "if TYPE_CHECKING:\n    from typing import Any\n"
        "def late() -> None:\n    import json\n    from gpulock.cli import x\n"
    )
    (planted / "sge" / "prolog.py").write_text("from gpulock.alloc import claim\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, "gpulock", raising=False)

    assert broken_rules() == [
        "gpulock.alloc.claim imports filelock: hot modules do not import filelock",
        "gpulock.alloc.claim imports gpulock.cli: hot does not import cold",
        "gpulock.alloc.claim imports json: hooks cannot afford json",
    ]


@pytest.mark.parametrize(
    ("importer", "imported"),
    [
        ("gpulock.alloc.claim", "gpulock.store.owner"),
        ("gpulock.sge.prolog", "gpulock.alloc.claim"),
        ("gpulock.sge.prolog", "gpulock.sge.request"),
        ("gpulock.alloc.claim", "_socket"),
        ("gpulock.daemon.reconcile.adopt", "gpulock.sge.request"),
        ("gpulock.daemon.reconcile.adopt", "psutil"),
        ("gpulock.daemon.reconcile.adopt", "json"),
        ("gpulock.cli.status.status", "gpulock.daemon.history.files"),
        ("gpulock.cli", "click"),
    ],
)
def test_an_import_that_points_down_is_allowed(importer: str, imported: str) -> None:
    assert violation(importer, imported) is None


@pytest.mark.parametrize(
    ("importer", "imported"),
    [
        ("gpulock", "gpulock.daemon"),
        ("gpulock.alloc.claim", "gpulock.daemon.reconcile.adopt"),
        ("gpulock.alloc.claim", "gpulock.install"),
        ("gpulock.alloc.claim", "gpulock.sge.request"),
        ("gpulock.sge.prolog", "gpulock.slurm.prolog"),
        ("gpulock.slurm.prolog", "gpulock.sge"),
        ("gpulock.alloc.claim", "psutil"),
        ("gpulock.alloc.claim", "typing"),
        ("gpulock.sge.prolog", "subprocess"),
        ("gpulock.daemon.reconcile.adopt", "gpulock.report"),
        ("gpulock.daemon.reconcile.adopt", "click"),
        ("gpulock.simulate", "pynvml"),
        ("gpulock.store.boot", "gpulock.node.devices"),
        ("gpulock.daemon.history.collect", "gpulock.daemon.health.policy"),
        ("gpulock.cli.status.status", "gpulock.cli.admin.reap"),
    ],
)
def test_an_import_that_points_up_or_across_is_refused(importer: str, imported: str) -> None:
    assert violation(importer, imported) is not None


@pytest.mark.parametrize(
    ("importer", "imported", "rule"),
    [
        ("nvml.source", "pynvml", None),
        ("state.join", "pynvml", "state does not import pynvml"),
        ("telemetry", "prometheus_client.registry", "the root does not import prometheus_client"),
        ("worker.process", "gpulock_exporter.nvml.source", None),
        ("app.exporter", "gpulock_exporter.nvml.source", "only the worker imports nvml"),
        (
            "state.collector_state",
            "gpulock_exporter.files.sample_file",
            "state stands before files",
        ),
        ("files.sample_file", "gpulock_exporter.state.collector_state", None),
        ("clock", "gpulock_exporter.app.program", "the root stands before app"),
        ("state.join", "gpulock.alloc.states", None),
        ("state.join", "gpulock.cli", "the exporter imports no gpulock.cli"),
        ("web.http", "asyncio", None),
    ],
)
def test_the_order_of_the_exporter_is_told(importer: str, imported: str, rule: str | None) -> None:
    assert exporter_violation(f"gpulock_exporter.{importer}", imported) == rule
