# SPDX-License-Identifier: Apache-2.0
"""A changed web configuration or certificate is served by; a bad one is not, and that is said."""

from __future__ import annotations

import errno
import os
import shutil
import ssl
from pathlib import Path

import pytest
from gpulock_exporter.web.server import WebSettings
from gpulock_exporter.webconfig import reload
from gpulock_exporter.webconfig.config import WebConfigFiles, load_web_config
from gpulock_exporter.webconfig.reload import Reloader

from tests.exporter.certificates import make_authority, make_certificate, trusting
from tests.exporter.inprocess import running
from tests.exporter.wire import SOUND, dial, exchange
from tests.support.faults import raising
from tests.support.wait import wait_until

TLS = "tls_server_config:\n  cert_file: server.pem\n  key_file: server.key\n"
NEWER = "  client_ca_file: ca.pem\n  client_auth_type: RequireAndVerifyClientCert\n"


@pytest.fixture
def config(tmp_path: Path) -> Path:
    authority = make_authority(tmp_path, "ca")
    make_certificate(tmp_path, "server", authority)
    make_certificate(tmp_path, "next", authority)
    path = tmp_path / "web-config.yml"
    path.write_text(TLS)
    return path


def replace(path: Path, text: str) -> None:
    """Replace a file as a careful editor does."""
    beside = path.with_name(".beside")
    beside.write_text(text)
    beside.rename(path)


def is_verifying(settings: WebSettings | None) -> bool:
    assert settings is not None
    assert settings.tls is not None
    return settings.tls.verify_mode is ssl.CERT_REQUIRED


def test_a_change_is_seen_whether_written_or_renamed_and_nothing_is_read_without_one(
    config: Path,
) -> None:
    log: list[str] = []
    reloader = Reloader(str(config), log.append)
    served = reloader.settings
    assert reloader.look() is None
    assert reloader.settings is served
    replace(config, TLS + NEWER)
    assert is_verifying(reloader.look())
    config.write_text(TLS)
    assert not is_verifying(reloader.look())
    assert reloader.last_reload_successful
    assert log == [f"{config}: reloaded"] * 2


def test_a_bad_change_keeps_the_old_one_and_says_so_once(config: Path) -> None:
    log: list[str] = []
    reloader = Reloader(str(config), log.append)
    served = reloader.settings
    replace(config, TLS + "rate_limit: {burst: 1}\n")
    assert [reloader.look(), reloader.look()] == [None, None]
    assert reloader.settings is served
    assert not reloader.last_reload_successful
    assert len(log) == 1
    assert f"not reloaded, the old one stays: {config}: this file: rate_limit" in log[0]
    replace(config, TLS)
    assert reloader.look() is not None
    assert reloader.last_reload_successful


def test_what_failed_for_a_passing_reason_is_tried_again(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log: list[str] = []
    reloader = Reloader(str(config), log.append)
    replace(config, TLS + NEWER)
    with monkeypatch.context() as broken:
        broken.setattr(
            ssl.SSLContext, "load_cert_chain", raising(OSError(errno.EMFILE, "Too many open files"))
        )
        assert [reloader.look(), reloader.look()] == [None, None]
    assert not reloader.last_reload_successful
    assert len(log) == 1
    assert reloader.look() is not None
    assert reloader.last_reload_successful


@pytest.mark.parametrize("name", ["server", "later"])
def test_a_certificate_and_its_key_are_served_once_both_are_there(name: str, config: Path) -> None:
    reloader = Reloader(str(config), lambda _: None)
    folder = config.parent
    replace(config, TLS.replace("server.", f"{name}."))  # `later` names what is not there yet
    assert (reloader.look() is None) == (name == "later")
    shutil.copy(folder / "next.pem", folder / f"{name}.pem")
    assert reloader.look() is None
    assert not reloader.last_reload_successful
    shutil.copy(folder / "next.key", folder / f"{name}.key")
    assert reloader.look() is not None
    assert reloader.last_reload_successful


@pytest.mark.parametrize("text", ["", "# all is commented out\n"])
def test_a_file_that_is_empty_for_long_takes_away_no_tls(config: Path, text: str) -> None:
    log: list[str] = []
    reloader = Reloader(str(config), log.append)
    config.write_text(text)
    assert [reloader.look(), reloader.look()] == [None, None]
    assert not reloader.last_reload_successful
    assert len(log) == 1 and "it is empty, and TLS or passwords are in force" in log[0]
    config.write_text(TLS)
    assert reloader.look() is not None


def test_whatever_a_load_raises_the_next_good_file_is_served(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log: list[str] = []
    reloader = Reloader(str(config), log.append)
    with monkeypatch.context() as broken:
        broken.setattr(reload, "load_web_config", raising(TypeError("nobody thought of it")))
        replace(config, TLS + NEWER)
        assert reloader.look() is None
    assert not reloader.last_reload_successful and "nobody thought of it" in log[0]
    assert is_verifying(reloader.look())


def test_a_certificate_behind_a_link_is_followed(config: Path) -> None:
    # As Kubernetes and certbot do it: the path stays, what it leads to changes.
    folder = config.parent
    for kind in ("pem", "key"):
        (folder / f"server.{kind}").rename(folder / f"first.{kind}")
        (folder / f"server.{kind}").symlink_to(f"first.{kind}")
    reloader = Reloader(str(config), lambda _: None)
    for kind in ("pem", "key"):
        (folder / f"link.{kind}").symlink_to(f"next.{kind}")
        os.replace(folder / f"link.{kind}", folder / f"server.{kind}")
    assert reloader.look() is not None


def test_a_server_serves_the_new_certificate_and_drops_no_request(config: Path) -> None:
    folder = config.parent
    log: list[str] = []
    reloader = Reloader(str(config), log.append)

    def name(port: int) -> object:
        with dial(port, trusting(folder / "ca.pem")) as one:
            assert isinstance(one, ssl.SSLSocket)
            certificate = one.getpeercert()  # before the server closes: 3.13 knows none then
            assert exchange(one, SOUND)[0].startswith(b"HTTP/1.0 200 ")
            assert certificate is not None
            return certificate["subject"]

    with running(settings=reloader.settings) as server:
        reloader.start(server.server.adopt, 0.02)
        assert name(server.port) == ((("commonName", "server"),),)
        shutil.copy(folder / "next.pem", folder / "server.pem")
        shutil.copy(folder / "next.key", folder / "server.key")
        wait_until(
            lambda: name(server.port) == ((("commonName", "next"),),), why="the next certificate"
        )
        replace(config, "nonsense: 1\n")
        wait_until(lambda: not reloader.last_reload_successful, why="a reload that fails")
        assert name(server.port) == ((("commonName", "next"),),)
        reloader.stop()


def test_a_file_that_is_being_written_in_its_place_opens_the_exporter_to_nobody(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part of it may be a sound file, without TLS and without passwords."""
    reloader = Reloader(str(config), lambda _: None)
    served = reloader.settings

    def load_half(path: str, files: WebConfigFiles, secured: bool) -> tuple[WebSettings, str]:
        monkeypatch.setattr(reload, "load_web_config", load_web_config)
        loaded = load_web_config(path, files, secured)
        config.write_text(TLS + NEWER)
        return loaded

    monkeypatch.setattr(reload, "load_web_config", load_half)
    config.write_text("http_server_config:\n  http2: true\n")
    assert (reloader.look(), reloader.settings) == (None, served)
    assert reloader.last_reload_successful
    assert is_verifying(reloader.look())


def test_a_pipe_in_place_of_a_file_does_not_hold_up_the_reload(config: Path) -> None:
    adopted: list[WebSettings] = []
    reloader = Reloader(str(config), lambda _: None)
    reloader.start(adopted.append, 0.02)
    config.unlink()
    os.mkfifo(config)
    wait_until(lambda: not reloader.last_reload_successful, why="a reload that fails")
    replace(config, TLS)
    wait_until(lambda: len(adopted) == 1, why="other settings")
    reloader.stop()
